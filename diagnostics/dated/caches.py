"""When a compile cache was born, grew, was written again and lost entries, from the dates of its files.

Inductor and Triton write each file once, so the oldest file dates the birth of what is there now. A folder whose own date is
later than those of all its files lost one then. What was deleted whole leaves no file: `deduced.py` reasons about that.
"""

from __future__ import annotations

import os
from pathlib import Path

from diagnostics.dated.entry import Entry, Found, believable, mtime, shown

_PAUSE_SECONDS = 600.0  # without a new file: what comes after is another run
_LATER_SECONDS = 60.0
_MAX_FILES = 300_000
_MAX_TIMES = 20


def find(cache: Path, now_seconds: float) -> Found:
    """Birth, later growth and losses of one cache."""
    found = Found()
    if not cache.is_dir():
        return Found(notes=[f"there is no compile cache {cache}"])
    dates: list[float] = []
    folders: list[float] = []
    size = 0

    def missed(error: OSError) -> None:
        found.notes.append(f"{error.filename}: {error.strerror}: not looked at")

    for name, _, files in os.walk(cache, onerror=missed):
        try:
            folders.append(mtime(Path(name)))
            for file in files:
                status = (Path(name) / file).stat(follow_symlinks=False)
                dates.append(status.st_mtime)
                size += status.st_size
        except OSError as error:
            found.notes.append(f"{error.filename}: {error.strerror}: not looked at")
        if len(dates) > _MAX_FILES:
            found.notes.append(f"{cache}: only the first {_MAX_FILES:,} files were looked at")
            break
    believed = sorted(date for date in dates if believable(date, now_seconds))
    if len(believed) < len(dates):
        found.notes.append(f"{cache}: dates of {len(dates) - len(believed)} files not believed (before 2000, or in the future)")
    found.entries += _life(cache, believed, size) if believed else _empty(cache, now_seconds)
    return found


def _life(cache: Path, dates: list[float], size: int) -> list[Entry]:
    fields = {"files": len(dates), "bytes": size, "last_seconds": dates[-1]}
    entries = [
        Entry(
            time_seconds=dates[0], kind="cache born", where=str(cache), how="oldest file", fields=fields,
            what=f"the compile cache of today begins ({len(dates):,} files, {size / 1e6:,.1f} MB, the newest of "
                 f"{shown(dates[-1])})",
        )
    ]  # fmt: skip
    begun, before = 0, dates[0]
    for number, date in enumerate([*dates[1:], float("inf")], 1):
        if date - before > _PAUSE_SECONDS:
            if begun:
                entries.append(
                    Entry(
                        time_seconds=dates[begun],
                        kind="cache grew",
                        what=f"{number - begun:,} new files in the compile cache",
                        where=str(cache),
                        how="dates of files",
                    )
                )
            begun = number
        before = date
    changed = mtime(cache)
    if changed > dates[-1] + _LATER_SECONDS:
        entries.append(
            Entry(
                time_seconds=changed,
                kind="cache lost entries",
                what="something was deleted from the compile cache, or renamed in it",
                where=str(cache),
                how="the folder's own date is later than its files'",
            )
        )
    return [entries[0], *entries[1:][-_MAX_TIMES:]]


def _empty(cache: Path, now_seconds: float) -> list[Entry]:
    changed = mtime(cache)
    if not believable(changed, now_seconds):
        return []
    return [
        Entry(
            time_seconds=changed,
            kind="cache emptied",
            what="the compile cache is empty: made then, or its last entry was deleted then",
            where=str(cache),
            how="date of the empty folder",
        )
    ]
