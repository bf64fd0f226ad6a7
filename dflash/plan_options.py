"""The options of `python -m dflash plan` beside the fields of a run, and what `--simulate` asks for. Imports no torch."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from dflash.config import ConfigError
from dflash.simulated_runs import report
from dflash.simulation import Fleet

SIMULATED_GPUS = [8, 64, 512, 1024]
_OF_A_RUN = {"--rates", "--gpu-memory-gib"}
_OF_A_SIMULATION = {
    *("--gpus-per-node", "--link-gb-per-second", "--network-gb-per-second"),
    *("--states-gb", "--gradients-gb", "--spread"),
}


def options(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The plan's own options, and the rest: those of `train`. Raises ConfigError for options that the others leave unused."""
    parser = argparse.ArgumentParser(prog="python -m dflash plan", add_help=False, allow_abbrev=False)
    parser.add_argument("--rates", type=Path, help="figures of regression.bench, measured on such a GPU")
    parser.add_argument("--gpu-memory-gib", type=float, help="what a GPU has: exit code 1 where a device needs more")
    parser.add_argument("--simulate", type=Path, nargs="+", metavar="RUN", help="foretell larger runs by the stage times of runs")
    numbers = "how many: the best targets and drafters on them; with --simulate several (8 64 512 1024)"
    parser.add_argument("--gpus", type=int, nargs="+", help=numbers)
    parser.add_argument("--gpus-per-node", type=int, default=8, help="--simulate: of a machine (8)")
    parser.add_argument("--link-gb-per-second", type=float, default=400.0, help="--simulate: inside a machine (400)")
    parser.add_argument("--network-gb-per-second", type=float, default=50.0, help="--simulate: a GPU to another machine (50)")
    parser.add_argument("--states-gb", type=float, default=0.0, help="--simulate: target states of a micro-batch (0)")
    parser.add_argument("--gradients-gb", type=float, default=0.0, help="--simulate: gradients of a drafter (0)")
    parser.add_argument(
        "--spread", type=float, default=0.05, help="--simulate: of stage times, where a run does not tell it (0.05)"
    )
    own, fields = parser.parse_known_args(arguments)
    given = {argument.partition("=")[0] for argument in arguments}
    unused = given & (_OF_A_RUN if own.simulate else _OF_A_SIMULATION)
    if unused:
        what = (
            "a plan of one run, without --simulate" if own.simulate else "--simulate RUN...; a run's devices are its --topology's"
        )
        raise ConfigError(f"{' '.join(sorted(unused))}: for {what}")
    if own.gpu_memory_gib is not None and not 0 < own.gpu_memory_gib < math.inf:
        raise ConfigError(f"--gpu-memory-gib is {own.gpu_memory_gib}: use a positive number")
    if given & {"-h", "--help"}:
        parser.print_help()
    return own, fields


def simulated(own: argparse.Namespace) -> dict[str, Any]:
    """What `--simulate` asks for. Raises ConfigError."""
    positive = (own.gpus_per_node, own.link_gb_per_second, own.network_gb_per_second)
    others = (own.states_gb, own.gradients_gb, own.spread)
    if not all(0 < value < math.inf for value in positive) or not all(0 <= value < math.inf for value in others):
        raise ConfigError("--simulate: machines and links must be above 0, sizes and spread 0 or more")
    fleet = Fleet(
        gpus_per_node=own.gpus_per_node,
        link_gb_per_second=own.link_gb_per_second,
        network_gb_per_second=own.network_gb_per_second,
        states_bytes=own.states_gb * 1e9,
        gradient_bytes=own.gradients_gb * 1e9,
    )
    return report(own.simulate, own.gpus or SIMULATED_GPUS, fleet, spread=own.spread)
