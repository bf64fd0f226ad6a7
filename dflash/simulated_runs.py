"""Stage times of measured runs, each run beside what is foretold of it, and larger ones: `python -m dflash plan --simulate RUN`.

A run's `result.json` has, for every worker, micro-batches, seconds at work and the sum of their squares: mean and spread of its
stage. What a drafter spends at the ends of steps, without saving and decoding, is waiting for the other drafters, which the
simulation foretells, and the update, which is the rest. Results from before the squares were written have the spread that is
asked for. On GPUs a lone drafter's last micro-batch of a step may still run when the step is finished, and then counts as update.
Where workers shared cores or a GPU, `cautions` says so: their times are not those of workers that do not, nor of more of them.
A run is simulated from its start with as many steps as it had, because its rate counts the filling of the queue.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash.config import ConfigError, Topology
from dflash.simulation import EngineName, Fleet, Outcome, Stages, best_split, mean_of_runs, with_update_of


def stages_of(result: dict[str, Any], config: dict[str, Any], *, spread: float = 0.05) -> Stages:
    """Stage times of a run, from its `result.json` and `config.json`. Raises ConfigError where they hold none."""
    try:
        targets, drafters = (
            [row for row in result["workers"] if row["worker"].startswith(kind)] for kind in ("target", "drafter")
        )
        batches, queue_items = sum(row["items"] for row in drafters), config["telemetry"]["queue_items"]
        apart = result["seconds"]["checkpoints"] + result["seconds"].get("decoding", 0.0)
        ends = sum(row["sync_seconds"] + row.get("finish_seconds", 0.0) for row in drafters) / len(drafters)
        step_end = (ends - apart) / result["steps"]
        stages = Stages(
            target_seconds=_mean(targets),
            drafter_seconds=_mean(drafters),
            update_seconds=0.0,
            tokens=result["tokens"] / batches,
            batches_per_drafter=batches / result["steps"] / len(drafters),
            slots=max(1, math.ceil(queue_items / len(drafters))),
            queue_items=queue_items,
            target_spread=_spread(targets, spread),
            drafter_spread=_spread(drafters, spread),
        )
        return with_update_of(stages, Topology.parse(result["topology"]), engine_of(result), step_end, result["steps"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"the run holds no stage times of targets and drafters ({type(error).__name__}: {error}): expected result.json and "
            f"config.json of a training run that ended, by threads or processes"
        ) from error


def engine_of(result: dict[str, Any]) -> EngineName:
    """The engine of a run."""
    return "processes" if result.get("engine") == "processes" else "threads"


def foretold(result: dict[str, Any], stages: Stages, fleet: Fleet) -> Outcome:
    """What a run with these stage times would have done in the measured run's place."""
    topology = Topology.parse(result["topology"])
    return mean_of_runs(stages, topology, fleet, engine=engine_of(result), steps=result["steps"])


def report(runs: Sequence[Path], gpus: Sequence[int], fleet: Fleet, *, spread: float) -> dict[str, Any]:
    """Each run beside what is foretold from its own stage times, and the best splits by the stage times of the first."""
    measured, first = [], None
    for run in runs:
        result, config = read(run / "result.json"), read(run / "config.json")
        stages = stages_of(result, config, spread=spread)
        first = first or stages
        found, rate = foretold(result, stages, fleet), result["tokens_per_second"]
        row: dict[str, Any] = {"run": str(run), "topology": found.topology, "engine": engine_of(result)}
        row |= {"measured_tokens_per_second": rate, "simulated_tokens_per_second": found.tokens_per_second}
        row |= {"ratio": found.tokens_per_second / rate}
        row |= {"cautions": cautions(result, config)}
        row |= {"measured_queue_occupancy": result["queue_occupancy"], "simulated_queue_occupancy": found.queue_occupancy}
        measured.append({**row, "stages": vars(stages)})
    assert first is not None
    splits = {str(count): [vars(one) for one in best_split(first, count, fleet)] for count in gpus}
    return {"runs": measured, "fleet": vars(fleet), "spread": spread, "best": splits}


def cautions(result: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Why the stage times of a run may not be those of workers that have a core or a GPU each."""
    devices = [str(row.get("device", "an unknown device")) for row in result["workers"]]
    if all(device == "cpu" for device in devices):
        return _of_cores(result.get("leaders_machine"), config.get("cpu_threads", 1))
    shared = sorted({device for device in devices if devices.count(device) > 1})
    if shared and engine_of(result) == "threads":  # in processes each rank has a GPU of its own
        return [f"workers shared {', '.join(shared)}: their stage times hold waits for each other, and change where they do not"]
    return []


def _of_cores(machine: dict[str, Any] | None, threads: int) -> list[str]:
    if machine is None:
        return ["the run does not say how many cores its workers had (it is of an older version): they may have waited for them"]
    workers, cores = machine["workers"], machine["cores"]
    if workers * threads <= cores:
        return []
    each = "" if threads == 1 else f" of {threads} threads each"
    shared = f"{workers} workers{each} shared {cores} cores"
    return [f"{shared}: their stage times hold waits for a core, and are others with more workers; measure with a core for each"]


def read(path: Path) -> dict[str, Any]:
    """A JSON object of a run. Raises ConfigError."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): name the directory of a training run that ended") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no result: name the directory of a training run that ended")
    return values


def _mean(rows: Sequence[dict[str, Any]]) -> float:
    busy = sum(row["busy_seconds"] - row.get("finish_seconds", 0.0) for row in rows)
    return float(busy / sum(row["items"] for row in rows))


def _spread(rows: Sequence[dict[str, Any]], unknown: float) -> float:
    """Of the logarithm, from mean and mean square."""
    if any("busy_square_seconds" not in row for row in rows):
        return unknown
    mean_square = sum(row["busy_square_seconds"] for row in rows) / sum(row["items"] for row in rows)
    return math.sqrt(max(0.0, math.log(mean_square / _mean(rows) ** 2)))
