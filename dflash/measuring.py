"""Time steady running: `python -m dflash train --preset P --measure`. The run saves nothing and ends after its segments.

A subscriber of `dflash.events` sees every optimizer step. It only reads clocks and counters, so the weights are those of the
same steps without measuring. Rules:
- Steady: two windows in a row (a quarter of a segment each, at least 3 steps) in which nothing compiled, with throughputs
  within 20 % and queue occupancies within 0.25 of each other. A run that is not steady after `warmup_segments` segments says
  so and ends without a segment.
- A segment lasts from one step's end to the first step's end after `segment_seconds` and 3 steps. The next follows at once.
- Device time of a worker is CUDA-event time around its calls, on its stream; host stall is the rest of the wall time: waiting
  at the queue, for other workers, and Python between calls. Known limit: what Python does inside a call counts as device time.

All steps are written to `steps.json` beside the run's other files. A run that fails leaves `failure.json`, which says why.
`burn_share` plants a slowdown: see `dflash.burner`.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from torch._dynamo.utils import compilation_time_metrics

from dflash import events
from dflash.burner import Burner
from dflash.config import MeasureConfig, RunConfig
from dflash.engine.threads import DrafterWorker, TargetWorker, WorkerTimes

METHOD = 1  # raised when what is timed changes: numbers of two methods are not compared
STEPS_FILE = "steps.json"
FAILURE_FILE = "failure.json"
RATE_TOLERANCE = 0.2
OCCUPANCY_TOLERANCE = 0.25
_GPU_SEGMENT_SECONDS = 60.0
_CPU_SEGMENT_SECONDS = 5.0
_MIN_STEPS = 3  # of a window and of a segment
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
class _Mark:
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


@dataclass
class Measuring:
    """The subscriber. Steps arrive in the leader's thread, spans in every worker's; `_lock` guards what spans add to."""

    config: MeasureConfig
    devices: tuple[torch.device, ...]
    stop: threading.Event
    times: Callable[[], Sequence[WorkerTimes]] = tuple  # of the engine, as far as it has started
    segments: list[dict[str, Any]] = field(default_factory=list)
    unsteady: str | None = "no step ended"
    warmup_seconds: float = 0.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._stages: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        self._device_seconds: dict[str, float] = defaultdict(float)
        self._steps: dict[str, list[float]] = defaultdict(list)
        self._tokens = self._padding_tokens = 0
        self._begin: _Mark | None = None
        self._mark: _Mark | None = None  # start of the current window or segment
        self._window: Window | None = None
        self._process = psutil.Process()
        self._burner = Burner(self.config.burn_share, self.devices) if self.config.burn_share else None

    @property
    def segment_seconds(self) -> float:
        """The least length of a segment."""
        default = _GPU_SEGMENT_SECONDS if self.devices[0].type == "cuda" else _CPU_SEGMENT_SECONDS
        return self.config.segment_seconds or default

    def on_event(self, event: events.Event) -> None:
        """Count spans and device times, and decide at the end of every step."""
        if event.kind == "span":
            with self._lock:
                calls, seconds = self._stages[event.name]
                self._stages[event.name] = (calls + 1, seconds + (event.duration_seconds or 0.0))
        elif event.name == "device_seconds":
            with self._lock:
                self._device_seconds[event.thread] += event.value or 0.0
        elif event.name == "phase" and event.fields["text"] == "training":
            if self._burner:
                self._burner.prepare()
            self._begin = self._mark = self._counters({"queue_occupancy": 0.0})
        elif event.name == "step":
            self._on_step(event.fields)

    def result(self) -> dict[str, Any]:
        """JSON values: the segments, and what is missing where the run was not measured to its end."""
        seconds = sum(segment["seconds"] for segment in self.segments)
        rate = sum(segment["tokens"] for segment in self.segments) / seconds if seconds else None
        return {
            "method": METHOD,
            "incomplete": self._incomplete(),
            "segment_seconds": self.segment_seconds,
            "burn_share": self.config.burn_share,
            "burned_share": self._burner.seconds / self._elapsed() if self._burner and self._elapsed() else 0.0,
            "warmup_seconds": self.warmup_seconds,
            "warmup_steps": self.warmup_steps,
            "tokens_per_second": rate,
            "tokens_per_second_per_device": rate / self._num_devices() if rate else None,
            "num_devices": self._num_devices(),
            "segments": self.segments,
        }

    def write_steps(self, path: Path) -> None:
        """Every step: its end (seconds since training began), tokens, segment (-1: warm-up), memory in use."""
        path.write_text(json.dumps(self._steps))

    def _num_devices(self) -> int:
        """GPUs in use, or worker threads on a CPU, as in `Placement.num_devices`."""
        return len(set(self.devices)) if self.devices[0].type == "cuda" else len(self.devices)

    def _incomplete(self) -> str | None:
        if self.unsteady:
            return f"never steady: {self.unsteady}"
        if len(self.segments) < self.config.segments:
            return f"the run ended after {len(self.segments)} of {self.config.segments} segments"
        return None

    def _elapsed(self) -> float:
        ends = self._steps["end_seconds"]
        return ends[-1] if ends else 0.0

    def _on_step(self, fields: dict[str, Any]) -> None:
        assert self._begin is not None
        assert self._mark is not None
        if len(self.segments) >= self.config.segments:
            return
        self._tokens += fields["tokens"]
        self._padding_tokens += fields["padding_tokens"]
        now = self._counters(fields)
        self._keep_step(now, fields)
        if self.unsteady is not None:
            self._warm_up(now)
        elif now.steps - self._mark.steps >= _MIN_STEPS and now.seconds - self._mark.seconds >= self.segment_seconds:
            self.segments.append(_segment(self._mark, now, num_devices=self._num_devices()))
            self._mark = now
            rate = self.segments[-1]["tokens_per_second"]
            events.record("notice", text=f"segment {len(self.segments)} of {self.config.segments}: {rate:,.0f} tok/s")
            if len(self.segments) == self.config.segments:
                self.stop.set()
        if self._burner:
            self._burner.after_step()

    def _warm_up(self, now: _Mark) -> None:
        assert self._begin is not None
        assert self._mark is not None
        seconds, steps = now.seconds - self._mark.seconds, now.steps - self._mark.steps
        if steps < _MIN_STEPS or seconds < self.segment_seconds / 4:
            return
        window = Window(
            tokens_per_second=(now.tokens - self._mark.tokens) / seconds,
            queue_occupancy=(now.occupancy_sum - self._mark.occupancy_sum) / steps,
            compiles=now.compiles - self._mark.compiles,
        )
        before = self._window
        self.unsteady = why_unsteady(before, window)
        self._window, self._mark = window, now
        self.warmup_seconds, self.warmup_steps = now.seconds - self._begin.seconds, now.steps
        if self.unsteady is None:
            events.record("notice", text=f"steady after {self.warmup_steps} steps, {self.warmup_seconds:.1f} s")
        elif before is not None and self.warmup_seconds > self.config.warmup_segments * self.segment_seconds:
            events.record("notice", text=f"not steady after {self.warmup_seconds:.1f} s, nothing is measured: {self.unsteady}")
            self.stop.set()

    def _counters(self, fields: dict[str, Any]) -> _Mark:
        steps = len(self._steps["tokens"]) + 1 if "tokens" in fields else 0
        workers = {times.worker: dict(vars(times)) for times in self.times()}
        with self._lock:
            return _Mark(
                seconds=time.perf_counter(),
                wall_clock=time.time(),
                steps=steps,
                tokens=self._tokens,
                padding_tokens=self._padding_tokens,
                occupancy_sum=fields["queue_occupancy"] * steps,  # the event has the mean since the start
                compiles=sum(len(durations) for durations in compilation_time_metrics.values()),
                workers=workers,
                stages=dict(self._stages),
                device_seconds=dict(self._device_seconds),
            )

    def _keep_step(self, now: _Mark, fields: dict[str, Any]) -> None:
        assert self._begin is not None
        self._steps["end_seconds"].append(now.seconds - self._begin.seconds)
        self._steps["tokens"].append(fields["tokens"])
        self._steps["padding_tokens"].append(fields["padding_tokens"])
        self._steps["segment"].append(-1 if self.unsteady is not None else len(self.segments))
        self._steps["host_bytes"].append(self._process.memory_info().rss)
        for device in sorted({str(device) for device in self.devices if device.type == "cuda"}):
            self._steps[f"{device}_bytes"].append(torch.cuda.memory_allocated(device))


@contextlib.contextmanager
def measuring(config: RunConfig, devices: Sequence[torch.device], stop: threading.Event) -> Iterator[Measuring]:
    """Measure inside the block if `config.measure` is on, and set `stop` when it is done. Writes the files at the end."""
    one = Measuring(config.measure, tuple(devices), stop)
    if not config.measure.on:
        yield one
        return
    try:
        with events.subscribed(one.on_event):
            yield one
    except BaseException as error:
        cause = error.__cause__ or error
        reason = {"type": type(cause).__name__, "message": str(cause), "raised": f"{type(error).__name__}: {error}"}
        (config.output / FAILURE_FILE).write_text(json.dumps(reason))
        raise
    finally:
        one.write_steps(config.output / STEPS_FILE)


def timed_targets(workers: Sequence[TargetWorker], config: MeasureConfig) -> Sequence[TargetWorker]:
    """The workers; those on a GPU report the device time of each call while measuring."""
    return [cast("TargetWorker", _OnGpu(w)) if config.on and w.device.type == "cuda" else w for w in workers]


def timed_drafters(workers: Sequence[DrafterWorker], config: MeasureConfig) -> Sequence[DrafterWorker]:
    """See `timed_targets`."""
    return [cast("DrafterWorker", _OnGpu(w)) if config.on and w.device.type == "cuda" else w for w in workers]


class _OnGpu:
    """A worker between two CUDA events. Its calls end synchronized, so reading the events waits for nothing."""

    def __init__(self, worker: Any) -> None:
        self.device: torch.device = worker.device
        self._worker = worker

    def produce(self, number: int) -> Any:
        return self._timed(self._worker.produce, number)

    def accumulate(self, states: Any) -> None:
        self._timed(self._worker.accumulate, states)

    def _timed(self, call: Callable[[Any], Any], argument: Any) -> Any:
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch does not annotate it
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        result = call(argument)
        end.record()
        end.synchronize()
        events.scalar("device_seconds", begin.elapsed_time(end) / 1000)
        return result


def _segment(begin: _Mark, end: _Mark, *, num_devices: int) -> dict[str, Any]:
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


def _worker(begin: _Mark, end: _Mark, name: str, seconds: float) -> dict[str, Any]:
    before = begin.workers.get(name, {})
    row = {"worker": name, "device": end.workers[name]["device"]}
    row |= {key: end.workers[name][key] - before.get(key, 0) for key in _TIMES}
    on_device = end.device_seconds.get(name)
    device_seconds = None if on_device is None else on_device - begin.device_seconds.get(name, 0.0)
    stall = None if device_seconds is None else seconds - device_seconds
    return row | {"device_seconds": device_seconds, "host_stall_seconds": stall}


def _stage(begin: _Mark, end: _Mark, name: str) -> dict[str, Any]:
    (calls, seconds), (calls_before, seconds_before) = end.stages[name], begin.stages.get(name, (0, 0.0))
    return {"stage": name, "calls": calls - calls_before, "seconds": seconds - seconds_before}
