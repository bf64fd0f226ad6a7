"""Acceptance of chains and of draft trees of every size, from one teacher-forced pass: no decoding, no tree.

A training block gives a distribution at each of its B-1 draft positions, and its labels say what the target went on with. The
chain accepts as long as the likeliest token is the label. A tree accepts as long as the prefix of labels is one of its nodes,
and because the tree of M nodes is the first M prefixes in one order (by probability; `dflash.decoding.tree`), the rank of
each prefix of labels in that order is the smallest budget that accepts it. So the ranks of a block give its acceptance at
every budget at once.

How ranks are found: level by level, the first M prefixes of each depth among the children that can be so good (a parent in
place i has no more than M // (i+1) of them), as tensors over blocks; the rank of a prefix is the number of prefixes kept
at any depth that come before it. Exact up to M; beyond, only that it is beyond. Memory: about 8 * M * (B + 4 ln M) bytes a
block (80 kB at M=256, B=16), so give some hundred blocks at a time and add their counts.

Limits: teacher-forced, so anchors are those of training and not where decoding goes after a rejection; exact if the k of the
marginals is at least min(M, V). Sums of counts can be added over blocks, micro-batches and workers.

Legend: n blocks, D = B-1 draft positions, k candidate tokens, V vocabulary, M largest budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


def top_marginals(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens of each position (or all V), for `build_tree` and `prefix_ranks`.

    logits [..., V] of any float type. Returns log-probabilities [..., k] fp32, descending, and tokens [..., k] int64. Equal
    probabilities are in the order of their token ids; which of those equal to the last one are left out is torch's choice.
    """
    wide = logits.float()
    values, tokens = wide.topk(min(count, wide.shape[-1]), dim=-1)
    tokens, by_token = tokens.sort(dim=-1)
    values, by_value = values.gather(-1, by_token).sort(dim=-1, descending=True, stable=True)
    return values - wide.logsumexp(dim=-1, keepdim=True), tokens.gather(-1, by_value)


@torch.no_grad()
def prefix_ranks(log_probabilities: Tensor, tokens: Tensor, labels: Tensor, budget: int) -> Tensor:
    """The smallest tree budget that drafts the first d labels, [n, D] int64 for d = 1..D; budget + 1 if `budget` does not.

    log_probabilities [n, D, k] float and tokens [n, D, k] int64 from `top_marginals`; labels [n, D] int64. On the device of
    the arguments, without synchronising it.
    """
    blocks, levels, count = log_probabilities.shape
    logs = log_probabilities.double()
    found = (tokens == labels[..., None]) & (logs > -torch.inf)
    label_rank = torch.where(found.any(-1), found.int().argmax(-1), count)  # `count`: not among the candidates
    parents, ranks, ends = _children(budget, count, logs.device)
    frontier = logs.new_zeros(blocks, 1)
    place = torch.zeros(blocks, dtype=torch.int64, device=logs.device)  # of the prefix of labels in its depth; -1: not kept
    pool, weights, places = [], [], []
    for level in range(levels):
        children = ends[frontier.shape[1] - 1]
        parent, rank = parents[:children], ranks[:children]
        own = (place[:, None] == parent) & (label_rank[:, level, None] == rank)
        candidates = frontier[:, parent] + logs[:, level][:, rank]
        frontier, order = candidates.sort(dim=1, descending=True, stable=True)
        frontier, own = frontier[:, :budget], own.gather(1, order[:, :budget])
        place = torch.where(own.any(1), own.int().argmax(1), -1)
        pool.append(frontier)
        weights.append(frontier.gather(1, place.clamp_min(0)[:, None]))
        places.append(place)
    return _ranks(pool, torch.cat(weights, dim=1), torch.stack(places, dim=1), budget)


def _children(budget: int, count: int, device: torch.device) -> tuple[Tensor, Tensor, list[int]]:
    """Place of the parent and rank of the token, of all children that can be among the first `budget` of their depth.

    Ordered by parent; the list says how many there are up to each parent.
    """
    counts = (budget // torch.arange(1, budget + 1)).clamp_max(count)
    ends = counts.cumsum(0)
    parents = torch.arange(budget).repeat_interleave(counts)
    ranks = torch.arange(len(parents)) - (ends - counts).repeat_interleave(counts)
    return parents.to(device), ranks.to(device), ends.tolist()


def _ranks(pool: list[Tensor], weights: Tensor, places: Tensor, budget: int) -> Tensor:
    """Ranks [n, D] of the prefixes with `weights` [n, D] at `places` [n, D] of their depth (-1: none), among all in `pool`."""
    before = torch.zeros_like(places)
    for depth, kept in enumerate(pool):  # ties go to the shallower prefix
        before[:, : depth + 1] += (kept[:, None] > weights[:, : depth + 1, None]).sum(-1)
        before[:, depth + 1 :] += (kept[:, None] >= weights[:, depth + 1 :, None]).sum(-1)
        same_depth = (kept > weights[:, depth, None]).sum(-1)
        before[:, depth] += places[:, depth] - same_depth
    return torch.where((places >= 0) & (before < budget), before + 1, budget + 1)


@dataclass(frozen=True)
class DraftCounts:
    """Counts over blocks that can be added; all int64, on one device.

    A block counts at depth d if its first d labels are supervised: what stands behind the first unsupervised label is
    censored, neither accepted nor rejected.
    """

    chain_tried: Tensor  # [D] blocks whose chain was right up to d-1
    chain_accepted: Tensor  # [D] of those, right at d
    tree_tried: Tensor  # [D, M+2] blocks by the smallest budget that drafts d-1 labels (0 for d=1)
    tree_accepted: Tensor  # [D, M+2] blocks by the smallest budget that drafts d labels

    def __add__(self, other: Self) -> Self:
        return type(self)(*(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)))

    def to(self, device: torch.device | str) -> Self:
        """The same counts on `device`."""
        return type(self)(*(part.to(device) for part in vars(self).values()))

    def chain_tau(self) -> float | None:
        """Teacher-forced acceptance length of chains, bonus included; None without a supervised block."""
        return _tau(self.chain_tried, self.chain_accepted)

    def tree_tau(self, budgets: Sequence[int]) -> list[float | None]:
        """Teacher-forced acceptance length of trees of these sizes. Raises ValueError for one that was not counted."""
        largest = self.tree_tried.shape[1] - 2
        if wrong := [budget for budget in budgets if not 1 <= budget <= largest]:
            raise ValueError(f"budgets {wrong} were not counted: expected 1 to {largest}")
        tried, accepted = self.tree_tried.cumsum(1), self.tree_accepted.cumsum(1)
        return [_tau(tried[:, budget], accepted[:, budget]) for budget in budgets]


@torch.no_grad()
def count_drafts(log_probabilities: Tensor, tokens: Tensor, labels: Tensor, supervised: Tensor, budget: int) -> DraftCounts:
    """Acceptance of the chain and of every tree of up to `budget` nodes, over n training blocks.

    log_probabilities [n, D, k] and tokens [n, D, k] from `top_marginals(logits, budget)`; labels [n, D] int64 and supervised
    [n, D] bool as `loss.block_labels` gives them. All on one device, which is not synchronised.
    """
    supervised = supervised.cumprod(-1).bool()
    right = (tokens[..., 0] == labels).cumprod(-1).bool()
    entered = torch.cat((torch.ones_like(right[:, :1]), right[:, :-1]), dim=1)
    ranks = prefix_ranks(log_probabilities, tokens, labels, budget)
    before = torch.cat((torch.zeros_like(ranks[:, :1]), ranks[:, :-1]), dim=1)
    return DraftCounts(
        chain_tried=(supervised & entered).sum(0),
        chain_accepted=(supervised & right).sum(0),
        tree_tried=_histogram(before, supervised, budget + 2),
        tree_accepted=_histogram(ranks, supervised, budget + 2),
    )


def _histogram(values: Tensor, counted: Tensor, size: int) -> Tensor:
    """How often each value in 0..size-1 stands in each column, [D, size] int64; `values` and `counted` [n, D]."""
    table = torch.zeros(values.shape[1], size, dtype=torch.int64, device=values.device)
    return table.scatter_add_(1, values.T, counted.T.long())


def _tau(tried: Tensor, accepted: Tensor) -> float | None:
    """1 + the sum of the products of conditional acceptance (Kaplan-Meier), from counts [D]; None if nothing was tried."""
    if not tried[0]:
        return None
    rates = accepted.double() / tried.clamp_min(1)
    return 1.0 + float(rates.cumprod(0).sum())
