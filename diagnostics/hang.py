"""Why is this live process stuck? `python -m diagnostics.hang PID [--watch SECONDS] [--json FILE] [--native]`.

Looks at the threads of a Python process twice, from outside and without changing it (`diagnostics/stacks.py`), and prints for
each thread what it does and for whom it waits; a cycle of waits is named with what to do. With --watch it looks again every
SECONDS until something is stuck or the process ends; Ctrl-C ends it with the last state. Exit codes: 0 nothing is stuck or the
process has ended, 1 a deadlock or a stall, 2 bad usage or no such process, 3 something could not be observed.

In code: `inspect(pid)`, or `HangWatch` of `diagnostics/hang_watch.py` beside processes of your own.
Limits: those of `diagnostics/waiting.py` and `diagnostics/thread_states.py`. Child processes are not looked at.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from dflash.standard_output import outlive_reader
from diagnostics.output import width, write_text
from diagnostics.stacks import CannotObserve, NoSuchProcess, has_ended, take
from diagnostics.tables import Table
from diagnostics.terminal import print_detail, print_table
from diagnostics.thread_states import ThreadState
from diagnostics.waiting import HangReport, analyse

_LOOK_SECONDS = 2.0
_POLL_SECONDS = 0.2
_NOTHING = (
    "nothing is known to be stuck: queues and conditions of the program's own look idle from outside, and so do waits in C++ "
    "without --native"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Look, report, and return the exit code."""
    options = _options(arguments)
    console = Console(width=width(sys.stdout))
    if has_ended(options.pid):
        return _fail(f"there is no process {options.pid}: it has ended, or never was; ps -e lists those that run", code=2)
    watcher, ended = _Watcher(options.pid, native=options.native), False
    try:
        report = watcher.watch(options.watch) if options.watch is not None else watcher.look(_LOOK_SECONDS)
    except KeyboardInterrupt:
        console.print("interrupted; the last state seen:", highlight=False)
        report = watcher.last
    except NoSuchProcess:
        console.print(f"process {options.pid} has ended; the last state seen:", highlight=False)
        report, ended = watcher.last, True
    except CannotObserve as error:
        return _fail(str(error), code=3)
    print_report(console, report)
    if options.json is not None:
        try:
            _write_json(options.json, report)
        except OSError as error:
            return _fail(f"cannot write {options.json}: {error}", code=2)
    if report.stuck:
        return 1
    return 3 if report.not_observed and not ended else 0


def inspect(pid: int, *, seconds: float = _LOOK_SECONDS, native: bool = False) -> HangReport:
    """Look at process `pid` twice, `seconds` apart. Raises NoSuchProcess (also when it ends meanwhile) or CannotObserve."""
    return _Watcher(pid, native=native).look(seconds)


class _Watcher:
    """Looks at one process; `last` is the latest report, empty before the second look."""

    def __init__(self, pid: int, *, native: bool) -> None:
        self._pid, self._native = pid, native
        self.last = HangReport(pid=pid, still_seconds=0.0, not_observed=("the process was not looked at twice",))

    def look(self, seconds: float) -> HangReport:
        """Two looks."""
        return self._watch(seconds, looks=1)

    def watch(self, seconds: float) -> HangReport:
        """Look every `seconds` until something is stuck. Raises NoSuchProcess when the process ends."""
        return self._watch(seconds, looks=None)

    def _watch(self, seconds: float, looks: int | None) -> HangReport:
        earlier = take(self._pid, native=self._native)
        while True:
            _wait(self._pid, seconds)
            later = take(self._pid, native=self._native)
            self.last = analyse(earlier, later)
            looks = looks - 1 if looks is not None else None
            if self.last.stuck or looks == 0:
                return self.last
            earlier = later


def print_report(console: Console, report: HangReport) -> None:
    """The threads, what is stuck and what to do."""
    if report.threads:
        print_table(console, _table(report), lines_between_rows=True)
    for finding in report.findings:
        colour = "red" if finding.severity == "error" else "yellow"
        console.print(f"[bold {colour}]{finding.severity} {finding.id}[/] {escape(finding.what)}", highlight=False)
        for place in finding.others:
            print_detail(console, "where", place)
        print_detail(console, "why", finding.why)
        print_detail(console, "what to do", finding.what_to_do)
    for sentence in report.not_observed:
        console.print(f"[yellow]not observed[/]: {escape(sentence)}", highlight=False)
    if not report.stuck:
        console.print(_NOTHING, highlight=False)


def _table(report: HangReport) -> Table:
    headers = ("thread", "native id", "state", "where (torch, then the program)", "waits for")
    rows = []
    for thread in report.threads:
        where = "\n".join(dict.fromkeys((thread.at, *reversed(thread.where))))
        cells = (
            thread.name,
            str(thread.native_id),
            _state(thread),
            where,
            _waits_for(thread, report),
        )
        rows.append(cells)
    return Table(f"Threads of process {report.pid}", headers, tuple(rows))


def _state(thread: ThreadState) -> str:
    more = [name for name in thread.inside if name != thread.state]
    more += ["holds the compile lock"] * thread.holds_compile_lock + ["holds the GIL"] * thread.holds_gil
    kind = ["autograd's device thread"] * thread.device_thread
    return "\n".join([thread.state, *more, *kind])


def _waits_for(thread: ThreadState, report: HangReport) -> str:
    names = {each.native_id: each.name for each in report.threads}
    return "\n".join(
        f"{names[wait.holder]} ({wait.holder}): {wait.reason}" if wait.holder is not None else f"{wait.reason}: nobody visible"
        for wait in report.waits
        if wait.waiter == thread.native_id
    )


def _wait(pid: int, seconds: float) -> None:
    """Wait, but not longer than the process lives. Never waits *for* the process: that would take its parent's exit code."""
    end_seconds = time.monotonic() + seconds
    while (left_seconds := end_seconds - time.monotonic()) > 0:
        if has_ended(pid):
            raise NoSuchProcess(f"process {pid} ended between two looks")
        time.sleep(min(left_seconds, _POLL_SECONDS))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m diagnostics.hang", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pid", type=int, metavar="PID", help="the process to look at")
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="look every SECONDS until stuck or ended")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    parser.add_argument("--native", action="store_true", help="also read C and C++ frames (slower)")
    options = parser.parse_args(arguments)
    if options.pid <= 0:
        parser.error(f"PID {options.pid}: expected the number of a process, 1 or above")
    if options.watch is not None and not options.watch > 0:
        parser.error(f"--watch {options.watch:g}: expected seconds above 0")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no directory {options.json.absolute().parent}")
    return options


def _fail(message: str, *, code: int) -> int:
    print(f"hang: {message}", file=sys.stderr)  # noqa: T201 - a message of the command
    return code


def _write_json(path: Path, report: HangReport) -> None:
    write_text(path, json.dumps({"version": 1, **report.to_dict()}, indent=1) + "\n")


if __name__ == "__main__":
    outlive_reader()
    sys.exit(main())
