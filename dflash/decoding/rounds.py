"""The decoding loop: some requests together, with a chain of drafts, with a tree of drafts, or plainly.

A round starts with a known token of every request, the bonus of the round before, at position `start`; the target has
processed the tokens before it and nothing else. The drafter fills the block [bonus, MASK, ..., MASK] in one forward, from the
target's features of the tokens before `start`. Its arg-max tokens are the chain; the most probable prefixes under its
distributions are the tree (`dflash.decoding.tree`). The target verifies bonus and drafts in one forward. Drafts that equal the
target's own choices along a path from the bonus are committed, and one more choice of the target: the next bonus. What the
target cached for other drafts is taken back, and the features of bonus and accepted drafts become context of the drafter.

The target's choices are arg-max or sampled by key (`dflash.decoding.sampling`), so the committed tokens are those of plain
decoding: token for token in exact arithmetic, sampled or not. In float32 that is what is found (up to ties); in bfloat16,
verifying many tokens at once can round differently from one token at a time and change an arg-max. `evaluate` therefore
compares and reports, and assumes nothing.

Limits: requests start together, and one that ends leaves without another taking its place; a block and a tree have their
full size also at the end of a request; one device.
References: DFlash's inference loop (z-lab/dflash), DDTree (liranringel/ddtree).

Legend: N requests, P prompt tokens, Q nodes of the largest tree (root included), B block size, K features, H hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dflash.config import ConfigError, check_budget
from dflash.decoding.acceptance import RoundStats
from dflash.decoding.draft_session import DraftSession
from dflash.decoding.flex_trees import check_flex
from dflash.decoding.sampling import TokenChooser
from dflash.decoding.target_session import TargetSession
from dflash.decoding.tree import DraftTree, build_tree
from dflash.decoding.visibility import layer_windows
from dflash.modeling.attention import decoding_kernels
from dflash.modeling.drafter import Drafter
from dflash.modeling.shape import misfit
from dflash.modeling.target import FrozenEnds, text_config
from dflash.modeling.tree_estimate import top_marginals


@dataclass(frozen=True)
class StageSeconds:
    """Wall-clock seconds of the stages of one request; on a GPU the device is synchronised at each stage's end.

    Requests that are decoded together share the time of a stage equally.
    """

    prefill: float = 0.0  # target forward over the prompt and its first token
    draft: float = 0.0  # projecting new context, the drafter's forward, the head
    build: float = 0.0  # choosing drafts: arg-max, or top-k, copy to the host and the tree
    verify: float = 0.0  # target forward over bonus and drafts and its choices; in plain decoding over one token
    commit: float = 0.0  # comparison, bookkeeping, moving what was accepted and taking back the rest of the cache

    @property
    def decode(self) -> float:
        """Everything after the prefill."""
        return self.draft + self.build + self.verify + self.commit


@dataclass(frozen=True)
class Generation:
    """What one request gave. Plain Python values."""

    tokens: tuple[int, ...]  # without the prompt, with the end token if there was one
    rounds: tuple[RoundStats, ...]  # the first token comes from the prefill, which is no round
    target_forwards: int  # that the request took part in, the prefill included
    seconds: StageSeconds


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """Who drafts, and what."""

    drafter: Drafter
    ends: FrozenEnds
    budget: int | None = None  # nodes of the tree; None: a chain
    tree_attention: Literal["sdpa", "flex"] = "sdpa"  # of the target when it verifies trees; flex is compiled on GPUs only

    def __post_init__(self) -> None:
        if self.budget is not None:
            check_budget(self.budget)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is asked of the target."""

    max_new_tokens: int
    temperature: float = 0.0  # 0: greedy
    eos_ids: Collection[int] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}: use at least 1")


def decode(
    target_model: Any,
    prompts: Sequence[Sequence[int] | Tensor],
    wanted: Wanted,
    *,
    drafting: Drafting | None = None,
    requests: Sequence[int] | None = None,
) -> list[Generation]:
    """Decode some requests together, with drafts or (without `drafting`) plainly; the tokens do not depend on which.

    `prompts`, [P] each, on any device. Sampling of a request depends on the seed, its number in `requests` (default: its
    place) and the position alone. Raises ConfigError for a target whose cache cannot be cropped or that is not the drafter's,
    for an empty prompt, and for one that does not fit into the target's positions together with the new tokens.
    """
    ids = [_prompt(target_model, prompt, wanted) for prompt in prompts]
    if not ids:
        raise ConfigError("there is no prompt to decode")
    if drafting and (problem := misfit(drafting.drafter.shape, text_config(target_model))):
        raise ConfigError(f"the drafter was made for {problem}: decode with the target it was trained for")
    if len(ids) > 1 or (drafting and drafting.budget is not None):
        layer_windows(target_model)  # refuses a target that takes no mask, before it runs
    tree_attention = drafting.tree_attention if drafting else "sdpa"
    if tree_attention == "flex":
        check_flex(target_model)
    layer_ids = drafting.drafter.shape.target_layer_ids if drafting else ()
    numbers = list(range(len(ids)) if requests is None else requests)
    count = wanted.max_new_tokens + (drafting.drafter.shape.block_size if drafting else 1)  # the last block looks past the limit
    chooser = TokenChooser(temperature=wanted.temperature, seed=wanted.seed, requests=numbers, count=count, device=ids[0].device)
    with TargetSession(target_model, layer_ids, tree_attention) as target, decoding_kernels(), torch.inference_mode():
        return _Rounds(target, drafting, chooser, ids, wanted).run()


def commit(choices: Sequence[int], drafted: int, eos_ids: Collection[int], room: int) -> tuple[list[int], RoundStats]:
    """The tokens that a verified block adds, at most `room`, none after an end token.

    `choices` are the target's tokens after the bonus and after each accepted draft: all but the last equal these drafts.
    """
    end = next((k + 1 for k, choice in enumerate(choices) if choice in eos_ids), len(choices))
    committed = min(end, room)
    stats = RoundStats(drafted, min(len(choices) - 1, committed), committed, truncated=committed < len(choices))
    return list(choices[:committed]), stats


@dataclass
class _Request:
    """One request while it is decoded."""

    limit: int  # first position that no token of the request has
    number: int  # place among the prompts
    tokens: list[int]
    rounds: list[RoundStats] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def generation(self) -> Generation:
        return Generation(tuple(self.tokens), tuple(self.rounds), 1 + len(self.rounds), StageSeconds(**self.seconds))


class _Rounds:
    """The state of the loop; lists and tensors have a row for each request that has not ended."""

    def __init__(
        self, target: TargetSession, drafting: Drafting | None, chooser: TokenChooser, prompts: list[Tensor], wanted: Wanted
    ) -> None:
        self._target, self._choose, self._wanted, self._prompts = target, chooser, wanted, prompts
        self._drafting = drafting
        self._session = DraftSession(drafting.drafter, drafting.ends, len(prompts)) if drafting else None
        self._device = prompts[0].device
        self._running: list[_Request] = []

    def run(self) -> list[Generation]:
        """Decode all requests."""
        self._running = [_Request(len(p) + self._wanted.max_new_tokens - 1, i, []) for i, p in enumerate(self._prompts)]
        everyone = self._running
        with self._stage("prefill"):
            logits = self._target.prefill(self._prompts)
            first = self._choose(logits, torch.zeros(len(everyone), 1, dtype=torch.int64, device=self._device))
        for request, token in zip(everyone, first[:, 0].tolist(), strict=True):
            request.tokens.append(token)
        new = [list(range(len(prompt))) for prompt in self._prompts]  # places of the last forward that are new context
        while new := self._without_ended(new):
            trees = self._draft(new)
            with self._stage("verify"):
                choices = self._verify(trees)
            with self._stage("commit"):
                new = [self._commit(*one) for one in zip(self._running, trees, choices, strict=True)]
                self._target.keep(new)
        return [request.generation() for request in everyone]

    def _without_ended(self, new: list[list[int]]) -> list[list[int]]:
        wanted = self._wanted
        rows = [
            row
            for row, request in enumerate(self._running)
            if len(request.tokens) < wanted.max_new_tokens and request.tokens[-1] not in wanted.eos_ids
        ]
        if not rows or len(rows) == len(self._running):
            return new if rows else []
        with self._stage("commit"):
            self._running = [self._running[row] for row in rows]
            self._target.keep_rows(rows)
            self._choose.keep_rows(torch.tensor(rows, device=self._device))
            if self._session:
                self._session.keep_rows(rows)
        return [new[row] for row in rows]

    def _draft(self, new: list[list[int]]) -> list[DraftTree]:
        if self._drafting is None or self._session is None:
            return [DraftTree.chain(np.empty(0, np.int64))] * len(new)
        with self._stage("draft"):
            places = _padded([np.array(one) for one in new])
            self._session.extend(self._target.features(torch.from_numpy(places).to(self._device)), [len(one) for one in new])
            logits = self._session.logits([request.tokens[-1] for request in self._running])
        with self._stage("build"):
            return propose(logits, self._drafting.budget)

    def _verify(self, trees: list[DraftTree]) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
        """The target's choice after every node of every tree, [nodes] each."""
        ids, depths = _padded([tree.tokens for tree in trees]), _padded([tree.depths for tree in trees])
        ids[:, 0] = [request.tokens[-1] for request in self._running]
        starts = np.array(self._target.lengths)[:, None]
        # What is past the limit cannot be committed; its position must not be one that the target does not have.
        positions = np.minimum(starts + depths, np.array([[request.limit] for request in self._running]))
        outputs = np.array([[len(request.tokens)] for request in self._running]) + depths
        with_branches = self._drafting is not None and self._drafting.budget is not None
        ancestors = _stacked_ancestors(trees) if with_branches else None
        to = torch.from_numpy
        logits = self._target.verify(
            to(ids).to(self._device),
            to(positions).to(self._device),
            to(ancestors).to(self._device) if ancestors is not None else None,
        )
        choices = self._choose(logits, to(outputs).to(self._device)).cpu().numpy()
        return [chosen[: len(tree)] for chosen, tree in zip(choices, trees, strict=True)]

    def _commit(self, request: _Request, tree: DraftTree, choices: np.ndarray[Any, np.dtype[np.int64]]) -> list[int]:
        """Add what the round gave; returns the nodes whose tokens are committed and cached."""
        path = tree.walk(choices)
        room = self._wanted.max_new_tokens - len(request.tokens)
        positions = self._session.block_size - 1 if self._session else 0
        added, stats = commit(choices[path].tolist(), positions, self._wanted.eos_ids, room)
        request.tokens += added
        request.rounds.append(stats)
        return path[: stats.committed]

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        started = self._now()
        yield
        share = (self._now() - started) / len(self._running)
        for request in self._running:
            request.seconds[name] = request.seconds.get(name, 0.0) + share

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def propose(logits: Tensor, budget: int | None) -> list[DraftTree]:
    """The drafts of some requests from the drafter's logits [N, B-1, V]: a chain of arg-maxes, or trees of `budget` nodes."""
    if budget is None:
        return [DraftTree.chain(drafts) for drafts in logits.argmax(dim=-1).cpu().numpy()]
    log_probabilities, tokens = (part.cpu().numpy() for part in top_marginals(logits, budget))
    return [build_tree(*one, budget) for one in zip(log_probabilities, tokens, strict=True)]


def _padded(rows: Sequence[np.ndarray[Any, np.dtype[np.int64]]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[N, longest] int64, zero after the end of each."""
    table = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for row, values in zip(table, rows, strict=True):
        row[: len(values)] = values
    return table


def _stacked_ancestors(trees: Sequence[DraftTree]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """[N, Q, Q]; padding sees itself, so that no query sees nothing."""
    size = max(map(len, trees))
    table = np.tile(np.eye(size, dtype=np.bool_), (len(trees), 1, 1))
    for block, tree in zip(table, trees, strict=True):
        block[: len(tree), : len(tree)] = tree.ancestors
    return table


def _prompt(model: Any, prompt_ids: Sequence[int] | Tensor, wanted: Wanted) -> Tensor:
    if not isinstance(prompt_ids, Tensor):
        prompt_ids = torch.from_numpy(np.array(prompt_ids, dtype=np.int64))
    prompt = prompt_ids.to(next(model.parameters()).device, torch.int64)
    if prompt.ndim != 1 or not len(prompt):
        raise ConfigError(f"a prompt has shape {list(prompt.shape)}: decoding needs one sequence of at least one token")
    positions = getattr(text_config(model), "max_position_embeddings", None)
    if positions is not None and len(prompt) + wanted.max_new_tokens > positions:
        raise ConfigError(
            f"{len(prompt)} prompt and {wanted.max_new_tokens} new tokens exceed the target's {positions} positions: "
            f"shorten the prompt or max_new_tokens"
        )
    return prompt
