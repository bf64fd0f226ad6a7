"""A planted slowdown: burns a known share of the time after every optimizer step, to see that a drop is noticed."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections import deque
from collections.abc import Sequence

import torch

_STEPS = 9


class Burner:
    """After every step, as much standing still or useless work as makes `share` of the usual time of a step and its burning.

    Usual is the median of the last steps, so that a run which is paused now and then does not burn for its pauses.

    On CPUs the interpreter stands still: the thread sleeps with the GIL, and no other Python thread goes on. GPUs run what is
    already queued, so there every GPU of the run gets bf16 matmuls that fill it for that long, and the leader waits for them.
    Known limit: a GPU that the run leaves idle for part of the time hides that part of its matmuls.
    """

    def __init__(self, share: float, devices: Sequence[torch.device]) -> None:
        self.seconds = 0.0  # burned so far
        self._share = share
        self._gpus = sorted({device for device in devices if device.type == "cuda"}, key=str)
        self._matrices: dict[torch.device, torch.Tensor] = {}
        self._matmul_seconds: dict[torch.device, float] = {}
        self._step_seconds: deque[float] = deque(maxlen=_STEPS)
        self._ended = time.perf_counter()

    def prepare(self) -> None:
        """Time one matmul on every idle GPU. The first step begins now."""
        for device in self._gpus:
            # Random numbers: matmuls of zeros draw little power, and a GPU at its limit makes up for them by a faster clock.
            self._matrices[device] = matrix = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
            for count in (10, 50):  # the first round warms up
                started = self._run(device, matrix, count)
            self._matmul_seconds[device] = (time.perf_counter() - started) / 50
        self._ended = time.perf_counter()

    def after_step(self) -> None:
        """Burn for `share / (1 - share)` of the usual time between two burns."""
        started = time.perf_counter()
        self._step_seconds.append(started - self._ended)
        seconds = statistics.median(self._step_seconds) * self._share / (1 - self._share)
        for device in self._gpus:
            with torch.cuda.device(device):
                for _ in range(round(seconds / self._matmul_seconds[device])):
                    torch.mm(self._matrices[device], self._matrices[device])
        for device in self._gpus:
            torch.cuda.current_stream(device).synchronize()
        if not self._gpus:
            _stand_still(seconds)
        self._ended = time.perf_counter()
        self.seconds += self._ended - started

    @staticmethod
    def _run(device: torch.device, matrix: torch.Tensor, count: int) -> float:
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(count):
            torch.mm(matrix, matrix)
        torch.cuda.synchronize(device)
        return started


def _stand_still(seconds: float) -> None:
    library = ctypes.PyDLL(None)  # calls of a PyDLL keep the GIL
    library.usleep(ctypes.c_uint(round(seconds * 1e6)))
