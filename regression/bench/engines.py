"""The same training by threads and by processes on the same devices, one after the other: what each costs.

    python -m regression.bench engines                                       # two GPUs, NCCL
    python -m regression.bench engines --device cpu --shape tiny             # two workers of this machine, Gloo

One target and one drafter train until they are steady and are then measured, in fresh processes, `torchrun` for the second. Times
count from the start of the command. Processor time is of all its processes until they ended, imports and compiling with it;
memory is the largest sum of their proportional set sizes, sampled. FX errors, recompiles and fallbacks are those that the
trainer counts in every process. The engines take turns in the order of the table, so a machine that slows down slows the second.
Known limit: with random weights a drafter's process draws the whole target once for its ends, on its own device.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from regression.bench import settings as bench
from regression.bench.figures import Figure, Result
from regression.bench.settings import Settings
from regression.bench.training import Run, train
from regression.child import Place

ENGINES = ("threads", "processes")
SAMPLE_SECONDS = 0.5
WORKERS = 2  # one target, one drafter
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS))
_COUNTS = ("fx_errors", "recompiles_after_warmup", "fallbacks")


def measure(settings: Settings) -> Result:
    """Both runs. Raises ChildFailed where one left no result."""
    figures: list[Figure] = []
    details: dict[str, Any] = {"levers": list(settings.levers)}
    for engine in ENGINES:
        with tempfile.TemporaryDirectory(prefix=f"{engine}-") as scratch, _Costs().watched() as costs:
            run = train(
                settings,
                Path(scratch) / "engine",
                seconds=settings.run_seconds,
                segments=2,
                before=TORCHRUN if engine == "processes" else (),
                more=flags(settings, engine),
                place=Place(started=costs.started),
            )
        figures += _figures(engine, run, costs)
        details[engine] = {"measure": run.result["measure"], "workers": run.result["workers"], "phases": run.phases()}
    rates = [figure.value for figure in figures if figure.unit == "tok/s"]
    share = rates[1] / rates[0] if rates[0] and rates[1] else None
    figures.append(Figure(name="processes over threads", value=share, unit="share", better="higher"))
    where = f"{settings.device.type}, {'NCCL' if settings.device.type == 'cuda' else 'Gloo'}"
    return Result(bench="engines", shape=settings.shape, device=where, figures=tuple(figures), details=details)


def flags(settings: Settings, engine: str) -> tuple[str, ...]:
    """One target and one drafter, each on a device of its own."""
    on_gpu = settings.device.type == "cuda"
    devices = ("cuda:1,cuda:0" if engine == "threads" else "cuda") if on_gpu else "cpu"  # rank 0, on GPU 0, is the drafter
    return ("--engine", engine, "--topology", "1t+1d", "--devices", devices)


def _figures(engine: str, run: Run, costs: _Costs) -> list[Figure]:
    first_step = next(e["time_seconds"] for e in run.events if e["name"] == "step") - run.started
    memory = costs.peak_bytes / 2**20 if costs.peak_bytes else None
    counts = [
        Figure(name=f"{engine}: {name.replace('_', ' ')}", value=run.result[name], unit="a run", goal=0) for name in _COUNTS
    ]
    return [
        Figure(name=f"{engine}: steady", value=run.tokens_per_second, unit="tok/s", better="higher"),
        Figure(name=f"{engine}: processor time", value=costs.cpu_seconds, unit="s"),
        Figure(name=f"{engine}: memory of all processes", value=memory, unit="MiB", note=costs.unknown),
        Figure(name=f"{engine}: start to training", value=run.phases()["training"], unit="s"),
        Figure(name=f"{engine}: start to the first step's end", value=first_step, unit="s"),
        *counts,
    ]


class _Costs:
    """What a command and everything that it starts take. One at a time: processor time is that of all ended children."""

    def __init__(self) -> None:
        self.cpu_seconds = 0.0
        self.peak_bytes = 0
        self.unknown = ""
        self._pid: int | None = None
        self._stop = threading.Event()

    def started(self, pid: int) -> None:
        """The command's process id."""
        self._pid = pid

    @contextlib.contextmanager
    def watched(self) -> Iterator[_Costs]:
        """Sample inside the block; the figures are complete after it."""
        before = _children_seconds()
        thread = threading.Thread(target=self._sample, name="costs", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()
            self.cpu_seconds = _children_seconds() - before

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            with contextlib.suppress(psutil.NoSuchProcess):
                self.peak_bytes = max(self.peak_bytes, self._bytes())

    def _bytes(self) -> int:
        if self._pid is None:
            return 0
        command, total = psutil.Process(self._pid), 0
        for process in (command, *command.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                try:
                    total += process.memory_full_info().pss
                except (AttributeError, psutil.AccessDenied):  # not Linux, or not allowed
                    self.unknown = "memory that processes share is counted in each"
                    total += process.memory_info().rss
        return total


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this bench alone."""
    return bench.main("engines", measure, arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
