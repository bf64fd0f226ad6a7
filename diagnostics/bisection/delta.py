"""Delta debugging: the smallest part of a set of changes that still makes things bad (Zeller and Hildebrandt, 2002, ddmin).

A part that cannot be judged (it cannot be built, or is undecided) counts as neither: it is stepped around with finer parts.
Pure; every part is asked for once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from diagnostics.bisection.outcomes import Outcome

T = TypeVar("T")


@dataclass(frozen=True)
class Minimum(Generic[T]):
    """What is left. `doubts` are the outcomes of leaving one of it out, where that was not GOOD."""

    changes: tuple[T, ...]
    doubts: tuple[Outcome, ...]


def minimise(changes: Sequence[T], outcome_of: Callable[[tuple[T, ...]], Outcome]) -> Minimum[T]:
    """The smallest bad part of `changes`, of which all together are bad and none is good."""
    known: dict[tuple[T, ...], Outcome] = {tuple(changes): Outcome.BAD, (): Outcome.GOOD}

    def ask(part: tuple[T, ...]) -> Outcome:
        if part not in known:
            known[part] = outcome_of(part)
        return known[part]

    current, pieces = tuple(changes), 2
    while len(current) > 1:
        smaller = _smaller(current, pieces, ask)
        if smaller is not None:
            pieces = 2 if len(smaller) <= -(-len(current) // pieces) else max(pieces - 1, 2)
            current = smaller
        elif pieces < len(current):
            pieces = min(2 * pieces, len(current))
        else:
            break
    without_one = (ask(tuple(each for each in current if each is not left_out)) for left_out in current)
    return Minimum(current, tuple(outcome for outcome in without_one if outcome is not Outcome.GOOD))


def _smaller(current: tuple[T, ...], pieces: int, ask: Callable[[tuple[T, ...]], Outcome]) -> tuple[T, ...] | None:
    """A bad piece, or a bad complement of one; None where neither is."""
    parts = list(_split(current, pieces))
    complements = [tuple(each for each in current if each not in part) for part in parts] if pieces > 2 else []
    return next((part for part in (*parts, *complements) if ask(part) is Outcome.BAD), None)


def _split(current: tuple[T, ...], pieces: int) -> Iterator[tuple[T, ...]]:
    """Neighbours stay together; sizes differ by at most one."""
    begin = 0
    for number in range(pieces):
        end = begin + (len(current) - begin) // (pieces - number)
        yield current[begin:end]
        begin = end
