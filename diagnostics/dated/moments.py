"""The moments where throughput or the kind of failure changed, and what happened just before, most suspicious first.

A state is a stretch of steady throughput or a failure. Slow is below 0.7 of the best before. What lies between the last good
state and the change is suspected by what it can do to compiled training (`SUSPICION`), more if it is known to do just this,
then by nearness. The order is a hint where to look, not a proof.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from diagnostics.dated.entry import Entry
from diagnostics.dated.runs import LOWER, Run

SUSPICION = {  # of an entry's kind: points, and why
    "cache deleted": (100, "a cold cache makes every thread compile at once: the window of every tracing race"),
    "torch replaced": (95, "another build of torch has other races, kernels and cache keys: the old cache does not serve it"),
    "torch installed": (90, "the version of torch decides which races exist"),
    "compile stack replaced": (85, "Triton and CUDA libraries decide what compiles, and how fast it runs"),
    "driver loaded": (80, "a driver must fit the CUDA that torch was built for"),
    "driver installed": (80, "a new driver needs a reboot before it is used"),
    "GPU fault": (80, "a faulty GPU fails or slows down"),
    "cache lost entries": (75, "missing entries are compiled again"),
    "environment made": (70, "everything in it may have another version"),
    "compile stack installed": (70, "Triton and CUDA libraries decide what compiles"),
    "stack replaced": (65, "model code and its requirements changed"),
    "stack installed": (60, "model code and its requirements changed"),
    "checkout": (50, "the code changed"),
    "commit": (45, "the code changed"),
    "leftover": (45, "an install was broken off or doubled"),
    "cache born": (40, "what ran then compiled cold"),
    "reboot": (40, "driver, clocks and mounts may differ after it"),
    "kernel installed": (30, "it is used after the next reboot"),
    "packages installed": (25, "other packages changed"),
    "cache grew": (10, "something was compiled anew: a new shape, code or version"),
    "checkpoint": (5, ""),
}
_RELATED = {  # what is known to bring these failures about
    "missing-dependency": {"stack replaced", "stack installed", "packages installed", "environment made"},
    "broken-install": {"torch replaced", "compile stack replaced", "leftover", "packages installed"},
    "driver-mismatch": {"driver loaded", "driver installed", "torch replaced", "torch installed", "reboot", "kernel installed"},
    "gpu-hardware": {"GPU fault"},
    "slow": {"cache deleted", "torch replaced", "commit", "checkout", "GPU fault"},
    "F1": {"cache deleted", "torch replaced", "torch installed"},
}
_BONUS = 25
_NEAR_POINTS = 10
_LATER_POINTS = 60
_SLACK_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class State:
    """How a run was for a while. `label`: healthy, slow or failed."""

    label: str
    begin_seconds: float
    end_seconds: float
    what: str
    run: str
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """Something that happened before a change."""

    entry: Entry
    points: float
    why: str


@dataclass(frozen=True, kw_only=True)
class Moment:
    """From one state to another."""

    before: State
    after: State
    since_seconds: float  # end of the last good state
    suspects: tuple[Suspect, ...]


def states(runs: Sequence[Run]) -> list[State]:
    """The states of all runs, in order."""
    found: list[State] = []
    best: dict[str, float] = {}
    for run in sorted(runs, key=lambda run: (run.begin_seconds, str(run.path))):
        errors = [failure for failure in run.failures if failure.error]
        warned = ", ".join(dict.fromkeys(failure.kind for failure in run.failures if not failure.error))
        for segment in run.segments:
            reference = best.get(run.unit, 0.0)
            slow = segment.rate < LOWER * reference
            best[run.unit] = max(reference, segment.rate)
            ratio = f", {segment.rate / reference:.2f} of the best before" if reference else ""
            said = f"; its log warns of {warned}" if slow and warned else ""
            found.append(
                State(label="slow" if slow else "healthy", begin_seconds=segment.begin_seconds, end_seconds=segment.end_seconds,
                      what=f"{segment.rate:,.0f} {run.unit}{ratio}{said}", run=str(run.path))
            )  # fmt: skip
        if errors:
            first = min(errors, key=lambda failure: failure.seconds)
            kinds = tuple(dict.fromkeys(failure.kind for failure in errors))
            found.append(
                State(
                    label="failed",
                    begin_seconds=first.seconds,
                    end_seconds=first.seconds,
                    what=f"{', '.join(kinds)} ({first.place})",
                    run=str(run.path),
                    kinds=kinds,
                )
            )
    return found


def moments(found: Sequence[State], entries: Sequence[Entry]) -> list[Moment]:
    """The changes, in order, each with its suspects."""
    changes: list[Moment] = []
    good: State | None = None
    for before, after in itertools.pairwise(found):
        good = before if before.label == "healthy" else good
        if (before.label, before.kinds) == (after.label, after.kinds):
            continue
        since = good.end_seconds if good is not None and after.label != "healthy" else before.end_seconds
        changes.append(
            Moment(before=before, after=after, since_seconds=since, suspects=_suspects(entries, since, before.end_seconds, after))
        )
    return changes


def _suspects(entries: Sequence[Entry], since: float, near: float, after: State) -> tuple[Suspect, ...]:
    until = after.begin_seconds + _SLACK_SECONDS
    found = []
    for entry in entries:
        earliest = entry.time_seconds if entry.not_before_seconds is None else entry.not_before_seconds
        if entry.time_seconds <= since or earliest > until or entry.kind not in SUSPICION:
            continue
        points, why = SUSPICION[entry.kind]
        related = any(entry.kind in _RELATED.get(name, ()) for name in (after.label, *after.kinds))
        distance = max(0.0, min(1.0, (entry.time_seconds - since) / max(1.0, until - since)))
        late = _NEAR_POINTS if entry.time_seconds > near else 0
        late -= _LATER_POINTS if entry.time_seconds > until else 0  # perhaps it came only after the change
        found.append(Suspect(entry=entry, points=points + _BONUS * related + _NEAR_POINTS * distance + late, why=why))
    return tuple(sorted(found, key=lambda suspect: -suspect.points))
