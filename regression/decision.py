"""Has the throughput fallen? Takes a measurement and the earlier ones of its series, and lets a rule decide.

The rule is a callable (`Rule`). `provisional` compares with the median: a drop of more than 5 % fails.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from regression.laws import Outcome, problems
from regression.measurement import Measurement

PROVISIONAL_DROP = 0.05


@dataclass(frozen=True, kw_only=True)
class Point:
    """One throughput of a series."""

    time: str  # UTC, ISO 8601
    value: float  # tokens per second per device


class Rule(Protocol):
    """Decides about a throughput by the earlier valid ones, the oldest first, at least one."""

    def __call__(self, now: Point, earlier: Sequence[Point]) -> Outcome:
        """PASS or FAIL with its sentence, or INSUFFICIENT."""


def provisional(now: Point, earlier: Sequence[Point]) -> Outcome:
    """A drop of more than 5 % below the median fails."""
    middle = statistics.median(point.value for point in earlier)
    change = now.value / middle - 1
    failed = change < -PROVISIONAL_DROP
    return Outcome(
        kind="FAIL" if failed else "PASS",
        sentence=f"{now.value:,.1f} tok/s per device, {change:+.1%} to the median {middle:,.1f} of {len(earlier)} earlier "
        f"measurements (limit -{PROVISIONAL_DROP:.0%}, provisional)",
    )


def decide(measured: Measurement, history: Sequence[Measurement], *, record: str, rule: Rule = provisional) -> Outcome:
    """The verdict on the throughput. `history`: any measurements; those of the series that count are used.

    Without a throughput or where it does not count: INSUFFICIENT. Without history: FAIL with `record`, the command that records
    a baseline.
    """
    if measured.failure:
        return Outcome(kind="INSUFFICIENT", sentence=f"no throughput: the run failed, {measured.failure['type']}")
    if measured.invalid:
        return Outcome(kind="INSUFFICIENT", sentence=f"INVALID: {'; '.join(measured.invalid)}")
    if measured.per_device is None:
        return Outcome(kind="INSUFFICIENT", sentence="the run reports no throughput")
    earlier = points(one for one in history if one.series == measured.series)
    if not earlier:
        return Outcome(kind="FAIL", sentence=f"no baseline of the series {measured.series!r}. Record one with:\n    {record}")
    return rule(Point(time=measured.time, value=measured.per_device), earlier)


def points(history: Iterable[Measurement]) -> list[Point]:
    """The measurements that count, the oldest first; equal ones once."""
    counting = {(one.time, one.per_device) for one in history if not one.invalid and not problems(one)}
    return [Point(time=time, value=value) for time, value in sorted(counting, key=str) if value is not None]
