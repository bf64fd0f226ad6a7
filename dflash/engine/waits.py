"""Which rank do the others wait for? Told from what every rank says of its time with its signs of life.

A slow rank is no fault: nothing ends it before the time-out. But it sets the pace of all, so it is named: the rank that itself
waits less than every other one, by more than a tenth or so of the time. Where several wait equally little, no single rank is to
blame, and the balance of targets and drafters (`dflash.telemetry.verdict`) says more.

Known limits: the times are as old as the last sign of life, so a stretch must be several of them long. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

APART = 0.15  # by so much of its time every other rank waits more


@dataclass(frozen=True, kw_only=True)
class Waits:
    """What the ranks did in a stretch of the run. Made by `WaitsMeter.stretch`."""

    waiting: dict[str, float]  # by worker: part of its time in which it waited for others
    waited_for: str | None  # the one worker that all others wait for


class WaitsMeter:
    """Compares what ranks have spent with what they had when the last stretch ended."""

    def __init__(self, workers: Sequence[str], *, least_seconds: float) -> None:
        """A stretch is at least `least_seconds` long on every rank."""
        self._workers, self._least_seconds = workers, least_seconds
        self._before: Sequence[Mapping[str, float]] | None = None

    def stretch(self, spent: Sequence[Mapping[str, float] | None]) -> Waits | None:
        """The stretch since the last one; None while it is too short.

        `spent` has the seconds of every rank so far, by kind of `dflash.engine.loops.Doing`; None for one that has said nothing.
        """
        now = [one for one in spent if one is not None]
        if len(now) < len(self._workers):
            return None
        if self._before is None:
            self._before = now
            return None
        pairs = list(zip(self._before, now, strict=True))
        totals = [sum(after.values()) - sum(before.values()) for before, after in pairs]
        if min(totals) < self._least_seconds:
            return None
        self._before = now
        shares = [(a["waiting"] - b["waiting"]) / total for (b, a), total in zip(pairs, totals, strict=True)]
        waiting = dict(zip(self._workers, shares, strict=True))
        return Waits(waiting=waiting, waited_for=waited_for(waiting))


def waited_for(waiting: Mapping[str, float]) -> str | None:
    """The worker that waits less than each of the others by more than APART, if there is one."""
    if len(waiting) < 2:
        return None
    least, next_one = sorted(waiting, key=lambda worker: waiting[worker])[:2]
    return least if waiting[next_one] - waiting[least] > APART else None
