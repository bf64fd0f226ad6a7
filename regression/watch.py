"""The night watch: has the throughput of a series fallen, judged by its own history? Pure statistics.

Over the last 30 nights of the reference, with median m and s = max(1.4826 MAD, 0.3 % of m):

    limit = m - max(3 s sqrt(1 + 1/n), 2 % of m)

With fewer than 10 nights the limit is provisional, and as wide as the spread seen so far asks for:
m - max(t s sqrt(1 + 1/n), 5 % of m), where s is the standard deviation and t the 99 % quantile of Student's t with n - 1
degrees. With fewer than 3 the noise is unknown: the limit is m - 5 %, and a night below it stays SUSPECT, red but never FAIL
by itself.

A night below the limit is SUSPECT: the gate should compare with the baseline build in the same night (`wants_gate`). The
gate's FAIL makes it FAIL; its PASS or WIN makes it CLEARED: the baseline build is as slow tonight, so it is the machine.
Without a deciding gate, the second valid night in a row below the limit is FAIL.

**Controls.** Fixed work of no code of ours runs right before and right after each measurement. The throughput is judged twice:
as it is, and divided by the controls' speed (geometric mean), each by a limit from the nights of the reference. Both below:
the code fell. Both above: PASS. One of the two: HARDWARE, neither pass nor fail - either the machine was slower and explains
the fall, or it was faster and may hide one. Such a night asks for the gate, too; without one it stays out like an INVALID one.
Nights whose controls are unknown, or others, are judged by the throughput alone.

The reference is what the accepted level looks like: valid nights since the last accepted change or recorded baseline, without
nights that failed and the suspects that began a failure; those of a recorded baseline belong to it unjudged. Otherwise a
regression would become its own baseline: within two weeks the limit would have sunk to it and the red nights would turn green
with nobody having accepted anything. A single suspect night that the next one does not confirm stays in, as noise does; the
next one itself is judged without it, by the same limit. INVALID nights are neither pass nor fail, stay out, and do not break a
row.

Limits: at a night sd of 1 % history alone finds -5 % within two nights with probability 0.90, not 0.95; with the gate in the
same night it is 0.98 (`python -m regression.simulate`). Losses under about 3 % are the gate's alone. A limit that comes out
at or below zero means that the history is useless; the sentence shows it.

A throughput is tokens per second per GPU or any other unit, larger is better. Verdicts depend on what the nights are, not on
their order, their unit, or how often the same night was imported. Ties have a slack of one billionth for that.

    python -m regression.watch accept SERIES --reason WHY --store DIR
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import geometric_mean, median, stdev

from scipy.special import stdtrit

from regression.verdict import Kind

WINDOW = 30
FEW_NIGHTS = 10
MIN_NIGHTS = 3  # of which a spread can be told
FEW_QUANTILE = 0.99
SIGMAS = 3.0
NOISE_FLOOR = 0.003
MIN_DROP = 0.02
PROVISIONAL_DROP = 0.05
_MAD_TO_SD = 1.4826
_SLACK = 1e-9


@dataclass(frozen=True, kw_only=True)
class Night:
    """One nightly measurement. Raises ValueError unless it has a throughput or a reason to be invalid, and a time zone."""

    series: str  # measurements with one fingerprint and preset
    time: datetime
    value: float | None  # throughput, larger is better; None only where invalid
    invalid: tuple[str, ...] = ()  # reasons why the throughput does not count
    accepted: str = ""  # why a new level was accepted that begins with this night; empty: none begins here
    gate: Kind | None = None  # the gate's verdict of the same night, where it ran
    controls: tuple[tuple[str, float], ...] = ()  # rates of the control workloads beside it, by name; empty: unknown
    recorded: bool = False  # of a baseline that somebody recorded: part of the level without being judged

    def __post_init__(self) -> None:
        if self.time.tzinfo is None:
            raise ValueError(f"{self.series}, night {self.time}: a time without a time zone; use UTC")
        usable = self.value is not None and math.isfinite(self.value) and self.value > 0
        if not self.invalid and not usable:
            raise ValueError(
                f"{self.series}, night {self.time}: throughput {self.value}, expected a positive number: give the reason "
                "in `invalid` when there is none"
            )


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """The throughput divided by the controls' speed, as shares of its median in the reference."""

    change: float  # of the throughput, corrected
    limit: float  # of that change
    controls_change: float  # of the controls' speed

    @property
    def is_below(self) -> bool:
        """The fall is there after the correction."""
        return self.change < self.limit - _SLACK


@dataclass(frozen=True, kw_only=True)
class NightVerdict:
    """What the watch says about one night. Numbers are None where there is nothing to compare with."""

    night: Night
    kind: Kind
    median: float | None  # of the reference, unit of the night's value
    limit: float | None
    nights: int  # in the reference
    corrected: Corrected | None = None  # None: no controls to correct by

    @property
    def provisional(self) -> bool:
        """The reference is short."""
        return 0 < self.nights < FEW_NIGHTS

    @property
    def is_below(self) -> bool:
        """The night is valid and below a limit: its own, or that of the corrected throughput."""
        return self.kind in {Kind.SUSPECT, Kind.FAIL, Kind.CLEARED, Kind.HARDWARE}

    @property
    def wants_gate(self) -> bool:
        """The gate should run now; put its verdict into `Night.gate` and judge again."""
        return self.is_below and self.night.gate is None

    @property
    def sentence(self) -> str:
        """The verdict for a person."""
        if self.kind is Kind.INVALID:
            return f"INVALID: {'; '.join(self.night.invalid)}"
        if self.median is None or self.limit is None or self.night.value is None:
            why = f"a new level begins: {self.night.accepted}" if self.night.accepted else "the first valid night of its series"
            return f"INSUFFICIENT: nothing to compare with, {why}"
        change = self.night.value / self.median - 1
        limit = f"limit {self.limit / self.median - 1:+.1%}{', provisional' if self.provisional else ''}"
        return f"{self.kind}: {change:+.1%} to the median of {self.nights} nights ({limit}){self._correction()}{self._why()}"

    def _correction(self) -> str:
        one = self.corrected
        if one is None:
            return ", without control workloads to correct by" if self.is_below else ""
        return f", {one.change:+.1%} (limit {one.limit:+.1%}) corrected for the control workloads' {one.controls_change:+.1%}"

    def _why(self) -> str:
        if self.kind is Kind.CLEARED:
            return "; the gate found the baseline build as slow tonight: the machine, not the code"
        if self.kind is Kind.FAIL:
            by_gate = self.night.gate is Kind.FAIL
            return "; confirmed by the gate" if by_gate else "; the second valid night in a row"
        if self.kind is Kind.HARDWARE:
            return "; the machine changed, so the code can be neither blamed nor cleared: measure again, or compare in pairs"
        if self.kind is Kind.SUSPECT and self.nights < MIN_NIGHTS:
            return f"; gate: {self.night.gate or 'not run'}, and no fall fails by fewer than {MIN_NIGHTS} nights: noise unknown"
        return f"; gate: {self.night.gate or 'not run'}, one more such night fails" if self.kind is Kind.SUSPECT else ""


def decide(nights: Iterable[Night]) -> dict[str, NightVerdict]:
    """The verdict about the latest night of each series."""
    of_series: dict[str, list[Night]] = defaultdict(list)
    for night in nights:
        of_series[night.series].append(night)
    return {series: replay(group)[-1] for series, group in sorted(of_series.items())}


def replay(nights: Iterable[Night]) -> list[NightVerdict]:
    """Judge every night of one series by the nights before it, the oldest first. Raises ValueError on several series.

    Nights come in any order and count once however often they are given. A night that was imported with different content (for
    instance with and without the gate's verdict) is two nights.
    """
    ordered = sorted(set(nights), key=chronological)
    if ordered and any(night.series != ordered[0].series for night in ordered):
        raise ValueError(f"nights of several series: {sorted({night.series for night in ordered})}; judge each on its own")
    verdicts: list[NightVerdict] = []
    reference: list[Night] = []
    pending = False  # the last of the reference is a suspect that nothing has confirmed yet
    before: Night | None = None  # the valid night before
    kind_before: Kind | None = None
    for night in ordered:
        if night.accepted or (night.recorded and not (before and before.recorded)):
            reference, pending, kind_before = [], False, None
        known = reference[:-1] if pending else reference  # the limit that made the suspect one
        verdict = judge(night, known[-WINDOW:], second=kind_before in {Kind.SUSPECT, Kind.FAIL})
        verdicts.append(verdict)
        if verdict.kind in {Kind.INVALID, Kind.HARDWARE}:
            continue
        again = verdict.kind is Kind.SUSPECT and kind_before is Kind.SUSPECT
        stays_out = verdict.kind is Kind.FAIL or again
        reference = known if stays_out else [*reference, night]
        pending = verdict.kind is Kind.SUSPECT and not again
        before, kind_before = night, verdict.kind
    return verdicts


def chronological(night: Night) -> tuple[object, ...]:
    """A key to sort by time; nights of one time have one order, too."""
    return (
        *(night.time, night.series, str(night.value), night.invalid, night.accepted, night.gate or ""),
        *(night.controls, night.recorded),
    )


def judge(night: Night, reference: Sequence[Night], *, second: bool) -> NightVerdict:
    """Judge one night by its reference, all of them with a throughput. `second`: the valid night before was SUSPECT or FAIL."""
    if night.invalid or night.value is None:
        return NightVerdict(night=night, kind=Kind.INVALID, median=None, limit=None, nights=len(reference))
    if not reference:
        return NightVerdict(night=night, kind=Kind.INSUFFICIENT, median=None, limit=None, nights=0)
    middle, limit = median_and_limit([one.value or 0.0 for one in reference])
    below, corrected = night.value < limit * (1 - _SLACK), _corrected(night, night.value, reference)
    kind = Kind.PASS
    if not night.recorded and (below or (corrected is not None and corrected.is_below)):
        agree = corrected is None or below == corrected.is_below
        kind = _kind_below(night.gate, second=second and len(reference) >= MIN_NIGHTS) if agree else _disputed(night.gate)
    return NightVerdict(night=night, kind=kind, median=middle, limit=limit, nights=len(reference), corrected=corrected)


def median_and_limit(reference: Sequence[float]) -> tuple[float, float]:
    """Of one or more throughputs, in their unit."""
    middle = median(reference)
    count = len(reference)
    if count < MIN_NIGHTS:
        return middle, middle * (1 - PROVISIONAL_DROP)
    if count < FEW_NIGHTS:
        reach = float(stdtrit(count - 1, FEW_QUANTILE)) * stdev(reference) * math.sqrt(1 + 1 / count)
        return middle, middle - max(reach, PROVISIONAL_DROP * middle)
    deviation = median([abs(value - middle) for value in reference])
    spread = max(_MAD_TO_SD * deviation, NOISE_FLOOR * middle)
    return middle, middle - max(SIGMAS * spread * math.sqrt(1 + 1 / count), MIN_DROP * middle)


def _corrected(night: Night, value: float, reference: Sequence[Night]) -> Corrected | None:
    """Judge throughput / controls' speed by the nights that ran the same controls. Only ratios count, so units may be mixed."""
    speed = _speed(night)
    alike = [one for one in reference if [name for name, _ in one.controls] == [name for name, _ in night.controls]]
    if speed is None or not alike:
        return None
    speeds = [_speed(one) or 1.0 for one in alike]
    middle, limit = median_and_limit([(one.value or 0.0) / one_speed for one, one_speed in zip(alike, speeds, strict=True)])
    return Corrected(
        change=value / speed / middle - 1, limit=limit / middle - 1, controls_change=speed / median(speeds) - 1
    )  # fmt: skip


def _speed(night: Night) -> float | None:
    return geometric_mean(rate for _, rate in night.controls) if night.controls else None


def _disputed(gate: Kind | None) -> Kind:
    """Throughput and controls disagree: only the gate can tell."""
    return _kind_below(gate, second=False) if gate in {Kind.FAIL, Kind.PASS, Kind.WIN} else Kind.HARDWARE


def _kind_below(gate: Kind | None, *, second: bool) -> Kind:
    if gate is Kind.FAIL:
        return Kind.FAIL
    if gate in {Kind.PASS, Kind.WIN}:
        return Kind.CLEARED
    return Kind.FAIL if second else Kind.SUSPECT


if __name__ == "__main__":
    import sys

    from dflash.standard_output import outlive_reader
    from regression.acceptance import main
    from regression.history import open_store

    outlive_reader()
    sys.exit(main(None, open_store))
