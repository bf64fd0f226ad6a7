"""Which rank is which worker, and which target makes a micro-batch for which drafter. Pure; imports no torch.

Both are decided once, from the topology and the nodes alone, so that every rank knows them without asking: micro-batch n goes
to drafter n mod M, and the targets of a group take the micro-batches of its drafters in turn. If every node has targets and
drafters, each node is a group and target states never leave it; otherwise all ranks are one group.

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
    targets: tuple[int, ...]  # rank of each target
    nodes: tuple[int, ...]  # node of each rank

    @classmethod
    def assign(cls, topology: Topology, nodes: tuple[int, ...]) -> Self:
        """Spread the drafters evenly over the nodes; on each node they come before its targets.

        `nodes` has the node of every rank, ascending. Raises ConfigError when there are not as many ranks as workers.
        """
        workers = topology.targets + topology.drafters
        if len(nodes) != workers:
            raise ConfigError(
                f"topology {topology} has {workers} workers, torchrun started {len(nodes)} processes: "
                f"use --nproc-per-node {workers} on one node, or another --topology"
            )
        drafters: list[int] = []
        for node in sorted(set(nodes)):
            ranks = [rank for rank, its_node in enumerate(nodes) if its_node == node]
            wanted = -(-topology.drafters * (ranks[-1] + 1) // len(nodes)) - len(drafters)
            drafters += ranks[:wanted]
        targets = tuple(rank for rank in range(len(nodes)) if rank not in drafters)
        return cls(drafters=tuple(drafters), targets=targets, nodes=nodes)

    def worker(self, rank: int) -> str:
        """`drafter-0`, `target-3`."""
        if rank in self.drafters:
            return f"drafter-{self.drafters.index(rank)}"
        return f"target-{self.targets.index(rank)}"

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
