"""Which rank is which worker, and which target makes a micro-batch for which drafter. Pure; imports no torch.

Both are decided once, from the topology and the nodes alone, so that every rank knows them without asking: micro-batch n goes
to drafter n mod M, and the targets of a group take the micro-batches of its drafters in turn. If every node has targets and
drafters, each node is a group and target states never leave it; otherwise all ranks are one group.

A target may be a team of several ranks, one after the other on one node (`tensor_parallel`). The first of them is the target of
whom all others know; the rest of the team work with it and send nothing.

Known limit: because nothing is decided by speed, a slow target slows its group down to its own pace.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Self

from dflash.config import ConfigError, Topology


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The workers of a run. Built by `assign`; the same on every rank."""

    drafters: tuple[int, ...]  # rank of each drafter; drafter 0, the leader, is rank 0
    targets: tuple[int, ...]  # rank of each target, the first of its team
    nodes: tuple[int, ...]  # node of each rank
    tensor_parallel: int = 1  # ranks of a team

    @classmethod
    def assign(cls, topology: Topology, nodes: tuple[int, ...], tensor_parallel: int = 1) -> Self:
        """Spread the drafters evenly over the nodes; on each node they come before its targets.

        `nodes` has the node of every rank, ascending. Raises ConfigError when there are not as many ranks as workers, and when
        a team would lie on two nodes.
        """
        wanted_ranks = topology.targets * tensor_parallel + topology.drafters
        if len(nodes) != wanted_ranks:
            ways = f", targets of {tensor_parallel} ranks each," if tensor_parallel > 1 else ""
            raise ConfigError(
                f"topology {topology}{ways} has {wanted_ranks} workers, torchrun started {len(nodes)} processes: "
                f"use --nproc-per-node {wanted_ranks} on one node, or another --topology"
            )
        drafters: list[int] = []
        for node in sorted(set(nodes)):
            ranks = [rank for rank, its_node in enumerate(nodes) if its_node == node]
            wanted = -(-topology.drafters * (ranks[-1] + 1) // len(nodes)) - len(drafters)
            drafters += ranks[:wanted]
        others = [rank for rank in range(len(nodes)) if rank not in drafters]
        teams = [others[start : start + tensor_parallel] for start in range(0, len(others), tensor_parallel)]
        for team in teams:
            if nodes[team[0]] != nodes[team[-1]]:
                raise ConfigError(
                    f"the ranks {team} of one target lie on several nodes: let target.tensor-parallel {tensor_parallel} divide "
                    f"the target ranks of every node"
                )
        targets = tuple(team[0] for team in teams)
        return cls(drafters=tuple(drafters), targets=targets, nodes=nodes, tensor_parallel=tensor_parallel)

    def worker(self, rank: int) -> str:
        """`drafter-0`, `target-3`; `target-3.1` is the second rank of a team."""
        if rank in self.drafters:
            return f"drafter-{self.drafters.index(rank)}"
        team = self.team(rank)
        place = team.index(rank)
        return f"target-{self.targets.index(team[0])}{f'.{place}' if place else ''}"

    def team(self, rank: int) -> tuple[int, ...]:
        """The ranks of the target that `rank` belongs to, itself among them."""
        return self._teams[rank]

    def drafter_of(self, number: int) -> int:
        """Rank that learns from micro-batch `number`."""
        return self.drafters[number % len(self.drafters)]

    def target_of(self, number: int) -> int:
        """Rank that makes micro-batch `number`."""
        turn, place = divmod(number, len(self.drafters))
        drafters, targets, position = self._groups[self.drafters[place]]
        item = turn * len(drafters) + position  # counts the micro-batches of the group
        return targets[item % len(targets)]

    @property
    def period(self) -> int:
        """After so many micro-batches, ways begin to repeat."""
        sizes = {len(targets) for _, targets, _ in self._groups.values()}
        return len(self.drafters) * math.lcm(*sizes)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Target and drafter of all that send states to one another: those of a group, and the warm-up's target with all."""
        if not self.targets:
            return []
        pairs = {(self.target_of(number), self.drafter_of(number)) for number in range(self.period)}
        return sorted(pairs | {(self.targets[0], drafter) for drafter in self.drafters})

    def numbers_of_drafter(self, rank: int, first: int, end: int) -> range:
        """Its micro-batches among `first` to `end - 1`."""
        count = len(self.drafters)
        return range(first + (self.drafters.index(rank) - first) % count, end, count)

    @functools.cached_property
    def _teams(self) -> dict[int, tuple[int, ...]]:
        others = sorted(set(range(len(self.nodes))) - set(self.drafters))
        ways = self.tensor_parallel
        teams = [tuple(others[start : start + ways]) for start in range(0, len(others), ways)]
        return {rank: team for team in teams for rank in team}

    @functools.cached_property
    def _groups(self) -> dict[int, tuple[tuple[int, ...], tuple[int, ...], int]]:
        """Of each drafter: drafters and targets of its group, and its place among those drafters."""
        if {self.nodes[rank] for rank in self.drafters} != {self.nodes[rank] for rank in self.targets}:
            return {drafter: (self.drafters, self.targets, place) for place, drafter in enumerate(self.drafters)}
        found: dict[int, tuple[tuple[int, ...], tuple[int, ...], int]] = {}
        for node in set(self.nodes):
            drafters, targets = self._on(node, self.drafters), self._on(node, self.targets)
            found |= {drafter: (drafters, targets, place) for place, drafter in enumerate(drafters)}
        return found

    def _on(self, node: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if self.nodes[rank] == node)
