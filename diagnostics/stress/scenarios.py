"""The failures of the catalogue, made to happen: `python -m diagnostics.stress.scenarios F3 [--repeat 20]`.

Each recipe parks one thread at the bad moment and lets another act: no chance is involved. Without `--repeat` a recipe runs
in this process and leaves it as the failure does, for observers such as `python -m diagnostics.fxprobe -- -m ...`; the exit
code is 0. With `--repeat N` it runs in N fresh processes: exit code 1 it happened, 0 it never did, 3 it could not be tried.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dflash.standard_output import outlive_reader
from diagnostics.catalogue import CATALOGUE
from diagnostics.stress import (
    compile_scenarios,
    deadlock_scenarios,
    export_scenarios,
    features,
    flag_scenarios,
    module_scenarios,
    state_scenarios,
)
from diagnostics.stress.cures import NONE, POLICIES, Stage
from diagnostics.stress.evidence import Evidence
from diagnostics.stress.replay import Job, Server, ServerError


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a failure is made to happen, and what is known to cure it."""

    play: Callable[[Stage], Evidence] | None  # None: there is no recipe, `not_tried` says why
    cures: Mapping[str, bool] = field(default_factory=dict)  # policies to try: True, it cures
    why_not: Callable[[], str | None] = lambda: None  # why it cannot happen on this torch
    not_tried: str = ""

    def __call__(self, policy: str = NONE) -> Evidence:
        """Make it happen in this process, and leave the process so. Raises ValueError where there is no recipe."""
        if self.play is None:
            raise ValueError(f"no recipe: {self.not_tried}")
        stage = Stage(POLICIES[policy])
        with stage.ready():
            return self.play(stage)


_flag, _config = features.why_not_shared_flag, features.why_not_config_per_thread
SCENARIOS: dict[str, Recipe] = {
    "clean": Recipe(play=flag_scenarios.clean, why_not=lambda: "nothing is shared"),
    "F1": Recipe(play=flag_scenarios.foreign_flag, cures={"serial": True, "lock": True, "force": True}, why_not=_flag),
    "F2": Recipe(play=flag_scenarios.silenced_flag, cures={"serial": True, "lock": True, "force": True}, why_not=_flag),
    "F3": Recipe(play=module_scenarios.hijacked_call, cures={"serial": True, "lock": False, "processes": True}),
    "F3-shared": Recipe(play=module_scenarios.shared_leaf, cures={"serial": True, "lock": False, "processes": True}),
    "F4": Recipe(play=module_scenarios.passed_through, cures={"serial": True, "processes": True}),
    "F5": Recipe(play=module_scenarios.leaked_patch, cures={"serial": True, "lock": True, "processes": True}),
    "F6": Recipe(play=flag_scenarios.stuck_flag, cures={"serial": True, "lock": True, "force": True}, why_not=_flag),
    "F7": Recipe(play=compile_scenarios.recompile_limit, cures={"limit": True, "each thread": True, "dynamic": True}),
    "F8": Recipe(
        play=deadlock_scenarios.lock_and_device_thread,
        cures={"serial": True, "lock": False, "calling thread": True},
        not_tried=features.why_no_python_device(),
    ),
    "F9": Recipe(play=state_scenarios.unseen_limit, cures={"each thread": True, "context": True, "limit": True}, why_not=_config),
    "F10": Recipe(
        play=state_scenarios.lost_setting, cures={"serial": True, "lock": True}, why_not=features.why_not_shared_config
    ),
    "F11": Recipe(
        play=state_scenarios.misled_selector, cures={"serial": True, "lock": True}, why_not=features.why_not_compiling_flag
    ),
    "F12": Recipe(play=compile_scenarios.duplicate_compiles, cures={"serial": True, "lock": True}),
    "F13": Recipe(play=export_scenarios.two_uncompiled_flex_calls, cures={"serial": True, "lock": True, "processes": True}),
    "F14": Recipe(play=module_scenarios.unknown_function, cures={"serial": True, "lock": True, "processes": True}),
    "F15": Recipe(play=export_scenarios.two_exports, cures={"serial": True, "lock": True, "processes": True}),
    "F15-in-use": Recipe(play=export_scenarios.export_of_module_in_use, cures={"serial": True, "lock": False, "processes": True}),
    "F16": Recipe(play=compile_scenarios.repeated_numbers, cures={"serial": True, "generator": True, "processes": True}),
    "F16-dtype": Recipe(play=compile_scenarios.undone_default, cures={"serial": True, "processes": True}),
    "F17": Recipe(play=None, not_tried="needs a GPU, and recipes see none: Triton's autotuner, CUDA-graph trees"),
    "F18": Recipe(play=compile_scenarios.passing_guard, cures={"serial": True, "lock": True}),
    "F18-wrong": Recipe(play=compile_scenarios.wrong_guard, cures={"serial": True}),
    "F19": Recipe(
        play=state_scenarios.lost_count,
        cures={"serial": True, "lock": True, "stance": True},
        why_not=features.why_not_frame_count,
    ),
}


def play(name: str, policy: str = NONE) -> Evidence:
    """Run one recipe in this process. Raises ValueError where there is none."""
    return SCENARIOS[name](policy)


def plan() -> dict[str, Any]:
    """What can be tried on this torch, as JSON values; makes this process ready to be forked."""
    torch.compile(torch.sin, backend="eager")(torch.ones(1))  # what Dynamo imports and changes at its first use
    torch._dynamo.reset()
    return {
        "torch": torch.__version__,
        "policies": {name: {"what": policy.what, "missing": policy.missing()} for name, policy in POLICIES.items()},
        "recipes": {
            name: {
                "what": (recipe.play.__doc__ or "").partition(": ")[2] if recipe.play else CATALOGUE[name].title,
                "why_not": recipe.why_not(),
                "not_tried": recipe.not_tried,
                "cures": dict(recipe.cures),
            }
            for name, recipe in SCENARIOS.items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one recipe, here or in fresh processes. What it raises in its threads is printed by Python."""
    parser = argparse.ArgumentParser(
        prog="python -m diagnostics.stress.scenarios", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=SCENARIOS)
    parser.add_argument("--policy", choices=POLICIES, default=NONE, help="a protection to try; default none")
    parser.add_argument("--repeat", type=int, metavar="N", help="in N fresh processes")
    options = parser.parse_args(arguments)
    missing = SCENARIOS[options.name].not_tried or POLICIES[options.policy].missing()
    if missing:
        print(f"{options.name} under policy {options.policy} not tried: {missing}", file=sys.stderr)  # noqa: T201 - the command's result
        return 3
    if options.repeat is not None:
        if options.repeat < 1:
            parser.error(f"--repeat {options.repeat}: use 1 or more")
        try:
            return _repeat(Job(name=options.name, policy=options.policy), options.repeat)
        except ServerError as error:
            print(error, file=sys.stderr)  # noqa: T201 - the command's result
            return 3
    evidence = play(options.name, options.policy)
    print(f"{options.name} {'happened' if evidence.happened else 'did not happen'}: {evidence.what}")  # noqa: T201 - the command's result
    return 0


def _repeat(job: Job, times: int) -> int:
    with Server() as server:
        outcomes = list(server.run([job] * times))
    seen = Counter((outcome.state, outcome.what) for outcome in outcomes)
    for (state, what), count in seen.most_common():
        print(f"{state} {count} of {times}: {what}")  # noqa: T201 - the command's result
    happened = sum(outcome.state in {"happened", "hung", "died"} for outcome in outcomes)
    print(f"{job.name}: happened {happened} of {times}")  # noqa: T201 - the command's result
    if any(outcome.state == "failed" for outcome in outcomes):
        return 3
    return 1 if happened else 0


if __name__ == "__main__":
    outlive_reader()
    sys.exit(main())
