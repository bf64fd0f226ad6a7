"""How fast would N targets and M drafters be? Every micro-batch of a run is followed through the stations of an engine.

`processes`: its drafter, whose turn it is, has a free slot and grants it; its target is free and makes it; the target's link
carries it; its drafter takes it. Who works for whom is the engine's own rule (`dflash.engine.roles`). `threads`: the first
target that is free claims the next number while the one queue has room, the first drafter that is free takes the next number.
At the end of a step all drafters wait for the last one, sum their gradients and update. Every event follows from earlier ones,
so a run of n micro-batches takes n sums and maxima, at 1,024 GPUs as at two.

Stage times are lognormal, with the mean and spread that `dflash.simulated_runs` reads from measured runs. Links are full duplex,
one transfer at a time; gradients are summed by a ring over the drafters; threads hand over without a link.

Known limits: stage times are taken not to depend on N and M, which holds for one GPU a worker and not for workers that share
cores or a GPU. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dflash.config import ConfigError, Topology
from dflash.engine.roles import Roles

EngineName = Literal["threads", "processes"]
STEPS = 40
SEEDS = 16  # of runs as short as measured ones, whose mean is told
_AROUND = 3  # splits on either side of the estimated best one that are simulated


@dataclass(frozen=True, kw_only=True)
class Stages:
    """What one run was measured to take. Spreads are standard deviations of the logarithm of stage times."""

    target_seconds: float  # of a micro-batch
    drafter_seconds: float
    update_seconds: float  # of a step
    tokens: float  # of a micro-batch
    batches_per_drafter: float  # of a step
    slots: int  # processes: in front of a drafter
    queue_items: int = 4  # threads: of the one queue
    target_spread: float = 0.0
    drafter_spread: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Machines of equal size and what connects them."""

    gpus_per_node: int = 8
    link_gb_per_second: float = 400.0  # between GPUs of a machine
    network_gb_per_second: float = 50.0  # of a GPU to another machine
    states_bytes: float = 0.0  # target states of a micro-batch
    gradient_bytes: float = 0.0  # of a drafter


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a topology would do."""

    topology: str
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    queue_occupancy: float  # micro-batches that lie ready when a drafter takes one, of those that can
    targets_wait: float  # share of their time
    drafters_wait: float  # share of their time, for micro-batches and for each other
    step_wait_seconds: float  # of a drafter for the others, at the end of a step


def simulate(
    stages: Stages,
    topology: Topology,
    fleet: Fleet,
    *,
    engine: EngineName = "processes",
    steps: int = STEPS,
    warm_up_steps: int | None = None,
    seed: int = 0,
) -> Outcome:
    """Run `steps` steps after `warm_up_steps` that are not counted (None: as many; 0: from the empty queue of a start)."""
    per_step = max(topology.drafters, round(stages.batches_per_drafter * topology.drafters))
    warm_up_steps = steps if warm_up_steps is None else warm_up_steps
    end = (warm_up_steps + steps) * per_step
    line = _Line(stages, topology, fleet, engine=engine, end=end, seed=seed)
    update = stages.update_seconds + _summing_seconds(topology, fleet)
    warm = 0.0
    for step in range(warm_up_steps + steps):
        if step == warm_up_steps:
            warm, line.seen = line.ended(), _Seen()
        for number in range(step * per_step, (step + 1) * per_step):
            line.take(number)
        line.end_step(update)
    seconds, seen, taken = line.ended() - warm, line.seen, steps * per_step
    rate = taken * stages.tokens / seconds
    return Outcome(
        topology=str(topology),
        tokens_per_second=rate,
        tokens_per_second_per_gpu=rate / (topology.targets + topology.drafters),
        queue_occupancy=seen.ready / taken,
        targets_wait=max(0.0, 1.0 - seen.making_seconds / seconds / topology.targets),
        drafters_wait=max(0.0, 1.0 - (seen.learning_seconds / topology.drafters + steps * update) / seconds),
        step_wait_seconds=seen.step_wait_seconds / steps / topology.drafters,
    )


def best_split(stages: Stages, gpus: int, fleet: Fleet) -> list[Outcome]:
    """The fastest split of so many GPUs into processes first, and those beside it. Raises ConfigError below two."""
    if gpus < 2:
        raise ConfigError(f"{gpus} GPUs cannot hold a target and a drafter each: simulate 2 or more")
    learning = stages.drafter_seconds + stages.update_seconds / stages.batches_per_drafter
    guess = round(gpus * learning / (learning + stages.target_seconds))
    around = range(max(1, guess - _AROUND), min(gpus - 1, guess + _AROUND) + 1) or range(gpus - 1, gpus)
    found = [simulate(stages, Topology(gpus - drafters, drafters), fleet) for drafters in around]
    return sorted(found, key=lambda one: -one.tokens_per_second)


@dataclass
class _Seen:
    """Sums over what was taken."""

    making_seconds: float = 0.0
    learning_seconds: float = 0.0
    step_wait_seconds: float = 0.0  # of all drafters together
    ready: float = 0.0  # shares of the queue


class _Line:
    """Micro-batches in the order of their numbers, each made as soon as there is room, taken in the order of the engine."""

    def __init__(self, stages: Stages, topology: Topology, fleet: Fleet, *, engine: EngineName, end: int, seed: int) -> None:
        workers = topology.targets + topology.drafters
        self._stages, self._fleet, self._shared = stages, fleet, engine == "threads"
        self._roles = Roles.assign(topology, tuple(rank // fleet.gpus_per_node for rank in range(workers)))
        self._drawn = {name: random.Random(f"{seed} {topology} {name}") for name in ("making", "learning")}
        self._target_free = dict.fromkeys(self._roles.targets, 0.0)
        self._link_free = dict.fromkeys(self._roles.targets, 0.0)
        self._drafter_free = dict.fromkeys(self._roles.drafters, 0.0)
        # Number n is begun when number n - window has left room for it.
        self._window = stages.queue_items if self._shared else stages.slots * topology.drafters
        self._made, self._end = 0, end
        self._arrived: dict[int, float] = {}
        self._room: dict[int, float] = defaultdict(float)  # when the number left room for the one a window later
        self._last_claim = self._last_taken = 0.0
        self.seen = _Seen()

    def take(self, number: int) -> None:
        """Let a drafter learn from the next number."""
        while self._made < min(number + self._window, self._end):
            self._arrived[self._made] = self._make(self._made)
            self._made += 1
        drafter = min(self._drafter_free, key=self._drafter_free.__getitem__) if self._shared else self._roles.drafter_of(number)
        begun = max(self._arrived[number], self._drafter_free[drafter], self._last_taken if self._shared else 0.0)
        learning = _draw(self._drawn["learning"], self._stages.drafter_seconds, self._stages.drafter_spread)
        self._drafter_free[drafter] = begun + learning
        self._room[number] = self._last_taken = begun if self._shared else begun + learning
        apart = 1 if self._shared else len(self._roles.drafters)
        mine = range(number, self._made, apart)
        self.seen.ready += sum(self._arrived[other] <= begun for other in mine) * apart / self._window
        self.seen.learning_seconds += learning
        del self._arrived[number]

    def end_step(self, update: float) -> None:
        """All drafters wait for the last one, and then for the update."""
        last = max(self._drafter_free.values())
        self.seen.step_wait_seconds += sum(last - free for free in self._drafter_free.values())
        self._drafter_free = dict.fromkeys(self._drafter_free, last + update)

    def ended(self) -> float:
        """When the last step ended."""
        return max(self._drafter_free.values())

    def _make(self, number: int) -> float:
        """When the states of a number have come to where a drafter can take them."""
        making = _draw(self._drawn["making"], self._stages.target_seconds, self._stages.target_spread)
        self.seen.making_seconds += making
        room = self._room.pop(number - self._window, 0.0)
        if self._shared:
            target = min(self._target_free, key=self._target_free.__getitem__)
            self._last_claim = max(self._last_claim, self._target_free[target], room)
            self._target_free[target] = self._last_claim + making
            return self._target_free[target]
        target = self._roles.target_of(number)
        self._target_free[target] = max(self._target_free[target], room) + making
        moving = _transfer_seconds(target, self._roles.drafter_of(number), self._fleet)
        self._link_free[target] = max(self._target_free[target], self._link_free[target]) + moving
        return self._link_free[target]


def mean_of_runs(stages: Stages, topology: Topology, fleet: Fleet, *, engine: EngineName, steps: int) -> Outcome:
    """The mean over SEEDS runs of so many steps, from their start to their end."""
    found = [
        simulate(stages, topology, fleet, engine=engine, steps=steps, warm_up_steps=0, seed=seed)
        for seed in range(SEEDS if stages.target_spread or stages.drafter_spread else 1)
    ]
    names = [field.name for field in dataclasses.fields(Outcome) if field.name != "topology"]
    means = {name: statistics.fmean(getattr(one, name) for one in found) for name in names}
    return Outcome(topology=str(topology), **means)


def with_update_of(stages: Stages, topology: Topology, engine: EngineName, step_end_seconds: float, steps: int) -> Stages:
    """Stages whose update is what is left of the mean end of a step when the drafters' waits for each other are taken off.

    Where drafters waited less than they would if each had its spread for itself, some of it was common to them, as on a machine
    that is slow for all, and makes nobody wait: then the spread is the one whose waits are those that were measured.
    """

    def waits(spread: float) -> float:
        tried = dataclasses.replace(stages, update_seconds=0.0, drafter_spread=spread)
        return mean_of_runs(tried, topology, Fleet(), engine=engine, steps=steps).step_wait_seconds

    spread = stages.drafter_spread
    if waits(spread) > step_end_seconds:
        spread = _largest(lambda tried: waits(tried) <= step_end_seconds, spread)
    return dataclasses.replace(stages, drafter_spread=spread, update_seconds=max(0.0, step_end_seconds - waits(spread)))


def _largest(fits: Callable[[float], bool], most: float) -> float:
    """The largest number from 0 to `most` that fits, where all below it do, to a hundredth of `most`; 0 where none does."""
    low, high = 0.0, most
    for _ in range(7):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _transfer_seconds(target: int, drafter: int, fleet: Fleet) -> float:
    same = target // fleet.gpus_per_node == drafter // fleet.gpus_per_node
    return fleet.states_bytes / 1e9 / (fleet.link_gb_per_second if same else fleet.network_gb_per_second)


def _summing_seconds(topology: Topology, fleet: Fleet) -> float:
    """Of a ring: every drafter sends and receives its gradients twice, but for its own part."""
    workers = topology.targets + topology.drafters
    rate = fleet.link_gb_per_second if workers <= fleet.gpus_per_node else fleet.network_gb_per_second
    return 2 * (topology.drafters - 1) / topology.drafters * fleet.gradient_bytes / 1e9 / rate


def _draw(drawn: random.Random, mean: float, spread: float) -> float:
    return mean * math.exp(drawn.gauss(0.0, spread) - spread**2 / 2) if spread else mean
