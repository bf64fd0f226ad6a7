"""Is one drafter better than another? Two evaluations of the same prompts, compared prompt by prompt.

Prompts differ far more than drafters do: intervals of two τ overlap long after the difference on each prompt is clear. So the
difference is taken prompt by prompt, and its interval is a bootstrap over prompts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash.config import ConfigError
from dflash.decoding.acceptance import bootstrap_interval

_SAME = ("dtype", "temperature", "max_new_tokens", "eos_token_ids")  # and the seed, where tokens are drawn
_FEWEST = 2


def read_evaluation(path: Path) -> dict[str, Any]:
    """The evaluation that `python -m dflash evaluate` wrote to `path`. Raises ConfigError where it is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"against {path}: {error}; name the evaluate-CHECKPOINT.json of a run") from error
    if not (isinstance(found, dict) and _is_whole(found)):
        raise ConfigError(
            f"against {path}: it holds no τ by prompt; name an evaluate-CHECKPOINT.json, or evaluate that run again"
        )
    return found


def prompt_digests(prompts: Iterable[tuple[str, Sequence[int]]]) -> dict[str, str]:
    """By sample id, what tells prompts of one id apart: twelve hexadecimal digits of their tokens' SHA-256."""
    return {name: hashlib.sha256(np.array(ids, dtype="<i8").tobytes()).hexdigest()[:12] for name, ids in prompts}


def check_comparable(other: dict[str, Any], settings: dict[str, Any], path: Path) -> str | None:
    """Raise ConfigError where the other evaluation decoded in another way, other prompts, or fewer than two of them.

    `settings` are those of an evaluation, its `prompt_digests` among them. Targets are the same where their weights are,
    wherever they lie. Returns a caution about an older evaluation, which has only the path of its target.
    """
    names = (*_SAME, "seed") if settings["temperature"] else _SAME
    wrong = [f"{name} {other.get(name)}, here {settings[name]}" for name in names if other.get(name) != settings[name]]
    by_path = "target_digest" not in other
    if other.get("target") != settings["target"] if by_path else other["target_digest"] != settings["target_digest"]:
        wrong.insert(0, f"target {_target(other)}, here {_target(settings)}")
    if wrong:
        raise ConfigError(
            f"against {path}: it has {'; '.join(wrong)}: only evaluations of the same prompts in the same way compare"
        )
    ours, theirs = settings["prompt_digests"], other["prompt_digests"]
    both = ours.keys() & theirs.keys()
    if unlike := [name for name in sorted(both) if ours[name] != theirs[name]]:
        raise ConfigError(
            f"against {path}: {len(unlike)} prompts have other tokens there, {unlike[0]!r} first: evaluate both on the same data"
        )
    with_rounds = len(both & other["tau_by_prompt"].keys())
    if with_rounds < _FEWEST:
        raise ConfigError(
            f"against {path}: it has {len(both)} of the {len(ours)} prompts, {with_rounds} of them with rounds: evaluate both on "
            f"the same data, with enough new tokens"
        )
    if by_path:
        return (
            f"{path} is of an older version, which wrote no digest of its target's weights: only the paths are known to be equal"
        )
    return None


def compare(ours: dict[str, Any], theirs: dict[str, Any], *, seed: int) -> dict[str, Any]:
    """Differences of τ (ours less theirs) over the prompts of both, of the chain and of trees of the same budget, JSON-ready."""
    trees = {tree["budget"]: tree for tree in theirs["trees"]}
    pairs = [(tree, trees[tree["budget"]]) for tree in ours["trees"] if tree["budget"] in trees]
    return {
        **_difference(ours, theirs, seed),
        "trees": [{"budget": tree["budget"], **_difference(tree, other, seed)} for tree, other in pairs],
    }


def _target(evaluation: dict[str, Any]) -> str:
    digest = evaluation.get("target_digest", "not written: evaluate that run again if it is the same model at another path")
    return f"{evaluation.get('target')} (digest {digest})"


def _is_whole(found: dict[str, Any]) -> bool:
    """Whether everything that is compared is there."""

    def has_taus(part: Any) -> bool:
        values = part.get("tau_by_prompt") if isinstance(part, dict) else None
        return isinstance(values, dict) and all(isinstance(tau, int | float) for tau in values.values())

    trees = found.get("trees")
    return (
        has_taus(found)
        and isinstance(found.get("prompt_digests"), dict)
        and isinstance(trees, list)
        and all(has_taus(tree) and "budget" in tree for tree in trees)
    )


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
