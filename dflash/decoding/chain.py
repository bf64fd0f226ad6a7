"""Speculative decoding of one request with a chain of drafts, and plain decoding by the same loop.

A round starts with a known token, the bonus of the round before, at position `start`; the target has processed the
tokens before it and nothing else. The drafter fills the block [bonus, MASK, ..., MASK] in one forward, from the target's
features of the tokens before `start`; the target then verifies [bonus, drafts] in one forward. The leading drafts that
equal the target's own choices are committed, and one more choice of the target: the next bonus. What the target cached
for rejected drafts is taken back, and the features of bonus and accepted drafts become context of the drafter.

Drafts are always the drafter's arg-max. The target's choices are arg-max or sampled by key (`dflash.decoding.sampling`),
so the committed tokens are those of plain decoding: token for token in exact arithmetic, sampled or not. In float32 that
is what is found (up to ties); in bfloat16, verifying B tokens at once can round differently from one token at a time and
change an arg-max. `evaluate` therefore compares and reports, and assumes nothing.

Limits: one request at a time, a block of fixed size also at the end of a request, one device.
Reference: DFlash's inference loop (z-lab/dflash).

Legend: P prompt tokens, B block size, K features, H hidden size, V vocabulary, L draft layers, g key/value heads, d head size.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dflash.config import ConfigError
from dflash.decoding.acceptance import RoundStats
from dflash.decoding.sampling import TokenChooser
from dflash.decoding.target_session import TargetSession
from dflash.modeling.attention import decoding_kernels
from dflash.modeling.drafter import Drafter
from dflash.modeling.target import FrozenEnds


@dataclass(frozen=True)
class StageSeconds:
    """Wall-clock seconds of the stages of one request; on a GPU the device is synchronised at each stage's end."""

    prefill: float = 0.0  # target forward over the prompt and its first token
    draft: float = 0.0  # projecting new context, the drafter's forward, the head
    verify: float = 0.0  # target forward over the block and its choices; in plain decoding over one token
    commit: float = 0.0  # comparison, bookkeeping, taking back the cache

    @property
    def decode(self) -> float:
        """Everything after the prefill."""
        return self.draft + self.verify + self.commit


@dataclass(frozen=True)
class Generation:
    """What one request gave. Plain Python values."""

    tokens: tuple[int, ...]  # without the prompt, with the end token if there was one
    rounds: tuple[RoundStats, ...]  # the first token comes from the prefill, which is no round
    target_forwards: int  # the prefill included
    seconds: StageSeconds


class DraftSession:
    """The drafter during one request: keys and values of the context, which grows by what the target has accepted."""

    def __init__(self, drafter: Drafter, ends: FrozenEnds) -> None:
        self._drafter = drafter
        self._ends = ends
        self._dtype = drafter.fc.weight.dtype
        self._context: tuple[tuple[Tensor, Tensor], ...] = ()  # L pairs [1, g, context, d]
        self.context_tokens = 0
        self.block_size = drafter.shape.block_size
        device = drafter.fc.weight.device
        self._block = torch.full((1, self.block_size), drafter.shape.mask_token_id, dtype=torch.int64, device=device)
        self._offsets = torch.arange(self.block_size, device=device)[None]

    def extend(self, features: Tensor) -> None:
        """Append the tokens whose `features` [1, tokens, K*H] follow the context."""
        count = features.shape[1]
        positions = torch.arange(self.context_tokens, self.context_tokens + count, device=features.device)[None]
        new = self._drafter.project_context(features.to(self._dtype), positions)
        if self.context_tokens:
            new = tuple(
                (torch.cat((keys, more_keys), dim=2), torch.cat((values, more_values), dim=2))
                for (keys, values), (more_keys, more_values) in zip(self._context, new, strict=True)
            )
        self._context = new
        self.context_tokens += count

    def propose(self, bonus: int) -> Tensor:
        """Drafts [B-1] int64 of the tokens after `bonus`, which itself follows the context."""
        self._block[0, 0] = bonus
        embeds = self._ends.embed(self._block).to(self._dtype)
        hidden = self._drafter.block_forward(embeds, self._offsets + self.context_tokens, self._context, None)
        return self._ends.logits(hidden[0, 1:]).argmax(dim=-1)


def speculate(
    target_model: Any,
    ends: FrozenEnds,
    drafter: Drafter,
    prompt_ids: Sequence[int] | Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    eos_ids: Collection[int] = (),
    seed: int = 0,
    request: int = 0,
) -> Generation:
    """Decode one request with drafts; the tokens are those of `plain` (see the module for bfloat16).

    `prompt_ids` [P], on any device. Sampling depends on (seed, request) and the position alone. Raises ConfigError for a
    target whose cache cannot be cropped, or which lacks the layers the drafter reads, for an empty prompt and for no tokens.
    """
    with TargetSession(target_model, drafter.shape.target_layer_ids) as target, decoding_kernels():
        drafting = DraftSession(drafter, ends)
        chooser = _chooser(target_model, max_new_tokens, drafter.shape.block_size, temperature, (seed, request))
        return _decode(target, drafting, chooser, _prompt(target_model, prompt_ids), max_new_tokens, frozenset(eos_ids))


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
    with TargetSession(target_model, ()) as target, decoding_kernels():
        chooser = _chooser(target_model, max_new_tokens, 1, temperature, (seed, request))
        return _decode(target, None, chooser, _prompt(target_model, prompt_ids), max_new_tokens, frozenset(eos_ids))


def commit(drafts: Sequence[int], choices: Sequence[int], eos_ids: Collection[int], room: int) -> tuple[list[int], RoundStats]:
    """The tokens that a verified block adds, at most `room`, none after an end token.

    `choices` are the target's tokens after [bonus, drafts]: one more than `drafts`.
    """
    accepted = next((k for k, (draft, choice) in enumerate(zip(drafts, choices, strict=False)) if draft != choice), len(drafts))
    whole = accepted + 1
    end = next((k + 1 for k in range(whole) if choices[k] in eos_ids), whole)
    committed = min(end, room)
    stats = RoundStats(len(drafts), min(accepted, committed), committed, truncated=committed < whole)
    return list(choices[:committed]), stats


@torch.inference_mode()
def _decode(
    target: TargetSession,
    drafting: DraftSession | None,
    choose: TokenChooser,
    prompt: Tensor,
    max_new_tokens: int,
    eos_ids: frozenset[int],
) -> Generation:
    watch = _Stopwatch(prompt.device)
    tokens: list[int] = choose(target.forward(prompt, last_only=True), 0).tolist()
    watch.lap("prefill")
    rounds: list[RoundStats] = []
    new_context, block = len(prompt), prompt.new_empty(drafting.block_size if drafting else 1)
    while len(tokens) < max_new_tokens and tokens[-1] not in eos_ids:
        start = target.cached_tokens
        block[0] = tokens[-1]
        if drafting:
            drafting.extend(target.features(new_context))
            block[1:] = drafting.propose(tokens[-1])
            watch.lap("draft")
        choices = choose(target.forward(block), len(tokens))
        watch.lap("verify")
        drafts = block[1:].tolist()
        added, stats = commit(drafts, choices.tolist(), eos_ids, max_new_tokens - len(tokens))
        tokens += added
        rounds.append(stats)
        new_context = stats.committed
        target.keep(start + new_context)
        watch.lap("commit")
    return Generation(tuple(tokens), tuple(rounds), target.forwards, watch.seconds())


def _prompt(model: Any, prompt_ids: Sequence[int] | Tensor) -> Tensor:
    if not isinstance(prompt_ids, Tensor):
        prompt_ids = torch.from_numpy(np.array(prompt_ids, dtype=np.int64))
    prompt = prompt_ids.to(_device(model), torch.int64)
    if prompt.ndim != 1 or not len(prompt):
        raise ConfigError(f"a prompt has shape {list(prompt.shape)}: decoding needs one sequence of at least one token")
    return prompt


def _chooser(model: Any, max_new_tokens: int, block_size: int, temperature: float, key: tuple[int, int]) -> TokenChooser:
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}: use at least 1")
    count = max_new_tokens + block_size  # the last block looks past the limit
    return TokenChooser(temperature=temperature, seed=key[0], request=key[1], count=count, device=_device(model))


def _device(model: Any) -> torch.device:
    device: torch.device = next(model.parameters()).device
    return device


class _Stopwatch:
    """Adds the time since the last lap to a stage."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = dict.fromkeys((f.name for f in dataclasses.fields(StageSeconds)), 0.0)
        self._last = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def lap(self, stage: Literal["prefill", "draft", "verify", "commit"]) -> None:
        now = self._now()
        self._seconds[stage] += now - self._last
        self._last = now

    def seconds(self) -> StageSeconds:
        return StageSeconds(**self._seconds)
