"""Dates inside lines. A stamp without a year or a day takes them from the file's own date; local time unless it says otherwise."""

from __future__ import annotations

import datetime
import re
import time
from pathlib import Path

from diagnostics.dated.entry import mtime

_FULL = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,]\d+)?(Z|[+-]\d\d:?\d\d)?")
_GLOG = re.compile(r"(?:^|[\[\s:])[IWEF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.\d+")
_SYSLOG = re.compile(r"^(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}(\d{1,2}) (\d\d):(\d\d):(\d\d)")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_DAY_SECONDS = 86400.0


class Stamps:
    """Reads the stamps of one file."""

    def __init__(self, path: Path, now_seconds: float) -> None:
        try:
            self._written = min(mtime(path), now_seconds)
        except OSError:
            self._written = now_seconds

    def of(self, text: str) -> float | None:
        """Seconds since 1970, or None where the line has no date that can be read."""
        head = text[:200]
        try:
            if (full := _FULL.search(head)) is not None:
                return _seconds(*(int(part) for part in full.groups()[:6]), zone=full[7])
            if (glog := _GLOG.search(head)) is not None:
                return self._in_year(*(int(part) for part in glog.groups()))
            if (syslog := _SYSLOG.match(head)) is not None:
                return self._in_year(_MONTHS.index(syslog[1]) + 1, *(int(part) for part in syslog.groups()[1:]))
        except (ValueError, OverflowError):
            return None
        return None

    def _in_year(self, month: int, day: int, hour: int, minute: int, second: int) -> float:
        year = time.localtime(self._written).tm_year
        seconds = _seconds(year, month, day, hour, minute, second)
        return seconds if seconds <= self._written + _DAY_SECONDS else _seconds(year - 1, month, day, hour, minute, second)


def _seconds(year: int, month: int, day: int, hour: int, minute: int, second: int, zone: str | None = None) -> float:
    at = datetime.datetime(year, month, day, hour, minute, min(second, 59))  # noqa: DTZ001 - local unless the stamp names a zone
    if zone is None:
        return at.timestamp()
    offset = datetime.datetime.strptime(zone.replace("Z", "+0000").replace(":", ""), "%z").tzinfo
    return at.replace(tzinfo=offset).timestamp()
