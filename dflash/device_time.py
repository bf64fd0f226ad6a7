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
    """A worker between two CUDA events. They are read once the device is past them: a drafter's at the latest when it settles."""

    def __init__(self, worker: Any) -> None:
        self.device: torch.device = worker.device
        self._worker = worker
        self._unread: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def produce(self, number: int) -> Any:
        states = self._between_events(self._worker.produce, number)
        self._read(all_of_them=True)  # they are complete
        return states

    def accumulate(self, states: Any) -> None:
        self._between_events(self._worker.accumulate, states)
        self._read(all_of_them=False)

    def settle(self) -> None:
        self._worker.settle()
        self._read(all_of_them=True)

    def _between_events(self, call: Callable[[Any], Any], argument: Any) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch
        begin.record()
        result = call(argument)
        end.record()
        self._unread.append((begin, end))
        return result

    def _read(self, *, all_of_them: bool) -> None:
        while self._unread and (all_of_them or self._unread[0][1].query()):  # type: ignore[no-untyped-call]
            begin, end = self._unread.pop(0)
            end.synchronize()
            events.scalar("device_seconds", begin.elapsed_time(end) / 1000)
