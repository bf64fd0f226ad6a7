"""Runs out of logs: when each began and ended, its throughput over time, and its failures as triage sees them.

Throughput is read from `tok/s`, `tokens_per_second`, `samples/s`, `it/s` in plain lines and from the steps of our
events.jsonl. A failure is dated by the last dated line before it. Of a long log every second, fourth, ... rate is kept.
Limits: a log without dates has only its file's; the unit that a log names most is the one compared.
"""

from __future__ import annotations

import json
import re
import statistics
from bisect import bisect_right
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

from diagnostics.dated.entry import believable, mtime
from diagnostics.dated.stamps import Stamps
from diagnostics.environments.masking import masked
from diagnostics.logs.encodings import Unreadable
from diagnostics.logs.groups import Groups
from diagnostics.logs.parts import read_log
from diagnostics.logs.reader import blocks, decode, size_now

LOWER = 0.7  # of a rate before: slower, not noise
_UNITS = {
    "tok": "tok/s",
    "tokens": "tok/s",
    "token": "tok/s",
    "toks": "tok/s",
    "tokens_per_second": "tok/s",
    "samples": "samples/s",
    "it": "it/s",
    "steps": "steps/s",
}
_RATE = re.compile(r"(?P<value>\d[\d,]*(?:\.\d+)?) ?(?P<scale>[kKM]?) ?(?P<unit>tokens|token|toks|tok|samples|steps|it)/s")
_RATE_AFTER = re.compile(
    r"(?P<unit>tokens|toks|tok|samples)(?:/s(?:ec)?|_per_second|_per_sec)\"?[=: ]+(?P<value>\d[\d,]*(?:\.\d+)?) "
    r"?(?P<scale>[kKM]?)"
)
_SCALES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6}
_HEAD_LINES = 200
_TAIL_LINES = 200
_MAX_SECONDS = 1e11  # since 1970: what no calendar here can name lies beyond
_MAX_SAMPLES = 20_000
_BACKWARDS_SECONDS = 5.0
_WINDOWS = 20  # a run is looked at in so many pieces


@dataclass(frozen=True)
class Segment:
    """A stretch of steady throughput."""

    begin_seconds: float
    end_seconds: float
    rate: float  # the median


@dataclass(frozen=True)
class Failure:
    """What triage found, at a time."""

    kind: str
    seconds: float
    place: str
    error: bool


@dataclass(kw_only=True)
class Run:
    """One log. Without any date in it, both times are the file's own."""

    path: Path
    begin_seconds: float
    end_seconds: float
    dated: bool
    unit: str = ""
    samples: list[tuple[float, float]] = field(default_factory=list)  # seconds, rate
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def segments(self) -> list[Segment]:
        """Stretches whose median rates differ by more than LOWER."""
        size = max(3, len(self.samples) // _WINDOWS)
        parts: list[list[tuple[float, float]]] = []
        for at in range(0, len(self.samples), size):
            window = self.samples[at : at + size]
            if parts and (len(window) < size or _alike(_median(parts[-1]), _median(window))):
                parts[-1] += window
            else:
                parts.append(window)
        return [Segment(part[0][0], part[-1][0], _median(part)) for part in parts]


def read(path: Path, now_seconds: float) -> Run:
    """Read one log. Raises Unreadable."""
    try:
        written = mtime(path)
        reading = _events(path) if path.suffix == ".jsonl" else _plain(path, Stamps(path, now_seconds))
    except OSError as error:
        raise Unreadable(f"{error.strerror or error}: check the right to read it") from error
    begin = reading.stamps[0][1] if reading.stamps else written
    end = max(seconds for _, seconds in reading.stamps) if reading.stamps else written
    run = Run(path=path, begin_seconds=min(begin, end), end_seconds=end, dated=bool(reading.stamps))
    if not run.dated:
        run.notes.append(f"{path}: no dates in it, only the file's own date is known")
    if reading.backwards:
        run.notes.append(f"{path}: its clock jumps back {reading.backwards} times: the order within it is that of its lines")
    if not believable(run.end_seconds, now_seconds):
        run.notes.append(f"{path}: its dates are not believed (before 2000, or in the future)")
    _rates(run, reading)
    _failures(run, reading)
    return run


@dataclass
class _Reading:
    stamps: list[tuple[int, float]] = field(default_factory=list)  # line, seconds
    rates: list[tuple[int, str, float]] = field(default_factory=list)  # line, unit, rate
    backwards: int = 0
    every: int = 1
    seen: int = 0

    def stamp(self, line: int, seconds: float) -> None:
        if self.stamps and seconds < self.stamps[-1][1] - _BACKWARDS_SECONDS:
            self.backwards += 1
        self.stamps.append((line, seconds))

    def wanted(self) -> bool:
        """Whether the next line with a rate is one of those that are kept."""
        self.seen += 1
        return self.seen % self.every == 0

    def rate(self, line: int, unit: str, value: float) -> None:
        self.rates.append((line, unit, value))
        if len(self.rates) >= _MAX_SAMPLES:
            self.rates, self.stamps, self.every = self.rates[::2], self.stamps[::2], self.every * 2

    def seconds_at(self, line: int) -> float | None:
        if not self.stamps:
            return None
        at = bisect_right(self.stamps, (line, float("inf")))
        return self.stamps[max(0, at - 1)][1]


def _plain(path: Path, stamps: Stamps) -> _Reading:
    reading, number = _Reading(), 0
    last: deque[tuple[int, bytes]] = deque(maxlen=_TAIL_LINES)
    with path.open("rb") as file:
        for block in blocks(file, size_now(file)):
            for raw in block.splitlines():
                number += 1
                last.append((number, raw))
                rated = (b"/s" in raw or b"_per_sec" in raw) and reading.wanted()
                if rated or number <= _HEAD_LINES:
                    _read_line(reading, number, decode(raw), stamps, rated=rated)
    for line, raw in last:
        if not reading.stamps or line > reading.stamps[-1][0]:
            _read_line(reading, line, decode(raw), stamps, rated=False)
    return reading


def _read_line(reading: _Reading, number: int, text: str, stamps: Stamps, *, rated: bool) -> None:
    seconds = stamps.of(text)
    if seconds is not None:
        reading.stamp(number, seconds)
    found = (_RATE_AFTER.search(text) or _RATE.search(text)) if rated else None
    if found is not None:
        value = float(found["value"].replace(",", "")) * _SCALES[found["scale"]]
        reading.rate(number, _UNITS[found["unit"]], value)


def _events(path: Path) -> _Reading:
    """Our own events; lines that are not JSON objects with a time are passed over."""
    reading = _Reading()
    with path.open("rb") as file:
        lines = (line for block in blocks(file, size_now(file)) for line in block.splitlines())
        for number, line in enumerate(lines, 1):
            try:
                event = json.loads(line)
                seconds = float(event["time_seconds"])
                fields = event.get("fields")
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                continue
            if not 0 <= seconds < _MAX_SECONDS:
                continue
            reading.stamp(number, seconds)
            rate = fields.get("tokens_per_second") if event.get("name") == "step" and isinstance(fields, dict) else None
            if isinstance(rate, int | float) and 0 <= rate < float("inf") and reading.wanted():
                reading.rate(number, "tok/s", float(rate))
    return reading


def _rates(run: Run, reading: _Reading) -> None:
    units = Counter(unit for _, unit, _ in reading.rates)
    if not units:
        return
    run.unit = "tok/s" if units["tok/s"] else units.most_common(1)[0][0]
    for line, unit, value in reading.rates:
        seconds = reading.seconds_at(line)
        if unit == run.unit:
            run.samples.append((run.end_seconds if seconds is None else seconds, value))


def _failures(run: Run, reading: _Reading) -> None:
    groups = Groups()
    read = read_log(run.path, groups)
    if read.unread:
        raise Unreadable(read.unread)
    for group in groups.ordered():
        first = group.evidence[0]
        seconds = reading.seconds_at(first.last_line)
        at = run.end_seconds if seconds is None else seconds
        if group.kind.severity != "info":
            run.failures.append(
                Failure(group.kind.id, at, f"{first.place}: {masked(first.text)[:120]}", group.kind.severity == "error")
            )


def _median(samples: list[tuple[float, float]]) -> float:
    return statistics.median(rate for _, rate in samples)


def _alike(one: float, other: float) -> bool:
    return min(one, other) >= LOWER * max(one, other)
