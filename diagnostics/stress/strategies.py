"""Who goes on at a park point: an explicit schedule, chance, PCT, or a schedule drawn by hypothesis. Imports no torch.

PCT is "A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs" (Burckhardt et al., ASPLOS 2010): random
priorities, and d-1 random steps at which the running thread's priority falls below all others; for n threads and k steps
one run finds a bug of depth d with a probability of at least 1/(n * k**(d-1)).
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from diagnostics.stress.scheduler import LETTERS

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


class Explicit:
    """Follows a string of thread letters; after its end, whoever went last goes on, else the first that can.

    A letter whose thread cannot go on is skipped and counted, so that any string is a schedule and can be shortened.
    """

    def __init__(self, schedule: str) -> None:
        self._rest = list(schedule)
        self.skipped = 0

    def __call__(self, can: str, last: str) -> str:
        """Choose one letter of `can`."""
        while self._rest:
            letter = self._rest.pop(0)
            if letter in can:
                return letter
            self.skipped += 1
        return last if last and last in can else can[0]


class Random:
    """Each time any of them."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def __call__(self, can: str, last: str) -> str:  # noqa: ARG002 - every strategy gets both
        """Choose one letter of `can`."""
        return self._random.choice(can)


class PCT:
    """Random priorities with depth-1 change points among the first `steps` steps."""

    def __init__(self, seed: str, *, threads: int, steps: int, depth: int) -> None:
        chance = random.Random(seed)
        order = chance.sample(LETTERS[:threads], threads)
        self._priorities = {letter: depth + place for place, letter in enumerate(order)}
        changes = chance.sample(range(1, max(steps, depth)), depth - 1)
        self._change_at = {step: priority for priority, step in enumerate(changes, start=1)}
        self._step = 0

    def __call__(self, can: str, last: str) -> str:
        """Choose one letter of `can`."""
        if self._step in self._change_at:
            self._priorities[last] = self._change_at[self._step]
        self._step += 1
        return max(can, key=self._priorities.__getitem__)


def pct_bound(*, threads: int, steps: int, depth: int) -> float:
    """The least probability with which one run finds a bug of this depth."""
    return 1 / (threads * math.pow(max(steps, 1), depth - 1))


def schedules(threads: int, *, max_steps: int) -> SearchStrategy[str]:
    """Schedules for hypothesis, which makes a failing one shorter and prefers earlier letters. Needs the package hypothesis."""
    from hypothesis import strategies as st  # noqa: PLC0415 - of the extra `test`, needed for this alone

    return st.text(alphabet=LETTERS[:threads], max_size=max_steps)


def check_schedule(schedule: str, *, threads: int) -> None:
    """Raise ValueError where a schedule has letters of no thread."""
    wrong = sorted(set(schedule) - set(LETTERS[:threads]))
    if wrong:
        raise ValueError(f"schedule {schedule!r} has {', '.join(wrong)}: this scenario has the threads {LETTERS[:threads]}")
