"""The trainer with stages of a known length: `python -m regression.bench.planted_stages 0.2 0.25 0.1 train --preset P ...`.

The three numbers are TARGET, DRAFTER and SPREAD: each micro-batch of a target lasts at least TARGET seconds, each of a drafter
DRAFTER, times a lognormal factor with the standard deviation SPREAD of its logarithm, drawn from the stage and the number of the
micro-batch. What the model itself does not fill is waited for, as a worker waits for its GPU: without the interpreter's lock and
without a core. So several workers of a small machine run as if each had a device of its own, through the engine's own queues,
processes and collectives.

Known limit: a stage whose own work takes longer than what is planted lasts as long as its work.
"""

from __future__ import annotations

import functools
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from dflash.__main__ import main as trainer
from dflash.batch import TargetStates
from dflash.worker import DrafterModelWorker, TargetModelWorker


def planted_seconds(stage: str, number: int, mean: float, spread: float) -> float:
    """How long micro-batch `number` lasts in a stage."""
    drawn = random.Random(f"{stage} {number}")
    return mean * math.exp(drawn.gauss(0.0, spread) - spread**2 / 2)


def plant(target_seconds: float, drafter_seconds: float, spread: float) -> None:
    """Let all workers of this process last so long."""

    def produce(number: int) -> float:
        return planted_seconds("target", number, target_seconds, spread)

    def accumulate(states: TargetStates) -> float:
        return planted_seconds("drafter", states.batch.index, drafter_seconds, spread)

    TargetModelWorker.produce = _lasting(TargetModelWorker.produce, produce)  # type: ignore[method-assign]  # what planting is
    DrafterModelWorker.accumulate = _lasting(DrafterModelWorker.accumulate, accumulate)  # type: ignore[method-assign]


def _lasting(method: Callable[..., Any], seconds: Callable[[Any], float]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(worker: Any, item: Any) -> Any:
        end = time.perf_counter() + seconds(item)
        made = method(worker, item)
        time.sleep(max(0.0, end - time.perf_counter()))
        return made

    return wrapped


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant and train; the exit code is the trainer's, 2 without three numbers."""
    first, rest = (found := list(sys.argv[1:] if arguments is None else arguments))[:3], found[3:]
    try:
        target, drafter, spread = (float(text) for text in first)
    except ValueError:
        sys.stderr.write(f"error: expected TARGET, DRAFTER (seconds), SPREAD and a command of dflash, found {first}\n")
        return 2
    plant(target, drafter, spread)
    return trainer(rest)


if __name__ == "__main__":
    sys.exit(main())
