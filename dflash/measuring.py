"""Time steady running: `python -m dflash train --preset P --measure`. The run saves nothing and ends after its segments.

A subscriber of `dflash.events` sees every optimizer step. It only reads clocks and counters, so the weights are those of the
same steps without measuring. Rules:
- Steady (`dflash.segments`): two windows in a row, a quarter of a segment each and at least 3 steps, in which nothing compiled,
  with throughputs within 20 % and queue occupancies within 0.25 of each other. A run that is not steady after
  `warmup_segments` lengths of a segment says so and ends without a segment.
- A segment lasts from one step's end to the first step's end after `segment_seconds` and 3 steps. The next follows at once.
- Device time of a worker is CUDA-event time around its calls (`dflash.device_time`); host stall is the rest of the wall time:
  waiting at the queue, for other workers, and Python between calls. Known limit: what Python does inside a call counts as
  device time.

In processes the leader measures and stops the others. The rows of other ranks are as old as their last sign of life, a fifth of a
second; stages, compiles and device times are those of the leader's process.

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
from typing import Any

import psutil
import torch
from torch._dynamo.utils import compilation_time_metrics

from dflash import events
from dflash.burner import Burner
from dflash.config import MeasureConfig, RunConfig
from dflash.engine.loops import WorkerTimes
from dflash.segments import Mark, Window, segment_between, why_unsteady

METHOD = 1  # raised when what is timed changes: numbers of two methods are not compared
STEPS_FILE = "steps.json"
FAILURE_FILE = "failure.json"
_GPU_SEGMENT_SECONDS = 60.0
_CPU_SEGMENT_SECONDS = 5.0
_MIN_STEPS = 3  # of a window and of a segment


@dataclass
class Measuring:
    """The subscriber. Steps arrive in the leader's thread, spans in every worker's; `_lock` guards what spans add to."""

    config: MeasureConfig
    devices: tuple[torch.device, ...]
    stop: threading.Event
    times: Callable[[], Sequence[WorkerTimes]] = tuple  # of the engine, as far as it has started
    num_devices: int = 0  # GPUs in use, or workers on a CPU; of the engine, which knows other processes'
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
        self._begin: Mark | None = None
        self._mark: Mark | None = None  # start of the current window or segment
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
            "tokens_per_second_per_device": rate / self.num_devices if rate else None,
            "num_devices": self.num_devices,
            "segments": self.segments,
        }

    def write_steps(self, path: Path) -> None:
        """Every step: its end (seconds since training began), tokens, segment (-1: warm-up), memory in use."""
        path.write_text(json.dumps(self._steps))

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
            self.segments.append(segment_between(self._mark, now, num_devices=self.num_devices))
            self._mark = now
            rate = self.segments[-1]["tokens_per_second"]
            events.record("notice", text=f"segment {len(self.segments)} of {self.config.segments}: {rate:,.0f} tok/s")
            if len(self.segments) == self.config.segments:
                self.stop.set()
        if self._burner:
            self._burner.after_step()

    def _warm_up(self, now: Mark) -> None:
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

    def _counters(self, fields: dict[str, Any]) -> Mark:
        steps = len(self._steps["tokens"]) + 1 if "tokens" in fields else 0
        workers = {times.worker: dict(vars(times)) for times in self.times()}
        with self._lock:
            return Mark(
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

    def _keep_step(self, now: Mark, fields: dict[str, Any]) -> None:
        assert self._begin is not None
        self._steps["end_seconds"].append(now.seconds - self._begin.seconds)
        self._steps["tokens"].append(fields["tokens"])
        self._steps["padding_tokens"].append(fields["padding_tokens"])
        self._steps["segment"].append(-1 if self.unsteady is not None else len(self.segments))
        self._steps["host_bytes"].append(self._process.memory_info().rss)
        for device in sorted({str(device) for device in self.devices if device.type == "cuda"}):
            self._steps[f"{device}_bytes"].append(torch.cuda.memory_allocated(device))


@contextlib.contextmanager
def measuring(
    config: RunConfig, devices: Sequence[torch.device], stop: threading.Event, *, leads: bool = True
) -> Iterator[Measuring]:
    """Measure inside the block if `config.measure` is on, and set `stop` when it is done. Writes the files at the end.

    Only the process that leads measures.
    """
    one = Measuring(config.measure, tuple(devices), stop)
    if not config.measure.on or not leads:
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
