"""The night watch: has the throughput of a series fallen, judged by its own history? Pure statistics, standard library only.

Over the last 30 nights of the reference, with median m and s = max(1.4826 MAD, 0.3 % of m):

    limit = m - max(3 s sqrt(1 + 1/n), 2 % of m)

With fewer than 10 nights the limit is provisional: m - 5 %. A night below the limit is SUSPECT: the gate should compare with
the baseline build in the same night (`wants_gate`). The gate's FAIL makes it FAIL; its PASS or WIN makes it CLEARED: the
baseline build is as slow tonight, so it is the machine. Without a deciding gate, the second valid night in a row below the
limit is FAIL.

The reference is what the accepted level looks like: valid nights since the last accepted change, without nights that failed
and the suspects that began a failure. Otherwise a regression would become its own baseline: within two weeks the limit would
have sunk to it and the red nights would turn green with nobody having accepted anything. A single suspect night that the next
one does not confirm stays in, as noise does; the next one itself is judged without it, by the same limit. INVALID nights are
neither pass nor fail, stay out, and do not break a row.

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
from statistics import median

from regression.verdict import Kind

WINDOW = 30
FEW_NIGHTS = 10
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
class NightVerdict:
    """What the watch says about one night. Numbers are None where there is nothing to compare with."""

    night: Night
    kind: Kind
    median: float | None  # of the reference, unit of the night's value
    limit: float | None
    nights: int  # in the reference

    @property
    def provisional(self) -> bool:
        """The reference is short: only a fall of 5 % is seen."""
        return 0 < self.nights < FEW_NIGHTS

    @property
    def is_below(self) -> bool:
        """The night is valid and below its limit."""
        return self.kind in {Kind.SUSPECT, Kind.FAIL, Kind.CLEARED}

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
        return f"{self.kind}: {change:+.1%} to the median of {self.nights} nights ({limit}){self._why()}"

    def _why(self) -> str:
        if self.kind is Kind.CLEARED:
            return "; the gate found the baseline build as slow tonight: the machine, not the code"
        if self.kind is Kind.FAIL:
            by_gate = self.night.gate is Kind.FAIL
            return "; confirmed by the gate" if by_gate else "; the second valid night in a row"
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
    reference: list[float] = []
    before: Kind | None = None  # of the valid night before; a suspect is the last of the reference
    for night in ordered:
        if night.accepted:
            reference, before = [], None
        confirmed_by = reference[:-1] if before is Kind.SUSPECT else reference  # the limit that made the suspect one
        verdict = judge(night, confirmed_by[-WINDOW:], second=before in {Kind.SUSPECT, Kind.FAIL})
        verdicts.append(verdict)
        if verdict.kind is Kind.INVALID:
            continue
        if verdict.kind is not Kind.FAIL:
            reference.append(night.value or 0.0)
        elif before is Kind.SUSPECT:
            reference.pop()
        before = verdict.kind
    return verdicts


def chronological(night: Night) -> tuple[object, ...]:
    """A key to sort by time; nights of one time have one order, too."""
    return night.time, night.series, str(night.value), night.invalid, night.accepted, night.gate or ""


def judge(night: Night, reference: Sequence[float], *, second: bool) -> NightVerdict:
    """Judge one night by the throughputs of its reference. `second`: the valid night before was SUSPECT or FAIL."""
    if night.invalid:
        return NightVerdict(night=night, kind=Kind.INVALID, median=None, limit=None, nights=len(reference))
    if not reference:
        return NightVerdict(night=night, kind=Kind.INSUFFICIENT, median=None, limit=None, nights=0)
    middle, limit = median_and_limit(reference)
    below = night.value is not None and night.value < limit * (1 - _SLACK)
    kind = _kind_below(night.gate, second=second) if below else Kind.PASS
    return NightVerdict(night=night, kind=kind, median=middle, limit=limit, nights=len(reference))


def median_and_limit(reference: Sequence[float]) -> tuple[float, float]:
    """Of one or more throughputs, in their unit."""
    middle = median(reference)
    count = len(reference)
    if count < FEW_NIGHTS:
        return middle, middle * (1 - PROVISIONAL_DROP)
    deviation = median([abs(value - middle) for value in reference])
    spread = max(_MAD_TO_SD * deviation, NOISE_FLOOR * middle)
    return middle, middle - max(SIGMAS * spread * math.sqrt(1 + 1 / count), MIN_DROP * middle)


def _kind_below(gate: Kind | None, *, second: bool) -> Kind:
    if gate is Kind.FAIL:
        return Kind.FAIL
    if gate in {Kind.PASS, Kind.WIN}:
        return Kind.CLEARED
    return Kind.FAIL if second else Kind.SUSPECT


if __name__ == "__main__":
    import sys

    from regression.acceptance import main
    from regression.history import open_store

    sys.exit(main(None, open_store))
