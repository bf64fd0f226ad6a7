"""Small targets that depend on every token before, drafters for them, and drafters that know what the target will say."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dflash.config import DrafterConfig
from dflash.decoding.draft_session import DraftSession
from dflash.modeling.drafter import Drafter, DrafterShape
from dflash.modeling.target import RANDOM_TARGETS, FrozenEnds, text_config

VOCABULARY = 64
MASK = VOCABULARY - 1


def build(config: Any, seed: int = 0) -> Any:
    """Matrices six times wider than a fresh initialisation: greedy text varies and a wrong cache shows in it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(6)
    return model


@functools.cache
def target(family: str) -> tuple[Any, FrozenEnds]:
    """A target of four layers; gemma3 has three with a window of 8 tokens."""
    config = RANDOM_TARGETS[family]()
    config.num_hidden_layers, config.vocab_size, config.tie_word_embeddings = 4, VOCABULARY, False
    if family == "gemma3":
        config.layer_types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    elif getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:4]
    model = build(config)
    return model, FrozenEnds.from_model(model, "cpu", torch.float32)


@functools.cache
def drafter_for(family: str, block_size: int) -> Drafter:
    """An untrained drafter of the target."""
    model, _ = target(family)
    config = DrafterConfig(block_size=block_size, num_layers=2, target_layer_ids=(0, 2))
    return sharp_drafter(DrafterShape.from_target(text_config(model), config, MASK))


def sharp_drafter(shape: DrafterShape) -> Drafter:
    """Untrained, with marginals that differ from position to position."""
    drafter = Drafter(shape, generator=torch.Generator().manual_seed(0)).requires_grad_(False)
    for parameter in drafter.parameters():
        if parameter.ndim > 1:
            parameter.mul_(6)
    return drafter


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    tokens: list[int] = np.random.default_rng(seed).integers(0, MASK, length).tolist()
    return tokens


def random_rule(requests: int, columns: int, nodes: int, seed: int) -> tuple[Tensor, int, Tensor, Tensor]:
    """Lengths, columns, positions and ancestors of some random trees, as `visibility.visible` takes them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, columns + 1, requests)
    lengths[rng.integers(requests)] = columns
    depths, ancestors = np.zeros((requests, nodes), np.int64), np.tile(np.eye(nodes, dtype=np.bool_), (requests, 1, 1))
    for row in range(requests):
        for node in range(1, nodes):
            parent = int(rng.integers(max(0, node - 9), node))
            depths[row, node] = depths[row, parent] + 1
            ancestors[row, node] |= ancestors[row, parent]
    arrays = lengths, lengths[:, None] + depths, ancestors
    return torch.from_numpy(arrays[0]), columns, torch.from_numpy(arrays[1]), torch.from_numpy(arrays[2])


@contextmanager
def knowing(
    prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], *, errors: float, seed: int
) -> Iterator[None]:
    """Drafters know each prompt's continuation, and give its tokens a random place among their likeliest.

    The truth is the likeliest token with probability 1 - `errors`, else of some later rank, so that trees accept by nodes
    that do not stand in a row.
    """
    rng = np.random.default_rng(seed)

    def logits(session: DraftSession, bonuses: Sequence[int]) -> Tensor:
        vocabulary = session._drafter.shape.vocab_size
        made = torch.from_numpy(rng.normal(size=(len(bonuses), session.block_size - 1, vocabulary))).float()
        for row, (number, length, bonus) in enumerate(zip(session.rows, session.lengths, bonuses, strict=True)):
            index = length - len(prompts[number])
            assert continuations[number][index] == bonus, "the context holds every committed token but the last"
            for k, token in enumerate(continuations[number][index + 1 : index + session.block_size]):
                place = int(rng.integers(1, 4)) if rng.random() < errors else 0
                made[row, k, token] = made[row, k].sort(descending=True).values[place] + 0.01 + 3 * (place == 0)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftSession, "logits", logits)
        yield
