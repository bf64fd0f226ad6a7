"""Has the throughput fallen? The night watch's rule, applied to a measurement and the earlier ones of its series."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from regression.acceptance import Acceptance, mark
from regression.controls import Cause, put_down_to
from regression.history import night_of
from regression.laws import Outcome, problems
from regression.measurement import Measurement
from regression.verdict import Kind
from regression.watch import replay


def decide(
    measured: Measurement,
    history: Sequence[Measurement],
    *,
    record: str,
    accepted: Iterable[Acceptance] = (),
    suspect_fails: bool = True,
) -> Outcome:
    """The verdict on the throughput. `history`: any measurements; those of the series that count are used.

    Without a throughput, or where it does not count: INSUFFICIENT. Without history: FAIL with `record`, the command that records
    a baseline. Below the limit for the first time: FAIL in a build; with `suspect_fails` false INSUFFICIENT, for a night that is
    followed by another.
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
    # The laws have items of their own: here a run that broke one is judged by its throughput.
    tonight = dataclasses.replace(night_of(measured), invalid=())
    verdict = replay(mark([*(night_of(one) for one in earlier), tonight], accepted))[-1]
    sentence = f"{measured.per_device:,.1f} tok/s per device, {verdict.sentence}"
    if not verdict.is_below:
        return Outcome(kind="INSUFFICIENT" if verdict.kind is Kind.INSUFFICIENT else "PASS", sentence=sentence)
    kept = verdict.kind is Kind.CLEARED
    fails = verdict.kind is Kind.FAIL or suspect_fails
    return Outcome(
        kind="PASS" if kept else "FAIL" if fails else "INSUFFICIENT",
        sentence=f"{sentence}; put down to: {cause(measured, earlier)}",
    )


def counting(history: Iterable[Measurement]) -> list[Measurement]:
    """The measurements that count, the oldest first."""
    return sorted((one for one in history if one.per_device and not one.invalid and not problems(one)), key=lambda one: one.time)


def cause(measured: Measurement, earlier: Sequence[Measurement]) -> Cause:
    """What the change is put down to, from the control workloads beside each measurement."""
    methods = {one.result.get("measure", {}).get("method") for one in (measured, *earlier)}
    known = [(one.per_device, one.controls) for one in earlier if one.per_device is not None]
    return put_down_to(measured.per_device or 0.0, measured.controls, known, same_method=len(methods) == 1)
