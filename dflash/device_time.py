"""Time on the device: CUDA events around each call of a worker, while measuring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from dflash import events
from dflash.config import MeasureConfig
from dflash.engine.loops import DrafterWorker, TargetWorker


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
