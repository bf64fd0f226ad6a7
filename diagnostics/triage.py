"""What failed, says a log: `python -m diagnostics.triage LOG... [--json FILE] [--all]`.

Reads logs of training runs (plain, of a terminal or tmux, of torchrun with its ranks mixed, cut off at either end) and prints
which known failures are in them: what each means, how sure that is, the lines, what to do, and what does not help. Tracebacks
of one signature are counted once. What is not known is grouped and called unknown. `-` reads standard input. Nothing is
changed.

Exit codes: 1 a failure was found, known or unknown (warnings that mean harm count, Ctrl-C does not) · else 2 a log could not
be read · else 3 there was nothing to read · 0 no failure in what was read. What could be read is reported in any case.

Limits: those of diagnostics/logs/. Only what is printed can be found: code that runs uncompiled in silence, or a hang without
a dump, leaves no line. A failure that the program caught, printed and survived is reported too. Imports no torch.
"""

from __future__ import annotations

import diagnostics.interrupts  # noqa: F401 - for Ctrl-C while the rest is imported

# isort: split
import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from dflash.standard_output import outlive_reader
from diagnostics.environments.masking import masked
from diagnostics.logs.encodings import Unreadable
from diagnostics.logs.groups import Evidence, Group, Groups
from diagnostics.logs.parts import Read, read_log
from diagnostics.logs.search import LogSearch
from diagnostics.output import ended_plainly, output_file, printable, say, write_text
from diagnostics.terminal import ReportConsole, print_detail

_COLOURS = {"error": "red", "hazard": "yellow", "info": "cyan"}
_MAX_SHOWN = 12
_OURS = {"means", "what to do", "does not help"}  # the rest may quote the log


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, report, and return the exit code."""
    options = _options(arguments)
    groups, read, unreadable = _look(options.logs)
    found = groups.ordered()
    console = ReportConsole()
    print_report(console, found, read, max_shown=None if options.all else _MAX_SHOWN)
    for sentence in unreadable:
        say(f"triage: cannot read {sentence}")
    for search in read:
        if not search.bytes:
            say(f"triage: {search.log} is empty: nothing was observed")
    if groups.dropped:
        console.print(f"[yellow]not grouped[/]: {groups.dropped} failures with still other signatures", highlight=False)
    if options.json is not None:
        try:
            write_text(options.json, json.dumps(_to_dict(found, read, unreadable, groups.dropped), indent=1) + "\n")
        except OSError as error:
            say(f"triage: cannot write {options.json}: {error}")
            return 2
    return exit_code(found, read, unreadable)


def summary(logs: Sequence[Path]) -> dict[str, object]:
    """What `--json` writes, of these logs."""
    groups, read, unreadable = _look([str(path) for path in logs])
    return _to_dict(groups.ordered(), read, unreadable, groups.dropped)


def _look(logs: Sequence[str]) -> tuple[Groups, list[Read], list[str]]:
    """What was found, what was read, and what could not be."""
    groups, read, unreadable = Groups(), [], []
    for path in logs:
        try:
            read.append(_read(path, groups))
            if read[-1].unread:
                unreadable.append(f"{path}: {read[-1].unread}")
        except Unreadable as error:
            unreadable.append(f"{path}: {error}")
    return groups, read, unreadable


def exit_code(found: Sequence[Group], read: Sequence[Read], unreadable: Sequence[str]) -> int:
    """1 a failure, else 2 an unreadable log, else 3 nothing read, else 0."""
    if any(group.kind.severity != "info" for group in found):
        return 1
    if unreadable:
        return 2
    return 0 if any(search.bytes for search in read) else 3


def print_report(console: Console, found: Sequence[Group], read: Sequence[Read], *, max_shown: int | None) -> None:
    """Each failure, what it means only once for each kind, then what was read."""
    told: set[str] = set()
    for group in found[:max_shown]:
        _print_group(console, group, explain=group.kind.id not in told)
        told.add(group.kind.id)
    if max_shown is not None and len(found) > max_shown:
        console.print(
            f"... and {len(found) - max_shown} more signatures: --all prints them, --json FILE has them", highlight=False
        )
    counts = {severity: sum(group.count for group in found if group.kind.severity == severity) for severity in _COLOURS}
    console.print(
        f"{len(read)} logs, {sum(search.lines for search in read):,} lines: {counts['error']} errors, {counts['hazard']} "
        f"warnings that mean "
        f"harm, {counts['info']} infos, {len(found)} signatures",
        style="bold", highlight=False,
    )  # fmt: skip


def _print_group(console: Console, group: Group, *, explain: bool) -> None:
    kind, colour = group.kind, _COLOURS[group.kind.severity]
    times = f" ({group.count} times)" if group.count > 1 else ""
    sure = "cause unknown" if kind.id == "unknown" else group.sure
    console.print(f"[bold {colour}]{kind.severity} {kind.id}[/] {escape(kind.title)}: {sure}{times}", highlight=False)
    for label, text in (
        ("signature", group.signature if group.where or kind.id == "unknown" else ""),
        *(("line", _evidence(one)) for one in group.evidence[:3]),
        *(("where", line) for line in group.where),
        ("ranks", ", ".join(group.streams)),
        *(("seen", fact) for fact in group.facts),
        ("after", f"{group.after}, probably its consequence" if group.after else ""),
        *(("doubt", doubt) for doubt in group.doubts),
        ("means", kind.means if explain else ""),
        ("what to do", kind.to_do if explain else ""),
        ("does not help", kind.no_help if explain else ""),
    ):
        if text:
            print_detail(console, label, text if label in _OURS else masked(text))


def _evidence(one: Evidence) -> str:
    whose = ", ".join(filter(None, (one.stream, f"thread {one.thread}" if one.thread else "")))
    return f"{one.place}{f' ({whose})' if whose else ''}: {one.text}"


def _read(path: str, groups: Groups) -> Read:
    if path != "-":
        return read_log(Path(path), groups)
    if sys.stdin is None:
        raise Unreadable("standard input is closed")
    search = LogSearch("standard input", groups)
    search.read(sys.stdin.buffer)
    return Read(search.log, search.lines, search.bytes)


def _to_dict(found: Sequence[Group], read: Sequence[Read], unreadable: Sequence[str], dropped: int) -> dict[str, object]:
    return {
        "version": 1,
        "exit_code": exit_code(found, read, unreadable),
        "failures": [group.to_dict() for group in found],
        "lines": sum(search.lines for search in read),
        "bytes": sum(search.bytes for search in read),
        "unreadable": list(unreadable),
        "not_grouped": dropped,
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m diagnostics.triage", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logs", nargs="+", metavar="LOG", help="log files; - for standard input")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write everything that was found")
    parser.add_argument("--all", action="store_true", help=f"print every signature, not the first {_MAX_SHOWN}")
    options = parser.parse_args(arguments)
    written = options.json
    if written is not None and written.is_file() and any(Path(log).is_file() and written.samefile(log) for log in options.logs):
        parser.error(printable(f"--json {options.json} is one of the logs: name another file"))
    return options


if __name__ == "__main__":
    outlive_reader()
    sys.exit(ended_plainly("triage", main))
