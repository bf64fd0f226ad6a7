"""Tokens per second of a planned run, from its useful work and rates that were measured; `dflash.plan` is the command.

Rates are those of one GPU, found by `python -m regression.bench drafter_step target_forward --json FILE`. They hold for the shape
and the levers that they were measured with: where the run has others, `cautions` says so. A device's load is the time of the
workers on it; the fullest device sets the pace, as if the queue never ran dry.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.config import ConfigError, RunConfig
from dflash.plan_memory import Sizes


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one GPU was measured to do."""

    drafter_tflops: float  # useful TFLOP/s of forward, loss and backward
    target_tflops: float  # useful TFLOP/s of the target's forward
    compiled_target_tflops: float  # the same with `compile.target`
    update_seconds_per_parameter: float  # of the optimizer step
    levers: frozenset[str] = frozenset()  # that the drafter's rate was measured with, see `levers_of`
    hidden_size: int | None = None  # of the drafter that was measured; None: not known


def levers_of(config: RunConfig) -> frozenset[str]:
    """What changes the drafter's rate, by the names that `regression.bench --levers` takes."""
    on = {
        "loss": config.compile.loss,
        "copies": config.optim.bf16_copies,
        "fp8": config.loss.fp8_head,
        "memory": config.compile.activation_memory < 1,
    }
    return frozenset(name for name, is_on in on.items() if is_on)


def speed_of(
    config: RunConfig, sizes: Sizes, work: dict[str, float], rates: Rates, targets: Sequence[str], drafters: Sequence[str]
) -> dict[str, Any]:
    """Tokens per second, and what each device and stage takes of a micro-batch in the mean."""
    forward = work["target"] / (rates.compiled_target_tflops if config.compile.target else rates.target_tflops)
    step = work["drafter"] / rates.drafter_tflops
    update = rates.update_seconds_per_parameter * sizes.drafter_parameters / config.optim.batches_per_step
    loads: dict[str, float] = defaultdict(float)
    for device in targets:
        loads[device] += forward / len(targets)
    for device in drafters:
        loads[device] += step / len(drafters)
    for device in set(drafters):
        loads[device] += update  # the leader updates while all drafters wait
    fullest = max(loads, key=lambda device: loads[device])
    tokens = config.data.rows_per_batch * config.data.sequence_length
    return {
        "tokens_per_second": tokens / loads[fullest],
        "fullest_device": fullest,
        "milliseconds_of_a_micro_batch": {"target": forward * 1e3, "drafter": step * 1e3, "update": update * 1e3},
        "load": {device: load / loads[fullest] for device, load in loads.items()},
        "cautions": _cautions(config, sizes, rates),
    }


def read_rates(path: Path) -> Rates:
    """The rates in a file that `regression.bench --json` wrote. Raises ConfigError where a figure is missing or of a CPU."""
    try:
        results = json.loads(path.read_text())["results"]
        figures = {
            name: {row["name"]: row["value"] for row in results[name]["figures"]} for name in ("drafter_step", "target_forward")
        }
        _require_gpus({results[name]["device"] for name in figures})
        step, forward, details = figures["drafter_step"], figures["target_forward"], results["drafter_step"]["details"]
        as_it_is = forward["runner, layers as they are"] / forward["runner, compiled layers"]
        return Rates(
            drafter_tflops=float(step["useful work"]),
            target_tflops=float(forward["useful work"] * as_it_is),
            compiled_target_tflops=float(forward["useful work"]),  # the bench tells that of compiled layers
            update_seconds_per_parameter=float(step["optimizer step"]) / 1e3 / int(details["parameters"]),
            levers=frozenset(details.get("levers", ())) - {"target"},
            hidden_size=details.get("hidden_size"),
        )
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{path} holds no rates ({type(error).__name__}: {error}): write it on such a GPU with "
            f"python -m regression.bench drafter_step target_forward --json FILE"
        ) from error


def _cautions(config: RunConfig, sizes: Sizes, rates: Rates) -> list[str]:
    """Why the speed may be another one."""
    found, wanted = [], levers_of(config)
    if wanted != rates.levers:
        had, has = (", ".join(sorted(names)) or "none" for names in (rates.levers, wanted))
        found.append(f"the drafter's rate was measured with the levers {had}, this run has {has}: measure with --levers")
    if rates.hidden_size not in (None, sizes.shape.hidden_size):
        found.append(
            f"rates were measured at hidden size {rates.hidden_size}, this drafter has {sizes.shape.hidden_size}: smaller "
            f"matrices use a GPU less well, and at 576 instead of 4096 a run was 4 times slower than planned"
        )
    return found


def _require_gpus(places: set[str]) -> None:
    if not all(place.startswith("cuda") for place in places):
        raise ValueError(f"measured on {', '.join(sorted(places))}")
