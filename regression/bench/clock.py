"""Clocks of the benches: device time by CUDA events, wall time on CPUs; and the two ceilings of a device.

Between two clock reads stands only the work. On a GPU nothing waits inside a round, so the time is the device's as long as
the host is ahead of it; where the host is slower, gaps count, as they do in a run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

ROUNDS = 7


def synchronize(device: torch.device) -> None:
    """Wait for all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(
    work: Callable[[], Any], device: torch.device, *, rounds: int = ROUNDS, inner: int = 1, warmup: int = 1
) -> float:
    """Of one call: the median of `rounds` rounds of `inner` calls, after `warmup` rounds."""
    times = []
    for _ in range(warmup + rounds):
        marks = Marks(device)
        for _ in range(inner):
            work()
        marks.mark("end")
        times.append(marks.read()["end"] / inner)
    return statistics.median(times[warmup:])


class Marks:
    """Times between marks that the work passes, in milliseconds; made at the start. `read` waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._names: list[str] = []
        synchronize(device)
        self._points: list[Any] = [self._point()]

    def mark(self, name: str) -> None:
        """What ran since the last mark is called `name`."""
        self._names.append(name)
        self._points.append(self._point())

    def read(self) -> dict[str, float]:
        """Milliseconds of every part; parts of one name add up."""
        synchronize(self._device)
        found: dict[str, float] = {}
        for name, begin, end in zip(self._names, self._points, self._points[1:], strict=False):
            spent = begin.elapsed_time(end) if self._device.type == "cuda" else (end - begin) * 1000
            found[name] = found.get(name, 0.0) + spent
        return found

    def _point(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch does not annotate it
        event.record()
        return event


def ceilings(device: torch.device) -> dict[str, float]:
    """TFLOP/s of a matmul of random numbers (8192 cubed in bf16; on a CPU 512 cubed in fp32), GB/s of a copy on the device."""
    on_gpu = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if on_gpu else (512, torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    matmul = milliseconds(lambda: left @ right, device, inner=10)
    source = torch.randn(2**28 if on_gpu else 2**23, device=device, generator=generator)
    target = torch.empty_like(source)
    copy = milliseconds(lambda: target.copy_(source), device, inner=10 if on_gpu else 4)
    return {"matmul_tflops": 2 * size**3 / matmul / 1e9, "copy_gb_per_second": 2 * source.nbytes / copy / 1e6}


def peak_bytes(device: torch.device) -> int:
    """Most bytes that tensors held on a GPU since the last `reset_peak`; 0 on a CPU, where nobody counts."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def reset_peak(device: torch.device) -> None:
    """Start counting anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
