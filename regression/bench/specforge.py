"""SpecForge's drafter and loss (PyPI `specforge`) beside ours, in one run on one shape: `ratio_to_specforge`.

    pip install --no-deps --target DIR specforge==0.2.0
    python -m regression.bench specforge --specforge DIR

SpecForge runs in a child process that has DIR on its path (`specforge_child` says what of it is driven); ours in this one. Both
draw all anchors of one supervised document at random, so they see the same number of pairs on average, not the same anchors.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dflash.compile_policy import CompilePolicy
from dflash.flat import FlatAdamW
from dflash.worker import DrafterModelWorker
from regression.bench import settings as bench
from regression.bench.clock import ceilings, milliseconds
from regression.bench.drafter_step import random_ends, random_states, whole_step
from regression.bench.figures import Figure, Result
from regression.bench.settings import Settings
from regression.child import ChildFailed, Place, run_json

TIMEOUT_SECONDS = 240.0


def measure(settings: Settings) -> Result:
    """Theirs, then ours. Raises ChildFailed without the package or where it does not run."""
    if settings.specforge is None:
        raise ChildFailed("no --specforge DIR: pip install --no-deps --target DIR specforge==0.2.0")
    flags = ["--shape", settings.shape, "--device", str(settings.device), "--rounds", str(settings.rounds)]
    path = os.pathsep.join([str(Path.cwd()), str(settings.specforge.absolute()), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="specforge-") as scratch:
        command = [sys.executable, "-m", "regression.bench.specforge_child", *flags]
        place = Place(variables={"PYTHONPATH": path})
        theirs = run_json(command, log=Path(scratch) / "stderr.log", timeout_seconds=TIMEOUT_SECONDS, place=place).result
    ours = our_step(settings)
    tokens = settings.config().data.sequence_length
    memory = theirs["peak_bytes"] / 2**30
    figures = (
        Figure(name="SpecForge: step (forward, loss, backward)", value=theirs["step_ms"], unit="ms"),
        Figure(name="SpecForge: context", value=tokens / theirs["step_ms"] * 1000, unit="tok/s", better="higher"),
        Figure(name="SpecForge: peak memory, without an optimizer", value=memory or None, unit="GiB"),
        Figure(name="SpecForge: first step", value=theirs["first_step_seconds"], unit="s"),
        Figure(name="ours: step (forward, loss, backward)", value=ours, unit="ms"),
        Figure(name="ratio_to_specforge", value=theirs["step_ms"] / ours, unit="times", better="higher", goal=settings.goal(1.5)),
    )
    details = {**theirs, **ceilings(settings.device)}
    return Result(bench="specforge", shape=settings.shape, device=str(settings.device), figures=figures, details=details)


def our_step(settings: Settings) -> float:
    """Milliseconds of our step, as in the bench `drafter_step`."""
    config, device = settings.config(), settings.device
    shape = bench.drafter_shape(config)
    policy = CompilePolicy(config.compile, num_drafters=1)
    with policy.watching(), policy.in_worker():
        states = random_states(config, shape, device)
        worker = DrafterModelWorker("drafter-0", config, shape, random_ends(shape, device), device, policy)
        whole_step(worker, FlatAdamW(worker.flat, config.optim), states)
        with policy.frozen():
            return milliseconds(lambda: worker.forward_and_backward(states), device, rounds=settings.rounds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this bench alone."""
    return bench.main("specforge", measure, arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
