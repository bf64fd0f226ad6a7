"""One dated thing, and what a source hands over. Times are seconds since 1970; they are printed in local time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_EARLIEST_SECONDS = 946_684_800.0  # the year 2000: earlier dates come from archives and wheels without dates
_CLOCK_SECONDS = 300.0  # two clocks may differ by so much


@dataclass(frozen=True, kw_only=True)
class Entry:
    """`how` says how its date is known; `not_before_seconds`, where it is only known to lie between two times."""

    time_seconds: float
    kind: str
    what: str
    where: str
    how: str
    not_before_seconds: float | None = None
    fields: dict[str, Any] = field(default_factory=dict)  # JSON values


@dataclass(kw_only=True)
class Found:
    """What a source found; `notes` say what it could not look at or does not believe."""

    entries: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, other: Found) -> None:
        """Take over what another source found."""
        self.entries += other.entries
        self.notes += other.notes


def believable(seconds: float, now_seconds: float) -> bool:
    """Neither before the year 2000 nor in the future."""
    return _EARLIEST_SECONDS < seconds <= now_seconds + _CLOCK_SECONDS


def mtime(path: Path) -> float:
    """Time of the last change, in seconds. Raises OSError."""
    return path.stat(follow_symlinks=False).st_mtime


def shown(seconds: float) -> str:
    """Local date and time, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
