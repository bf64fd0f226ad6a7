"""The draft tree (DDTree): the M most probable prefixes under one pass's marginals, without torch.

The drafter gives each block position its own distribution, so a prefix has the product of its tokens' probabilities, and the
expected number of accepted drafts of a tree is the sum of the probabilities of its nodes (its surrogate, as the positions are
treated as independent). The M most probable prefixes are therefore the best tree of M nodes, and they are prefix-closed:
a child is never more probable than its parent.

Order of nodes: by probability; ties go to the shallower node, then to the one with the earlier parent, then to the token of
the better rank. That order is total, puts parents before children, and makes the tree of M nodes the first M nodes of any
larger one over the same candidates.

How it is built: level by level over arrays, with no Python object a node. At one depth the child of rank r (from 0) of the
parent in place i stands behind (i+1)(r+1)-1 others of its depth, so only the first M // (i+1) children of a parent can be
among the first M. What is less probable than M prefixes already known cannot either: the M-th best of the prefixes that
leave the likeliest chain in one place is such a bound before any level is built. `python -m dflash.decoding.tree_cost` times it.

Limits: at most MAX_BUDGET nodes (a verification attends from all nodes to all nodes); probabilities are sums of float64 logs.
Reference: DDTree (liranringel/ddtree), which pops a heap.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from dflash.config import check_budget

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

ROOT_TOKEN = -1  # the root is the block's anchor, which the tree does not know
_NEAR = 16  # alternatives in one place of the likeliest chain that are looked at for the first bound
_LEAST = float(np.finfo(np.float64).min)  # above -inf, the weight of what is never drafted
_SLACK = 1e-9  # more than float64 loses between a sum and a difference of two logs


@dataclass(frozen=True)
class DraftTree:
    """Nodes in their order; node 0 is the root (the anchor), which no budget counts. [1+M] each."""

    tokens: Ints  # ROOT_TOKEN at the root
    parents: Ints  # place of the parent; 0 at the root
    depths: Ints  # 0 at the root, 1 for the token after it
    log_probabilities: Floats  # of the prefix that ends at the node; 0 at the root

    @classmethod
    def chain(cls, drafts: Ints) -> Self:
        """The tree of one path, `drafts` [tokens] int64; without drafts the root alone. Its probabilities are not known (NaN)."""
        places = np.arange(len(drafts) + 1)
        unknown = np.full(len(places), np.nan)
        return cls(np.append(ROOT_TOKEN, drafts).astype(np.int64), np.maximum(places - 1, 0), places, unknown)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def ancestors(self) -> npt.NDArray[np.bool_]:
        """[1+M, 1+M]: True where the column's node lies on the row's path from the root, the node itself included."""
        table = np.eye(len(self), dtype=np.bool_)
        for depth in range(1, int(self.depths.max()) + 1):
            nodes = np.flatnonzero(self.depths == depth)
            table[nodes] |= table[self.parents[nodes]]
        return table

    def walk(self, choices: Ints) -> list[int]:
        """Places on the path from the root that the target agrees with, the root included.

        `choices` [1+M] int64: the target's token after each node.
        """
        agrees = self.tokens == choices[self.parents]
        agrees[0] = False
        followed = [0]
        places = np.flatnonzero(agrees)
        for place, parent in zip(places.tolist(), self.parents[places].tolist(), strict=True):
            if parent == followed[-1]:
                followed.append(place)
        return followed


def build_tree(log_probabilities: npt.NDArray[np.floating], tokens: Ints, budget: int) -> DraftTree:
    """The tree of the `budget` most probable prefixes, or of all possible ones if they are fewer.

    log_probabilities [L, k]: of the k likeliest tokens of each of the L draft positions, descending; tokens [L, k] int64. The
    tree is exact for k >= min(budget, vocabulary). Tokens of probability 0 are never drafted. Raises ConfigError for a
    budget outside 1 to MAX_BUDGET, ValueError for NaN.
    """
    check_budget(budget)
    logs = np.minimum(log_probabilities, 0.0, dtype=np.float64)
    if np.isnan(logs).any():
        raise ValueError("the drafter's probabilities are not numbers: check its weights and its dtype")
    weights, parents, ranks, starts = _levels(logs, budget)
    best = np.argsort(-weights, kind="stable")[:budget]  # stable: places are ordered by depth, then as the ties ask
    place = np.zeros(len(weights) + 1, dtype=np.int64)  # in the tree, of each place in the pool; the root stands last
    place[best] = np.arange(1, len(best) + 1)
    depths = np.searchsorted(starts, best, side="right")
    return DraftTree(
        tokens=np.append(ROOT_TOKEN, tokens[depths - 1, ranks[best]]),
        parents=np.append(0, place[parents[best]]),
        depths=np.append(0, depths),
        log_probabilities=np.append(0.0, weights[best]),
    )


def _levels(logs: Floats, budget: int) -> tuple[Floats, Ints, Ints, list[int]]:
    """A pool that holds the best prefixes: weights, parents (places in the pool, -1 the root), ranks, and where depths start."""
    bound = _first_bound(logs, budget)
    weights, parents, ranks, starts = [np.empty(0)], [np.empty(0, np.int64)], [np.empty(0, np.int64)], []
    frontier, first, size = np.zeros(1), -1, 0  # weights of the depth before, its first place in the pool, the pool's size
    caps = budget // np.arange(1, budget + 1)
    for level, negative in zip(logs, -logs, strict=True):
        room = frontier - bound + _SLACK * (1.0 - frontier)
        counts = np.minimum(negative.searchsorted(room, side="right"), caps[: len(frontier)])
        ends = counts.cumsum()
        parent = np.arange(len(frontier)).repeat(counts)
        rank = np.arange(ends[-1]) - (ends - counts).repeat(counts)
        weight = frontier[parent] + level[rank]
        if size + len(weight) > 2 * budget:
            bound = max(bound, _nth(np.concatenate((*weights, weight)), budget))
        kept = np.flatnonzero(weight >= bound)
        if not len(kept):
            break
        order = kept[(-weight[kept]).argsort(kind="stable")[:budget]]
        starts.append(size)
        frontier = weight[order]
        weights.append(frontier)
        parents.append(first + parent[order] if size else np.full(len(order), -1))
        ranks.append(rank[order])
        first, size = size, size + len(order)
    return np.concatenate(weights), np.concatenate(parents), np.concatenate(ranks), starts


def _first_bound(logs: Floats, budget: int) -> float:
    """A weight that at least `budget` different prefixes reach; the least finite one if not so many are known.

    Two families are looked at: the likeliest chain up to a depth and any token there, and the likeliest chain with another
    of its _NEAR likeliest tokens in one place.
    """
    likeliest = logs[:, 0].cumsum()
    last = (likeliest - logs[:, 0])[:, None] + logs
    changes = logs[:, 1 : 1 + _NEAR] - logs[:, :1]
    anywhere = (likeliest[:, None, None] + changes)[np.tri(len(logs), dtype=np.bool_)]
    bound = max(_nth(last.ravel(), budget), _nth(np.append(anywhere.ravel(), likeliest), budget))
    return max(bound - _SLACK * (1.0 - bound), _LEAST)


def _nth(values: Floats, rank: int) -> float:
    """The value of this rank (from 1) in descending order; -inf if there are fewer."""
    return float(np.partition(values, len(values) - rank)[len(values) - rank]) if len(values) >= rank else _LEAST
