"""What left no file: a deleted cache and a replaced torch are seen by what is younger than the runs that needed them.

A cache that begins after runs that compiled cannot be the one they filled; a torch that was installed after a run ended is
not the one it used. Neither says when the old one went, only between which times. It is said "if those runs used it": a log
seldom names its cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from diagnostics.dated.entry import Entry, shown
from diagnostics.dated.runs import Run

_SLACK_SECONDS = 60.0
_REPLACING = {
    "torch installed": "torch replaced",
    "compile stack installed": "compile stack replaced",
    "stack installed": "stack replaced",
}


def deduce(entries: Sequence[Entry], runs: Sequence[Run]) -> list[Entry]:
    """The entries, with what follows from them and the runs' dates."""
    told: list[Entry] = []
    for entry in entries:
        earlier = [run for run in runs if run.dated and run.samples and run.end_seconds < entry.time_seconds + _SLACK_SECONDS]
        if entry.kind in {"cache born", "cache emptied"} and earlier:
            before = max(run.end_seconds for run in runs if run.dated and run.end_seconds < entry.time_seconds + _SLACK_SECONDS)
            told += [entry, _deleted(entry, earlier, before)]
        elif entry.kind in _REPLACING and earlier:
            told.append(_replaced(entry, earlier, entries))
        else:
            told.append(entry)
    return told


def _deleted(entry: Entry, earlier: list[Run], last: float) -> Entry:
    if entry.kind == "cache emptied":
        return dataclasses.replace(
            entry,
            kind="cache deleted",
            how="date of the empty folder; earlier runs are logged",
            what=f"the compile cache was emptied, if the {_count(earlier)} before used it",
            not_before_seconds=min(last, entry.time_seconds),
        )
    return dataclasses.replace(
        entry,
        kind="cache deleted",
        not_before_seconds=min(last, entry.time_seconds),
        how="its oldest file is younger than runs that compiled",
        what=f"the compile cache was deleted or moved after {shown(last)}, if the {_count(earlier)} before used it: nothing of "
        "theirs is in it, so what ran next compiled cold",
    )


def _replaced(entry: Entry, earlier: list[Run], entries: Sequence[Entry]) -> Entry:
    same = [other for other in entries if other.where == entry.where and other is not entry]
    if not any(other.time_seconds < entry.time_seconds for other in same):
        return dataclasses.replace(entry, kind="environment made", what=f"a new environment: {entry.what}")
    last = max(earlier, key=lambda run: run.end_seconds)
    return dataclasses.replace(
        entry,
        kind=_REPLACING[entry.kind],
        what=f"{entry.what}: after {last.path.name} had ended, so that run used another build or version",
    )


def _count(runs: list[Run]) -> str:
    return f"{len(runs)} runs" if len(runs) > 1 else "run"
