"""Stretches of a run between two steps: when they are alike, and what a segment says of itself. Pure; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RATE_TOLERANCE = 0.2
OCCUPANCY_TOLERANCE = 0.25
_TIMES = ("items", "tokens", "busy_seconds", "wait_seconds", "sync_seconds")


@dataclass(frozen=True, kw_only=True)
class Window:
    """What decides whether a run is steady: a few steps in a row."""

    tokens_per_second: float
    queue_occupancy: float  # mean over the window, part of the capacity
    compiles: int  # compile phases that ended in it, of any kind


def why_unsteady(before: Window | None, now: Window) -> str | None:
    """Why the run is not steady after these two windows, or None."""
    if before is None:
        return "only one window was seen"
    if before.compiles or now.compiles:
        return f"{before.compiles + now.compiles} compile phases ended in the last two windows"
    change = now.tokens_per_second / before.tokens_per_second - 1
    if abs(change) > RATE_TOLERANCE:
        return f"throughput changed by {change:+.0%} between the last two windows (limit {RATE_TOLERANCE:.0%})"
    drift = now.queue_occupancy - before.queue_occupancy
    if abs(drift) > OCCUPANCY_TOLERANCE:
        return f"queue occupancy changed by {drift:+.2f} between the last two windows (limit {OCCUPANCY_TOLERANCE:.2f})"
    return None


@dataclass(frozen=True)
class Mark:
    """Counters at the end of a step."""

    seconds: float
    wall_clock: float
    steps: int
    tokens: int
    padding_tokens: int
    occupancy_sum: float
    compiles: int
    workers: dict[str, dict[str, Any]]
    stages: dict[str, tuple[int, float]]
    device_seconds: dict[str, float]


def segment_between(begin: Mark, end: Mark, *, num_devices: int) -> dict[str, Any]:
    """The segment between two steps as JSON values, with a row for each worker and stage."""
    seconds, tokens = end.seconds - begin.seconds, end.tokens - begin.tokens
    steps = end.steps - begin.steps
    return {
        "began": begin.wall_clock,
        "ended": end.wall_clock,
        "seconds": seconds,
        "steps": steps,
        "tokens": tokens,
        "padding_tokens": end.padding_tokens - begin.padding_tokens,
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_per_device": tokens / seconds / num_devices,
        "queue_occupancy": (end.occupancy_sum - begin.occupancy_sum) / steps,
        "compiles": end.compiles - begin.compiles,
        "workers": [_worker(begin, end, name, seconds) for name in end.workers],
        "stages": [_stage(begin, end, name) for name in sorted(end.stages)],
    }


def _worker(begin: Mark, end: Mark, name: str, seconds: float) -> dict[str, Any]:
    before = begin.workers.get(name, {})
    row = {"worker": name, "device": end.workers[name]["device"]}
    row |= {key: end.workers[name][key] - before.get(key, 0) for key in _TIMES}
    on_device = end.device_seconds.get(name)
    device_seconds = None if on_device is None else on_device - begin.device_seconds.get(name, 0.0)
    stall = None if device_seconds is None else seconds - device_seconds
    return row | {"device_seconds": device_seconds, "host_stall_seconds": stall}


def _stage(begin: Mark, end: Mark, name: str) -> dict[str, Any]:
    (calls, seconds), (calls_before, seconds_before) = end.stages[name], begin.stages.get(name, (0, 0.0))
    return {"stage": name, "calls": calls - calls_before, "seconds": seconds - seconds_before}
