"""How fast would N targets and M drafters be? From the stage times of measured runs: `python -m dflash plan --simulate RUN ...`.

Every micro-batch is followed through the stations of the engine `processes`: its drafter has a free slot and grants it, its
target is free and makes it, the target's link carries it, its drafter takes it in its turn; at the end of a step all drafters
wait for the last one, sum their gradients and update. Who works for whom is the engine's own rule (`dflash.engine.roles`). Every
event follows from earlier ones, so a run of n micro-batches takes n sums and maxima, at 1,024 GPUs as at two.

Stage times are means over a run (`result.json`: seconds at work over micro-batches), with a lognormal spread around them; the
update is what the last drafter of a step spends between its last micro-batch and its next. Links are full duplex, one transfer at
a time; gradients are summed by a ring over the drafters.

Known limits: threads of one process, whose drafters take whatever comes next, are simulated by the same fixed turns. Stage times
are taken not to depend on N and M, which holds for one GPU a worker and not for workers that share cores. Imports no torch.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.config import ConfigError, Topology
from dflash.engine.roles import Roles

STEPS = 40
_AROUND = 3  # splits on either side of the estimated best one that are simulated


@dataclass(frozen=True, kw_only=True)
class Stages:
    """What one run was measured to take."""

    target_seconds: float  # of a micro-batch
    drafter_seconds: float
    update_seconds: float  # of a step
    tokens: float  # of a micro-batch
    batches_per_drafter: float  # of a step
    slots: int  # in front of a drafter


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Machines of equal size and what connects them."""

    gpus_per_node: int = 8
    link_gb_per_second: float = 400.0  # between GPUs of a machine
    network_gb_per_second: float = 50.0  # of a GPU to another machine
    states_bytes: float = 0.0  # target states of a micro-batch
    gradient_bytes: float = 0.0  # of a drafter


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a topology would do."""

    topology: str
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    queue_occupancy: float  # share of slots that hold a micro-batch that nobody works on yet
    targets_wait: float  # share of their time
    drafters_wait: float


def simulate(
    stages: Stages, topology: Topology, fleet: Fleet, *, steps: int = STEPS, spread: float = 0.05, seed: int = 0
) -> Outcome:
    """Run `steps` steps after as many of warm-up. `spread` is the standard deviation of the logarithm of stage times."""
    workers = topology.targets + topology.drafters
    roles = Roles.assign(topology, tuple(rank // fleet.gpus_per_node for rank in range(workers)))
    drawn = random.Random(f"{seed} {topology}")
    per_step = max(topology.drafters, round(stages.batches_per_drafter * topology.drafters))
    target_free = dict.fromkeys(roles.targets, 0.0)
    link_free = dict.fromkeys(roles.targets, 0.0)
    drafter_free = dict.fromkeys(roles.drafters, 0.0)
    slots_free: dict[int, list[float]] = {rank: [0.0] * stages.slots for rank in roles.drafters}
    update = stages.update_seconds + _summing_seconds(topology, fleet, workers)
    target_busy = drafter_busy = queued = warm = 0.0
    for step in range(2 * steps):
        if step == steps:
            warm, target_busy, drafter_busy, queued = max(drafter_free.values()), 0.0, 0.0, 0.0
        for number in range(step * per_step, (step + 1) * per_step):
            drafter, target = roles.drafter_of(number), roles.target_of(number)
            slots = slots_free[drafter]
            turn = number // topology.drafters % stages.slots
            making, learning = (_drawn(drawn, mean, spread) for mean in (stages.target_seconds, stages.drafter_seconds))
            made = max(target_free[target], slots[turn]) + making
            arrived = max(made, link_free[target]) + _transfer_seconds(target, drafter, fleet)
            begun = max(arrived, drafter_free[drafter])
            target_free[target], link_free[target] = made, arrived
            drafter_free[drafter] = slots[turn] = begun + learning
            target_busy, drafter_busy, queued = target_busy + making, drafter_busy + learning, queued + begun - arrived
        ended = max(drafter_free.values()) + update
        drafter_free = dict.fromkeys(roles.drafters, ended)
    seconds = max(drafter_free.values()) - warm
    rate = steps * per_step * stages.tokens / seconds
    return Outcome(
        topology=str(topology),
        tokens_per_second=rate,
        tokens_per_second_per_gpu=rate / workers,
        queue_occupancy=queued / seconds / (stages.slots * topology.drafters),
        targets_wait=max(0.0, 1.0 - target_busy / seconds / topology.targets),
        drafters_wait=max(0.0, 1.0 - (drafter_busy + steps * update * topology.drafters) / seconds / topology.drafters),
    )


def best_split(stages: Stages, gpus: int, fleet: Fleet, *, spread: float = 0.05) -> list[Outcome]:
    """The fastest split of so many GPUs first, and those beside it. Raises ConfigError below two."""
    if gpus < 2:
        raise ConfigError(f"{gpus} GPUs cannot hold a target and a drafter each: simulate 2 or more")
    learning = stages.drafter_seconds + stages.update_seconds / stages.batches_per_drafter
    guess = round(gpus * learning / (learning + stages.target_seconds))
    around = range(max(1, guess - _AROUND), min(gpus - 1, guess + _AROUND) + 1) or range(gpus - 1, gpus)
    found = [simulate(stages, Topology(gpus - drafters, drafters), fleet, spread=spread) for drafters in around]
    return sorted(found, key=lambda one: -one.tokens_per_second)


def stages_of(result: dict[str, Any], config: dict[str, Any]) -> Stages:
    """Stage times of a run, from its `result.json` and `config.json`. Raises ConfigError where they hold none."""
    try:
        kinds = {kind: [row for row in result["workers"] if row["worker"].startswith(kind)] for kind in ("target", "drafter")}
        busy = {kind: sum(row["busy_seconds"] for row in rows) for kind, rows in kinds.items()}
        items = {kind: sum(row["items"] for row in rows) for kind, rows in kinds.items()}
        drafters, batches = len(kinds["drafter"]), items["drafter"]
        return Stages(
            target_seconds=busy["target"] / items["target"],
            drafter_seconds=busy["drafter"] / batches,
            update_seconds=min(row["sync_seconds"] for row in kinds["drafter"]) / result["steps"],
            tokens=result["tokens"] / batches,
            batches_per_drafter=batches / result["steps"] / drafters,
            slots=max(1, math.ceil(config["telemetry"]["queue_items"] / drafters)),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"the run holds no stage times of targets and drafters ({type(error).__name__}: {error}): expected result.json and "
            f"config.json of a training run that ended, by threads or processes"
        ) from error


def report(runs: Sequence[Path], gpus: Sequence[int], fleet: Fleet, *, spread: float) -> dict[str, Any]:
    """Each run beside what is foretold from its own stage times, and the best splits by the stage times of the first."""
    measured = []
    for run in runs:
        result, config = _read(run / "result.json"), _read(run / "config.json")
        stages = stages_of(result, config)
        found = simulate(stages, Topology.parse(result["topology"]), fleet, spread=spread)
        foretold, rate = found.tokens_per_second, result["tokens_per_second"]
        row = {"run": str(run), "topology": found.topology, "engine": result.get("engine", "threads")}
        row |= {"measured_tokens_per_second": rate, "simulated_tokens_per_second": foretold, "ratio": foretold / rate}
        row |= {"measured_queue_occupancy": result["queue_occupancy"], "simulated_queue_occupancy": found.queue_occupancy}
        measured.append({**row, "stages": vars(stages)})
    first = Stages(**measured[0]["stages"])
    splits = {str(count): [vars(one) for one in best_split(first, count, fleet, spread=spread)] for count in gpus}
    return {"runs": measured, "fleet": vars(fleet), "spread": spread, "best": splits}


def _transfer_seconds(target: int, drafter: int, fleet: Fleet) -> float:
    same = target // fleet.gpus_per_node == drafter // fleet.gpus_per_node
    return fleet.states_bytes / 1e9 / (fleet.link_gb_per_second if same else fleet.network_gb_per_second)


def _summing_seconds(topology: Topology, fleet: Fleet, workers: int) -> float:
    """Of a ring: every drafter sends and receives its gradients twice, but for its own part."""
    rate = fleet.link_gb_per_second if workers <= fleet.gpus_per_node else fleet.network_gb_per_second
    return 2 * (topology.drafters - 1) / topology.drafters * fleet.gradient_bytes / 1e9 / rate


def _drawn(drawn: random.Random, mean: float, spread: float) -> float:
    return mean * math.exp(drawn.gauss(0.0, spread) - spread**2 / 2) if spread else mean


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): name the directory of a training run that ended") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no result: name the directory of a training run that ended")
    return values
