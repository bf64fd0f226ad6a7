"""Dates inside lines, in local time unless they name a zone. A stamp without a year takes it from the file's own date."""

from __future__ import annotations

import datetime as dt
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
                year, month, day, hour, minute, second = (int(part) for part in full.groups()[:6])
                return _seconds(year, month, day, hour, minute, second, _zone(full[7]))
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


def _seconds(year: int, month: int, day: int, hour: int, minute: int, second: int, zone: dt.tzinfo | None = None) -> float:
    return dt.datetime(year, month, day, hour, minute, min(second, 59), tzinfo=zone).timestamp()


def _zone(text: str | None) -> dt.tzinfo | None:
    """None is local time."""
    return None if text is None else dt.datetime.strptime(text.replace("Z", "+0000").replace(":", ""), "%z").tzinfo
