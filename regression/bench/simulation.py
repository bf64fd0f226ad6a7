"""What `python -m dflash plan --simulate` foretells beside what was measured, for runs of both engines on this machine's CPU.

    python -m regression.bench simulation --device cpu --rounds 8 --timeout-seconds 1800

Real runs through threads and `torchrun`, with 2 to 6 workers and `--rounds` optimizer steps each. Stages have a planted length
(`regression.bench.planted_stages`), so that workers that share a few cores run as if each had its own device, which is what is
simulated. Each run is foretold twice: from its own stage times, and from those of the first run, another topology and engine.
Known limits: it takes ten minutes, and is made only when it is named. On a machine that is so busy that the tiny model's own work
exceeds the planted stages, the first run's stage times are no longer those of the others.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.config import ConfigError, Topology
from dflash.simulated_runs import foretold, stages_of
from dflash.simulation import EngineName, Fleet, Outcome, Stages
from regression.bench import settings as bench
from regression.bench.figures import Figure, Result
from regression.bench.settings import Settings
from regression.child import run_to_success

RUNS: tuple[tuple[EngineName, str], ...] = (
    ("threads", "1t+1d"),
    ("threads", "1t+2d"),
    ("threads", "2t+1d"),
    ("processes", "1t+1d"),
    ("processes", "1t+2d"),
    ("processes", "2t+1d"),
    ("processes", "3t+3d"),
)
TARGET_SECONDS, DRAFTER_SECONDS, SPREAD = 0.20, 0.25, 0.2
BATCHES_PER_STEP, QUEUE_ITEMS = 6, 4
WITHIN = 0.1
TIMEOUT_SECONDS = 280.0
_CONFIG = {"telemetry": {"queue_items": QUEUE_ITEMS}}


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One run and what was foretold of it."""

    engine: EngineName
    topology: str
    result: dict[str, Any]
    own: Outcome  # from its own stage times
    first: Outcome  # from those of the first run

    def error(self, outcome: Outcome) -> float:
        """How far the foretold tokens per second are off, relative."""
        return outcome.tokens_per_second / float(self.result["tokens_per_second"]) - 1


def measure(settings: Settings) -> Result:
    """Make all runs. Raises ChildFailed where one left no result."""
    if settings.device.type != "cpu":
        raise ConfigError(f"bench simulation plants its stages on CPUs, the device is {settings.device}: use --device cpu")
    found: list[Compared] = []
    for engine, topology in RUNS:
        with tempfile.TemporaryDirectory(prefix="simulation-") as scratch:
            result = run(settings, engine, topology, Path(scratch))
        stages = stages_of(result, _CONFIG)
        first = stages_of(found[0].result, _CONFIG) if found else stages
        moved = foretold(result, as_in(first, topology), Fleet())
        found.append(
            Compared(engine=engine, topology=topology, result=result, own=foretold(result, stages, Fleet()), first=moved)
        )
        sys.stderr.write(f"{engine} {topology}: {found[-1].error(found[-1].own):+.1%} {found[-1].error(moved):+.1%}\n")
    figures = [figure for one in found for figure in _figures(one)]
    figures.append(_worst("its own", [one.error(one.own) for one in found]))
    figures.append(_worst("the first run's", [one.error(one.first) for one in found[1:]]))
    details = {"planted": [TARGET_SECONDS, DRAFTER_SECONDS, SPREAD], "runs": [_details(one) for one in found]}
    return Result(bench="simulation", shape="tiny", device="cpu", figures=tuple(figures), details=details)


def run(settings: Settings, engine: EngineName, topology: str, directory: Path) -> dict[str, Any]:
    """The result of one run. Raises ChildFailed."""
    workers = Topology.parse(topology)
    ranks = str(workers.targets + workers.drafters)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks) if engine == "processes" else ()
    planted = [str(number) for number in (TARGET_SECONDS, DRAFTER_SECONDS, SPREAD)]
    fields = {
        "--engine": engine,
        "--topology": topology,
        "--optim.steps": str(settings.rounds),
        "--optim.batches-per-step": str(BATCHES_PER_STEP),
        "--telemetry.queue-items": str(QUEUE_ITEMS),
        "--compile.policy": "eager",
        "--acceptance.estimate-every-steps": "0",
        "--output": str(directory / "run"),
    }
    command = [sys.executable, *torchrun, "-m", "regression.bench.planted_stages", *planted, "train"]
    command += [*settings.train_flags(), *(part for pair in fields.items() for part in pair)]
    run_to_success(command, log=directory / "stderr.log", timeout_seconds=TIMEOUT_SECONDS)
    result: dict[str, Any] = json.loads((directory / "run" / "result.json").read_text())
    return result


def as_in(stages: Stages, topology: str) -> Stages:
    """The stage times of one run in another topology."""
    drafters = Topology.parse(topology).drafters
    slots, per_drafter = max(1, math.ceil(QUEUE_ITEMS / drafters)), BATCHES_PER_STEP / drafters
    return dataclasses.replace(stages, slots=slots, batches_per_drafter=per_drafter)


def _figures(one: Compared) -> list[Figure]:
    name = f"{one.engine} {one.topology}"
    occupancy = one.result["queue_occupancy"]
    lasting = f"{one.own.queue_occupancy:.2f} foretold"
    return [
        Figure(name=f"{name}: measured", value=one.result["tokens_per_second"], unit="tok/s", better="higher"),
        Figure(name=f"{name}: foretold from its own stage times", value=one.error(one.own), unit="off"),
        Figure(name=f"{name}: foretold from the first run's", value=one.error(one.first), unit="off"),
        Figure(name=f"{name}: queue", value=occupancy, unit="share", note=lasting),
    ]


def _worst(whose: str, errors: Sequence[float]) -> Figure:
    worst = max(abs(error) for error in errors)
    return Figure(name=f"worst of all, from {whose} stage times", value=worst, unit="off", goal=WITHIN)


def _details(one: Compared) -> dict[str, Any]:
    parts = {name: one.result[name] for name in ("tokens_per_second", "queue_occupancy", "supply_demand", "seconds", "workers")}
    return {"engine": one.engine, "own": vars(one.own), "first": vars(one.first), **parts}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this bench alone."""
    return bench.main("simulation", measure, arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
