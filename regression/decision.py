"""Has the throughput fallen? Takes a measurement and the earlier ones of its series, and lets a rule decide.

The rule is a callable (`Rule`). `provisional` compares with the median: a drop of more than 5 % fails.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from regression.controls import Cause, put_down_to
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
    earlier = counting(one for one in history if one.series == measured.series)
    if not earlier:
        return Outcome(kind="FAIL", sentence=f"no baseline of the series {measured.series!r}. Record one with:\n    {record}")
    outcome = rule(Point(time=measured.time, value=measured.per_device), points(earlier))
    if outcome.kind != "FAIL":
        return outcome
    return dataclasses.replace(outcome, sentence=f"{outcome.sentence}; put down to: {cause(measured, earlier)}")


def counting(history: Iterable[Measurement]) -> list[Measurement]:
    """The measurements that count, the oldest first."""
    return sorted((one for one in history if one.per_device and not one.invalid and not problems(one)), key=lambda one: one.time)


def points(history: Iterable[Measurement]) -> list[Point]:
    """Their throughputs; equal ones once."""
    return [
        Point(time=time, value=value)
        for time, value in dict.fromkeys((one.time, one.per_device) for one in counting(history))
        if value is not None
    ]


def cause(measured: Measurement, earlier: Sequence[Measurement]) -> Cause:
    """What the change is put down to, from the control workloads beside each measurement."""
    methods = {one.result.get("measure", {}).get("method") for one in (measured, *earlier)}
    known = [(one.per_device, one.controls) for one in earlier if one.per_device is not None]
    return put_down_to(measured.per_device or 0.0, measured.controls, known, same_method=len(methods) == 1)
