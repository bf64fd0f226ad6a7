"""Decoding of one request: speculatively or plainly, by the loop of `dflash.decoding.rounds`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from dflash.decoding.rounds import Drafting, Generation, Wanted, decode
from dflash.modeling.drafter import Drafter
from dflash.modeling.target import FrozenEnds


def speculate(
    target_model: Any,
    ends: FrozenEnds,
    drafter: Drafter,
    prompt_ids: Sequence[int] | Tensor,
    *,
    max_new_tokens: int,
    budget: int | None = None,
    temperature: float = 0.0,
    eos_ids: Collection[int] = (),
    seed: int = 0,
    request: int = 0,
) -> Generation:
    """Decode one request with a chain of drafts, or with trees of `budget` nodes; the tokens are those of `plain`.

    `prompt_ids` [P], on any device. Sampling depends on (seed, request) and the position alone. Raises ConfigError as
    `rounds.decode` does.
    """
    wanted = Wanted(max_new_tokens=max_new_tokens, temperature=temperature, eos_ids=eos_ids, seed=seed)
    drafting = Drafting(drafter=drafter, ends=ends, budget=budget)
    return decode(target_model, [prompt_ids], wanted, drafting=drafting, requests=[request])[0]


def plain(
    target_model: Any,
    prompt_ids: Sequence[int] | Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    eos_ids: Collection[int] = (),
    seed: int = 0,
    request: int = 0,
) -> Generation:
    """Decode one request without drafts: the same loop with blocks of one token. Arguments as in `speculate`."""
    wanted = Wanted(max_new_tokens=max_new_tokens, temperature=temperature, eos_ids=eos_ids, seed=seed)
    return decode(target_model, [prompt_ids], wanted, requests=[request])[0]
