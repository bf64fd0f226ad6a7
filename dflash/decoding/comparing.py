"""Is one drafter better than another? Two evaluations of the same prompts, compared prompt by prompt.

Prompts differ far more than drafters do: intervals of two τ overlap long after the difference on each prompt is clear. So the
difference is taken prompt by prompt, and its interval is a bootstrap over prompts.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dflash.config import ConfigError
from dflash.decoding.acceptance import bootstrap_interval

_SAME = ("target", "dtype", "temperature", "max_new_tokens")  # and the seed, where tokens are drawn
_FEWEST = 2


def read_evaluation(path: Path) -> dict[str, Any]:
    """The evaluation that `python -m dflash evaluate` wrote to `path`. Raises ConfigError where it is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"against {path}: {error}; name the evaluate-CHECKPOINT.json of a run") from error
    if not isinstance(found, dict) or "tau_by_prompt" not in found:
        raise ConfigError(
            f"against {path}: it holds no tau_by_prompt; name an evaluate-CHECKPOINT.json, or evaluate that run again"
        )
    return found


def check_comparable(other: dict[str, Any], settings: dict[str, Any], prompts: Collection[str], path: Path) -> None:
    """Raise ConfigError where the other evaluation decoded in another way, or has fewer than two of the prompts."""
    names = (*_SAME, "seed") if settings["temperature"] else _SAME
    if wrong := [f"{name} {other.get(name)}, here {settings[name]}" for name in names if other.get(name) != settings[name]]:
        raise ConfigError(
            f"against {path}: it has {'; '.join(wrong)}: only evaluations of the same prompts in the same way compare"
        )
    both = len(other["tau_by_prompt"].keys() & set(prompts))
    if both < _FEWEST:
        raise ConfigError(f"against {path}: it has {both} of the {len(prompts)} prompts: evaluate both on the same data")


def compare(ours: dict[str, Any], theirs: dict[str, Any], *, seed: int) -> dict[str, Any]:
    """Differences of τ (ours less theirs) over the prompts of both, of the chain and of trees of the same budget, JSON-ready."""
    trees = {tree["budget"]: tree for tree in theirs["trees"]}
    pairs = [(tree, trees[tree["budget"]]) for tree in ours["trees"] if tree["budget"] in trees]
    return {
        **_difference(ours, theirs, seed),
        "trees": [{"budget": tree["budget"], **_difference(tree, other, seed)} for tree, other in pairs],
    }


def _difference(ours: dict[str, Any], theirs: dict[str, Any], seed: int) -> dict[str, Any]:
    first, second = ours["tau_by_prompt"], theirs["tau_by_prompt"]
    differences = [first[prompt] - second[prompt] for prompt in sorted(first.keys() & second.keys())]
    interval = bootstrap_interval(differences, seed=seed)
    return {
        "prompts": len(differences),
        "tau_difference": sum(differences) / len(differences) if differences else None,
        "tau_difference_ci95": interval and list(interval),
        "better_on": sum(d > 0 for d in differences),
        "worse_on": sum(d < 0 for d in differences),
    }
