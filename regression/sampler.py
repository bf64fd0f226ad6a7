"""Sample the machine beside a run: one thread of this process, one sample a second. `regression.validity` judges them.

Known limit: CPU time of processes that live shorter than a second counts as the run's or as foreign depending on who reaps them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import psutil

from diagnostics import gpu
from regression.validity import Sample

INTERVAL_SECONDS = 1.0


class Sampler:
    """Samples from `__enter__` to `__exit__`. `before` is taken at once; `started` is told when a run has."""

    def __init__(self, gpus: Sequence[str] | None) -> None:
        """`gpus`: NVML indices or UUIDs of the GPUs to watch; None: no GPU."""
        self.before: Sample
        self.samples: list[Sample] = []
        self.children: list[int] = []
        self.failure: BaseException | None = None
        self._gpus = gpus
        self._stop = threading.Event()
        self._watch = gpu.Watch()
        self._last_busy = self._last_own = self._last_time = 0.0
        self._thread = threading.Thread(target=self._main, name="sampler", daemon=True)

    @property
    def xids_unobserved(self) -> str | None:
        """Why XIDs could not be heard, where a GPU is watched."""
        return self._watch.xids_unobserved

    def started(self, child: int) -> None:
        """The process id of a run."""
        self.children.append(child)

    def __enter__(self) -> Self:
        self._watch.__enter__()
        if self._gpus is not None:
            self._watch.listen_for_xids()
        self.before = self._sample()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._watch.__exit__(kind, error, where)
        if self.failure is not None and error is None:
            raise RuntimeError(f"sampling failed: {self.failure}") from self.failure

    def _main(self) -> None:
        try:
            while not self._stop.wait(INTERVAL_SECONDS):
                self.samples.append(self._sample())
        except BaseException as error:  # noqa: BLE001 - told in the thread that waits
            self.failure = error

    def _sample(self) -> Sample:
        processes = self._processes()
        state = self._watch.snapshot() if self._gpus is not None else None
        swap = psutil.swap_memory()
        return Sample(
            time_seconds=time.time(),
            gpus=tuple(one for one in state.gpus if self._is_ours(one)) if state else (),
            gpus_unavailable=state.unavailable if state else None,
            xids=self._watch.xids(),
            own_processes=tuple(process.pid for process in processes),
            foreign_cpu_share=self._foreign_share(processes),
            cpus=available_cpus(),
            swapped_bytes=swap.sin + swap.sout,
        )

    def _is_ours(self, one: gpu.Gpu) -> bool:
        return self._gpus is not None and (str(one.index) in self._gpus or one.uuid in self._gpus)

    def _processes(self) -> list[psutil.Process]:
        found = []
        for number in self.children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child = psutil.Process(number)
                found += [child, *child.children(recursive=True)]
        return found

    def _foreign_share(self, processes: Sequence[psutil.Process]) -> float | None:
        """Of all CPUs' time since the sample before; None in the first sample, and when the run began or ended between."""
        machine = psutil.cpu_times()
        idle = machine.idle + getattr(machine, "iowait", 0.0)
        guests = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)  # counted in user and nice, too
        busy = sum(machine) - guests - idle
        own = _cpu_seconds(psutil.Process()) + sum(_cpu_seconds(process) for process in processes)
        now = time.monotonic()
        spent, mine, seconds = busy - self._last_busy, own - self._last_own, now - self._last_time
        first = self._last_time == 0.0
        self._last_busy, self._last_own, self._last_time = busy, own, now
        if first or mine < 0:
            return None
        return min(1.0, max(0.0, spent - mine) / (seconds * (psutil.cpu_count() or 1)))


def available_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_seconds(process: psutil.Process) -> float:
    """Of a process and its children that ended."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)
