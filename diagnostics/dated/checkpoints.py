"""When checkpoints were written: one entry a folder, not one a file."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from diagnostics.dated.entry import Entry, Found, believable, mtime, shown

_STEP = re.compile(r"^(?:step|checkpoint|global_step|epoch|iter)[-_]?\d+")


def find(files: Sequence[Path], now_seconds: float) -> Found:
    """Group the files by the folder that holds the checkpoints (the parent of step-000500, or the files' own)."""
    found = Found()
    dates: dict[Path, list[float]] = defaultdict(list)
    doubted = 0
    for path in files:
        try:
            seconds = mtime(path)
        except OSError as error:
            found.notes.append(f"{path}: {error.strerror}: no date")
            continue
        if believable(seconds, now_seconds):
            dates[path.parent.parent if _STEP.match(path.parent.name) else path.parent].append(seconds)
        else:
            doubted += 1
    if doubted:
        found.notes.append(f"dates of {doubted} checkpoint files not believed (before 2000, or in the future)")
    found.entries += [
        Entry(
            time_seconds=max(times),
            kind="checkpoint",
            what=f"the newest of {len(times)} checkpoint files, which begin at {shown(min(times))}",
            where=str(folder),
            how="newest file",
        )
        for folder, times in dates.items()
    ]
    return found
