"""What changed since it last worked? `python -m diagnostics.timeline [FOLDER...] [--system] [--json FILE] [--all]`.

Finds everything in the folders that has a date - installed packages, compile caches, checkpoints, run logs with their
throughput and errors, git commits, driver loads, reboots - and prints one list in order. Where throughput or the kind of
error changed, it prints what happened before, most suspicious first. What was deleted leaves no file: that is deduced from
what is younger than it ought to be. Without FOLDER: this Python's packages, this user's compile caches, the current folder
and this machine (which --system adds to folders).

Exit codes: 0 nothing changed · 1 a change was found · 2 bad usage, a folder that is missing · 3 no two states of runs to
compare, so nothing can be said about changes. Nothing is written but --json.

Limits: dates of files can be wrong (copies, unpacked archives, clocks); those before 2000 or in the future are left out and
said. Two events of one second have no order. A change is a throughput below 0.7 of the best before, or another kind of
failure. Imports no torch.
"""

from __future__ import annotations

import diagnostics.interrupts  # noqa: F401 - for Ctrl-C while the rest is imported

# isort: split
import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from dflash.standard_output import outlive_reader
from diagnostics.dated import caches, checkpoints, code, machine, packages
from diagnostics.dated.deduced import deduce
from diagnostics.dated.entry import Entry, Found, believable, shown
from diagnostics.dated.moments import Moment, Suspect, moments, states
from diagnostics.dated.places import Places, places, usual, with_machine
from diagnostics.dated.runs import Run, read
from diagnostics.logs.encodings import Unreadable
from diagnostics.output import ended_plainly, output_file, printable, say, write_text
from diagnostics.tables import Table
from diagnostics.terminal import ReportConsole, print_detail, print_table

_MAX_ROWS = 60
_MAX_SUSPECTS = 6
_COLLAPSED = {"commit", "checkpoint", "cache grew", "packages installed", "checkout"}
_COLOURS = {"healthy": "green", "slow": "yellow", "failed": "red"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Look, print, and return the exit code."""
    options = _options(arguments)
    now = time.time()
    found, runs = gather(
        usual() if not options.folders else places(options.folders), now, system=options.system or not options.folders
    )
    entries = sorted(deduce(found.entries, runs), key=lambda entry: entry.time_seconds)
    changes = moments(states(runs), entries)
    console = ReportConsole()
    print_report(console, entries, runs, changes, found.notes, max_rows=None if options.all else _MAX_ROWS)
    code_ = exit_code(runs, changes)
    if options.json is not None:
        try:
            write_text(options.json, json.dumps(_to_dict(entries, runs, changes, found.notes, code_), indent=1) + "\n")
        except OSError as error:
            say(f"timeline: cannot write {options.json}: {error}")
            return 2
    return code_


def summary(folder: Path) -> list[dict[str, Any]]:
    """The changes of the runs in `folder`, newest last, each with what is dated before it here, most suspicious first."""
    found, runs = gather(with_machine(places([folder])), time.time(), system=True)
    entries = sorted(deduce(found.entries, runs), key=lambda entry: entry.time_seconds)
    return [
        {
            "change": f"{change.before.label} -> {change.after.label}",
            "before": f"{change.before.what} in {change.before.run}",
            "after": f"{change.after.what} in {change.after.run}",
            "suspects": [_suspect(suspect) for suspect in change.suspects[:_MAX_SUSPECTS]],
        }
        for change in moments(states(runs), entries)
    ]


def gather(where: Places, now_seconds: float, *, system: bool) -> tuple[Found, list[Run]]:
    """Everything dated in these places."""
    found, runs = Found(notes=list(where.notes)), []
    for folder in where.site_packages:
        found.add(packages.find(folder, now_seconds))
    for folder in where.caches:
        found.add(caches.find(folder, now_seconds))
    for folder in where.repositories:
        found.add(code.find(folder, now_seconds))
    found.add(checkpoints.find(where.checkpoints, now_seconds))
    for path in where.system_logs:
        found.add(machine.of_log(path, now_seconds))
    if system:
        found.add(machine.of_this_machine(now_seconds))
    for path in where.logs:
        try:
            run = read(path, now_seconds)
        except Unreadable as error:
            found.notes.append(f"{path}: {error}")
            continue
        found.notes += run.notes
        if believable(run.end_seconds, now_seconds):
            runs.append(run)
    return found, runs


def exit_code(runs: Sequence[Run], changes: Sequence[Moment]) -> int:
    """1 a change, 3 fewer than two states, 0 no change."""
    if changes:
        return 1
    return 0 if len(states(runs)) > 1 else 3


def print_report(
    console: Console,
    entries: Sequence[Entry],
    runs: Sequence[Run],
    changes: Sequence[Moment],
    notes: Sequence[str],
    *,
    max_rows: int | None,
) -> None:
    """The list, then each change with its suspects: what matters most stays in view."""
    rows = _rows(entries, runs)
    left_out = max(0, len(rows) - max_rows) if max_rows is not None else 0
    print_table(console, Table("Timeline", ("time", "what", "where", "known from"), tuple(rows[left_out:])))
    if left_out:
        console.print(f"... {left_out} earlier rows are not shown: --all prints them", highlight=False)
    for note in notes:
        console.print(f"[yellow]not observed[/]: {escape(note)}", highlight=False)
    for change in changes:
        _print_change(console, change)
    if not changes:
        enough = exit_code(runs, changes) == 0
        console.print(
            "no change of throughput or error" if enough else "fewer than two states of runs were found: nothing can be compared",
            highlight=False,
        )
    console.print(f"{len(entries)} dated things, {len(runs)} logs, {len(changes)} changes", style="bold", highlight=False)


def _print_change(console: Console, change: Moment) -> None:
    before, after = change.before, change.after
    console.print(
        f"[bold {_COLOURS[after.label]}]{before.label} -> {after.label}[/] between {shown(before.end_seconds)} and "
        f"{shown(after.begin_seconds)}",
        highlight=False,
    )
    print_detail(console, "before", f"{before.what} in {before.run}")
    print_detail(console, "after", f"{after.what} in {after.run}")
    for number, suspect in enumerate(change.suspects[:_MAX_SUSPECTS], 1):
        print_detail(console, f"suspect {number}", _suspect(suspect))
    if not change.suspects:
        print_detail(
            console,
            "suspects",
            "nothing dated lies between: look at what leaves no date (environment variables, arguments, data, other processes)",
        )


def _suspect(suspect: Suspect) -> str:
    entry = suspect.entry
    return f"{shown(entry.time_seconds)} {entry.what} ({entry.where}; {entry.how}). {suspect.why}".rstrip()


def _rows(entries: Sequence[Entry], runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Runs and entries in order; neighbours of one kind and place are one row."""
    timed: list[tuple[float, str, tuple[str, str, str]]] = [
        (entry.time_seconds, entry.kind, (entry.what, entry.where, entry.how)) for entry in entries
    ]
    for run in runs:
        rates = ", then ".join(f"{segment.rate:,.0f} {run.unit}" for segment in run.segments[:5])
        failures = ", ".join(dict.fromkeys(failure.kind for failure in run.failures))
        what = f"run until {shown(run.end_seconds)}: {'; '.join(filter(None, (rates, failures))) or 'no throughput, no failure'}"
        timed.append((run.begin_seconds, "run", (what, str(run.path), "dates in the log" if run.dated else "date of the file")))
    timed.sort(key=lambda row: row[0])
    rows: list[tuple[str, ...]] = []
    at = 0
    while at < len(timed):
        end = at + 1
        while (
            timed[at][1] in _COLLAPSED
            and end < len(timed)
            and timed[end][1] == timed[at][1]
            and timed[end][2][1] == timed[at][2][1]
        ):
            end += 1
        seconds, _, (what, where, how) = timed[at]
        more = f" ... and {end - at - 1} more until {shown(timed[end - 1][0])}" if end - at > 1 else ""
        rows.append((shown(seconds), what + more, where, how))
        at = end
    return rows


def _to_dict(
    entries: Sequence[Entry], runs: Sequence[Run], changes: Sequence[Moment], notes: Sequence[str], code_: int
) -> dict[str, object]:
    return {
        "version": 1,
        "exit_code": code_,
        "entries": [dataclasses.asdict(entry) for entry in entries],
        "runs": [
            {
                "path": str(run.path),
                "begin_seconds": run.begin_seconds,
                "end_seconds": run.end_seconds,
                "dated": run.dated,
                "unit": run.unit,
                "segments": [dataclasses.asdict(segment) for segment in run.segments],
                "failures": [dataclasses.asdict(one) for one in run.failures],
            }
            for run in runs
        ],
        "changes": [dataclasses.asdict(change) for change in changes],
        "not_observed": list(notes),
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m diagnostics.timeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folders", nargs="*", type=Path, metavar="FOLDER", help="where to look (default: what this Python and user use)"
    )
    parser.add_argument(
        "--system", action="store_true", help="add this machine's last boot and driver load to what the folders say"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write everything that was found")
    parser.add_argument("--all", action="store_true", help=f"print all rows, not the last {_MAX_ROWS}")
    options = parser.parse_args(arguments)
    for folder in options.folders:
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "there is no such folder"
            parser.error(printable(f"{folder}: {what}: name folders, or none"))
    return options


if __name__ == "__main__":
    outlive_reader()
    sys.exit(ended_plainly("timeline", main))
