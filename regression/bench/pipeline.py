"""Target and drafter together, as the trainer runs them, beside each stage alone on the same data.

    python -m regression.bench pipeline

The pipeline is a child process, measured when it is steady. The stages run alone in this process, through the same workers: the
target makes states, the drafter takes some that are ready, with an optimizer step after each micro-batch, as the preset has it.
On one GPU the two stages share it, so the pipeline cannot be as fast as its slower stage alone: its limit is what a device gives
that works on both in turns, 1 / (1/t + 1/d). On a CPU each has a thread of its own, and may pass that limit.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dflash import assembly
from dflash.batch import TargetStates
from dflash.compile_policy import CompilePolicy
from dflash.engine.devices import place
from dflash.flat import FlatAdamW
from regression.bench import settings as bench
from regression.bench.clock import synchronize
from regression.bench.drafter_step import whole_step
from regression.bench.figures import Figure, Result
from regression.bench.settings import Settings
from regression.bench.training import Run, train


def measure(settings: Settings) -> Result:
    """The run first, then the stages."""
    with tempfile.TemporaryDirectory(prefix="pipeline-") as scratch:
        run = train(settings, Path(scratch) / "together", seconds=settings.run_seconds, segments=2)
        target, drafter = stages(settings, Path(scratch))
    together, slower = run.tokens_per_second, min(target, drafter)
    shared = 1 / (1 / target + 1 / drafter)
    figures = [
        Figure(name="pipeline", value=together, unit="tok/s", better="higher", ceiling=shared),
        Figure(name="target alone", value=target, unit="tok/s", better="higher"),
        Figure(name="drafter alone, with optimizer", value=drafter, unit="tok/s", better="higher"),
        Figure(name="pipeline over its slower stage", value=together / slower, unit="share", better="higher"),
        Figure(
            name="pipeline over both in turns", value=together / shared, unit="share", better="higher", goal=settings.goal(0.97)
        ),
        *_counts(run, settings),
    ]
    return Result(
        bench="pipeline",
        shape=settings.shape,
        device=str(settings.device),
        figures=tuple(figures),
        details={"measure": run.result["measure"], "levers": list(settings.levers), "supply_demand": run.result["supply_demand"]},
    )


def stages(settings: Settings, scratch: Path) -> tuple[float, float]:
    """Tokens per second of the target and of the drafter, each alone."""
    config = dataclasses.replace(settings.config(), output=scratch / "alone")
    config.output.mkdir()
    policy = CompilePolicy(config.compile, num_drafters=1)
    with policy.watching(), policy.in_worker():
        parts = assembly.build(config, place(config), policy)
        target, drafter = parts.targets[0], parts.drafters[0]
        optimizer = FlatAdamW(drafter.flat, config.optim)
        ready: list[TargetStates] = [target.produce(number) for number in range(2)]
        for states in ready:
            whole_step(drafter, optimizer, states)
        with policy.frozen():
            tokens = ready[0].batch.num_tokens
            made = _seconds(target.produce, settings)
            used = _seconds(lambda number: whole_step(drafter, optimizer, ready[number % len(ready)]), settings)
    return tokens / made, tokens / used


def _seconds(work: Callable[[int], object], settings: Settings) -> float:
    """Wall-clock seconds of one call, in a row as long as a measured segment at least and `rounds` calls."""
    synchronize(settings.device)
    started, calls = time.perf_counter(), 0
    while calls < settings.rounds or time.perf_counter() - started < settings.run_seconds:
        work(calls)
        calls += 1
    synchronize(settings.device)
    return (time.perf_counter() - started) / calls


def _counts(run: Run, settings: Settings) -> list[Figure]:
    memory = max(run.result["peak_memory_bytes"].values(), default=None)
    return [
        Figure(name="recompiles", value=run.result["recompiles_after_warmup"], unit="a run", goal=settings.goal(0)),
        Figure(name="fallbacks", value=run.result["fallbacks"], unit="a run", goal=settings.goal(0)),
        Figure(name="peak memory", value=memory / 2**30 if memory else None, unit="GiB"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this bench alone."""
    return bench.main("pipeline", measure, arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
