"""The engine `processes` as the trainer sees it, and the life of a rank that is a target.

On CPUs a drafter gets the gradients of every micro-batch of the step from the others and adds them up in the order of the
micro-batches, so that any number of drafters gives the same bits as one; that moves as many gradients as a step has
micro-batches. On GPUs the flat gradients are all-reduced in place. Either way every drafter makes the same update; at every
checkpoint it is verified that the weights are still the same. With `--fully-shard` each drafter updates its part of them
(`dflash.sharded`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from dflash import device_time
from dflash.assembly import Parts, StatesWorker
from dflash.batch import LossSums, PackedBatch, TargetStates
from dflash.compile_policy import CompilePolicy
from dflash.config import RunConfig, Topology
from dflash.engine.devices import Placement
from dflash.engine.loops import DrafterWorker, Sink, WorkerTimes
from dflash.engine.processes import DrafterRun, Ranks
from dflash.engine.queue import QueueStats
from dflash.engine.reading import ReadingQueue
from dflash.engine.transport import ReceivingQueue, SendingQueue, StatesShape, checksum, receive_states, send_states
from dflash.engine.waits import Waits
from dflash.exchange import ProcessReport, report
from dflash.modeling.tree_estimate import DraftCounts
from dflash.worker import Contribution, NonFiniteError, TargetModelWorker, synchronize


def placement_of(ranks: Ranks) -> Placement:
    """The one worker of this rank."""
    if ranks.is_target:
        return Placement(targets=(ranks.device,), drafters=(), first_target=ranks.roles.targets.index(ranks.target_leader))
    return Placement(targets=(), drafters=(ranks.device,), first_drafter=ranks.roles.drafters.index(ranks.rank))


def states_shape(config: RunConfig, parts: Parts, device: torch.device) -> StatesShape:
    """What travels in this run."""
    rows, tokens, shape = config.data.rows_per_batch, config.data.sequence_length, parts.shape
    return StatesShape(
        features=(rows, tokens, len(shape.target_layer_ids) * shape.hidden_size),
        final_hidden=(rows, tokens, shape.hidden_size) if config.loss.kind == "kl" else None,
        dtype=torch.float32 if device.type == "cpu" else getattr(torch, config.target.dtype),
    )


def serve(config: RunConfig, ranks: Ranks, parts: Parts, policy: CompilePolicy, first_step: int) -> None:
    """Be a target: make what the drafters warm up and validate with, then what they ask for, and report."""
    shape, checksums = states_shape(config, parts, ranks.device), config.transport.checksums
    worker: StatesWorker = parts.targets[0]
    per_step, sends = config.optim.batches_per_step, ranks.rank == ranks.target_leader
    if parts.tp_plan is not None:
        assert isinstance(worker, TargetModelWorker)
        with ranks.doing.at("slow", "splitting the target"):
            worker.split(parts.tp_plan, ranks.team)
        worker = _Team(worker, ranks)
    with policy.in_worker():
        with ranks.doing.at("slow", "target states for the warm-up"):
            serves = ranks.target_leader == ranks.roles.targets[0]
            for batch in parts.heldout_batches() if serves else ():
                states = worker.run(batch)
                if sends:
                    send_states(ranks, states, 0, shape, checksums=checksums)()
            if policy.warms_up:
                first = worker.produce(first_step * per_step)
                for drafter in ranks.roles.drafters if serves and sends else ():
                    send_states(ranks, first, drafter, shape, checksums=checksums)()
        numbers = range(first_step * per_step, config.optim.steps * per_step)
        queue: Sink = _Following(ranks)
        if sends:
            queue = SendingQueue(ranks, ranks.roles, shape, first=numbers.start, end=numbers.stop, checksums=checksums)
        if sends and parts.tp_plan is not None:
            queue = _Leading(queue, ranks)
        ranks.stop.stepping = True
        with policy.frozen():
            times = ranks.run_target(queue, worker)
    policy.check()
    ranks.gather(report(policy, [times], [ranks.device]))


class RanksEngine:
    """One drafter of this process among the other ranks."""

    def __init__(self, config: RunConfig, ranks: Ranks, parts: Parts, policy: CompilePolicy) -> None:
        self._config, self._ranks, self._parts, self._policy = config, ranks, parts, policy
        self._drafter = parts.drafters[0]
        if config.fully_shard:
            ranks.shard(self._drafter)
        self._shape = states_shape(config, parts, ranks.device)
        topology = Topology.parse(config.topology)
        self.leads = ranks.leads
        self.num_targets, self.num_drafters = topology.targets, topology.drafters
        self.num_devices = topology.targets * config.target.tensor_parallel + topology.drafters
        self.devices = [str(ranks.device.type)] * self.num_devices  # each rank has one of its own
        self.workers_here = ranks.launch.local_world_size
        self._times = WorkerTimes(worker=ranks.worker, device=str(ranks.device))
        self._others: tuple[float, list[WorkerTimes]] = -math.inf, []  # when asked for, of the other ranks
        self._queue: ReceivingQueue | ReadingQueue | None = None
        self._reader = parts.targets[0] if parts.targets else None  # of features; no rank is a target then

    def states_to_warm_up(self, number: int) -> TargetStates:
        """See `dflash.exchange.Engine`; made by the first target for all drafters."""
        if self._reader is not None:
            return self._reader.produce(number)
        return self._receive(self._parts.packed(number))

    def validation_states(self) -> list[TargetStates]:
        """See `dflash.exchange.Engine`."""
        batches = self._parts.heldout_batches() if self.leads else []
        return [self._receive(batch) if self._reader is None else self._reader.run(batch) for batch in batches]

    def share_weights(self) -> None:
        """See `dflash.exchange.Engine`."""
        if self._drafter.parameters.together:  # they were made equal before they were cut
            return
        self._ranks.from_leader(self._drafter.flat.weights)
        self._drafter.flat.refresh()
        synchronize(self._ranks.device)  # the stream that the drafter works on does not wait for this one

    def collect(self, step: int) -> list[Contribution]:
        """See `dflash.exchange.Engine`. Every drafter takes part, also one without a micro-batch or a valid anchor."""
        own = sorted(self._drafter.take_contributions(), key=lambda part: part.first_index)
        with self._ranks.doing.at("waiting", f"adding up the gradients of step {step + 1}"):
            told = self._ranks.gather_from_drafters([(part.first_index, part.batches, _on_cpu(part.drafts)) for part in own])
            remarks = {row[0]: row for rows in told or [] for row in rows}
            if self._ranks.device.type == "cuda" or self._drafter.parameters.together:
                return [self._reduced(own, [remarks[index] for index in sorted(remarks)])]
            return self._all(step, own, remarks)

    def after_update(self) -> None:
        """See `dflash.exchange.Engine`; each drafter has made the same update."""

    def verify_weights(self) -> None:
        """See `dflash.exchange.Engine`. Nobody else has the part of a drafter that shares them."""
        if self._drafter.parameters.together:
            return
        sums = self._ranks.gather_from_drafters(checksum([self._drafter.flat.weights]))
        if sums and len(set(sums)) > 1:
            raise RuntimeError(
                f"the drafters' weights have drifted apart, checksums {sums}: memory or a GPU is broken, or the machines are not "
                f"of one kind; the checkpoint before is good"
            )

    def any(self, flag: bool) -> bool:
        """See `dflash.exchange.Engine`."""
        with self._ranks.doing.at("waiting", "agreeing whether to go on"):
            return self._ranks.any_drafter(flag)

    def slow(self, what: str) -> AbstractContextManager[None]:
        """See `dflash.exchange.Engine`."""
        return self._ranks.doing.at("slow", what)

    def run(self, first_step: int, finish_step: Callable[[int], bool]) -> None:
        """See `dflash.exchange.Engine`."""
        per_step, steps = self._config.optim.batches_per_step, self._config.optim.steps
        numbers = self._ranks.roles.numbers_of_drafter(self._ranks.rank, first_step * per_step, steps * per_step)
        slots = -(-self._config.telemetry.queue_items // self.num_drafters)
        if self._reader is not None:
            self._queue = ReadingQueue(self._reader, numbers=numbers, slots=slots)
        else:
            self._queue = self._receiving(numbers, slots)
        run = DrafterRun(
            queue=self._queue,
            times=self._times,
            first_step=first_step,
            num_steps=steps,
            batches_per_step=per_step,
            finish_step=finish_step,
        )
        with self._policy.in_worker():
            (worker,) = device_time.timed_drafters([self._drafter], self._config.measure)
            worker = _Together(worker, self._ranks) if self._drafter.parameters.together else worker
            worker = worker if self._reader is not None else _Blaming(worker, self._ranks)
            self._ranks.run_drafter(run, worker)

    def times(self) -> Sequence[WorkerTimes]:
        """See `dflash.exchange.Engine`."""
        return [self._times]

    def all_times(self) -> Sequence[WorkerTimes]:
        """See `dflash.exchange.Engine`; of other ranks what they said with their last sign of life but one, at worst."""
        asked, others = self._others
        if time.monotonic() - asked > self._ranks.watch.beat_seconds:
            others = [times for times in self._ranks.watch.times() if times.worker != self._ranks.worker]
            self._others = time.monotonic(), others
        return [self._times, *others]

    def queue_stats(self) -> QueueStats:
        """See `dflash.exchange.Engine`."""
        assert self._queue is not None
        return self._queue.stats()

    def waits(self) -> Waits | None:
        """See `dflash.exchange.Engine`."""
        return self._ranks.waits() if self.leads else None

    def gather(self, own: ProcessReport) -> list[ProcessReport] | None:
        """See `dflash.exchange.Engine`."""
        return self._ranks.gather(own)

    def _receiving(self, numbers: range, slots: int) -> ReceivingQueue:
        return ReceivingQueue(
            self._ranks,
            self._ranks.roles,
            self._shape,
            self._parts.packed,
            numbers=numbers,
            slots=slots,
            checksums=self._config.transport.checksums,
        )

    def _receive(self, batch: PackedBatch) -> TargetStates:
        source = self._ranks.roles.targets[0]
        return receive_states(self._ranks, lambda: batch, source, self._shape, checksums=self._config.transport.checksums)()

    def _reduced(self, own: list[Contribution], remarks: list[Any]) -> Contribution:
        """One sum over all drafters; on a GPU a drafter's own micro-batches are one sum already."""
        width = self._parts.shape.block_size - 1
        sums = own[0].sums.vector() if own else torch.zeros(4 + 2 * width, device=self._ranks.device)
        gradients = self._drafter.parameters.gradients
        if not own:
            gradients.zero_()  # they may hold what the step before left
        if not self._drafter.parameters.together:
            self._ranks.sum_over_drafters(gradients)
        self._ranks.sum_over_drafters(sums)
        drafts = [row[2] for row in remarks if row[2] is not None]
        return Contribution(
            first_index=0,
            gradients=gradients,
            sums=LossSums.of_vector(sums),
            batches=tuple(batch for row in remarks for batch in row[1]),
            drafts=_added(drafts),
        )

    def _all(self, step: int, own: list[Contribution], remarks: dict[int, Any]) -> list[Contribution]:
        """The contribution of every micro-batch of the step. Remarks (batches, drafts) are the leader's only."""
        per_step, roles = self._config.optim.batches_per_step, self._ranks.roles
        numbers = range(step * per_step, (step + 1) * per_step)
        width, size = self._parts.shape.block_size - 1, self._drafter.flat.gradients.numel()
        rows = torch.zeros(-(-per_step // self.num_drafters), size + 4 + 2 * width)
        for row, part in zip(rows, own, strict=False):
            row.copy_(torch.cat([part.gradients, part.sums.vector()]))
        everything = self._ranks.gather_rows(rows)
        places = dict.fromkeys(roles.drafters, 0)
        parts = []
        for number in numbers:
            drafter = roles.drafter_of(number)
            row = everything[roles.drafters.index(drafter), places[drafter]]
            places[drafter] += 1
            remark = remarks.get(number, (number, (), None))
            sums = LossSums.of_vector(row[size:])
            parts.append(Contribution(first_index=number, gradients=row[:size], sums=sums, batches=remark[1], drafts=remark[2]))
        return parts


class _Blaming:
    """A drafter that says whose states were not finite."""

    def __init__(self, drafter: DrafterWorker, ranks: Ranks) -> None:
        self.device = drafter.device
        self._drafter, self._ranks = drafter, ranks

    def accumulate(self, states: TargetStates) -> None:
        with self._blaming():
            self._drafter.accumulate(states)

    def settle(self) -> None:
        with self._blaming():
            self._drafter.settle()

    @contextlib.contextmanager
    def _blaming(self) -> Iterator[None]:
        try:
            yield
        except NonFiniteError as error:
            if error.micro_batch is None:
                raise
            rank = self._ranks.roles.target_of(error.micro_batch)
            raise NonFiniteError(f"{error}. Its target states are from rank {rank} ({self._ranks.roles.worker(rank)})") from error


class _Team:
    """One rank's part of a target: what breaks inside it may be another's end."""

    def __init__(self, worker: StatesWorker, ranks: Ranks) -> None:
        self.device = worker.device
        self._worker, self._ranks = worker, ranks

    def produce(self, number: int) -> TargetStates:
        with self._ranks.losing_peers():
            return self._worker.produce(number)

    def run(self, batch: PackedBatch) -> TargetStates:
        with self._ranks.losing_peers():
            return self._worker.run(batch)


class _Leading:
    """The queue of the first rank of a team: what it claims, the others make as well."""

    def __init__(self, queue: Sink, ranks: Ranks) -> None:
        self._queue, self._ranks = queue, ranks

    def claim(self) -> int | None:
        return self._ranks.told_by_target_leader(self._queue.claim())

    def put(self, number: int, item: TargetStates) -> None:
        self._queue.put(number, item)


class _Following:
    """The queue of the other ranks of a team: they make what they are told, and send nothing."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def claim(self) -> int | None:
        return self._ranks.told_by_target_leader(None)

    def put(self, number: int, item: TargetStates) -> None:
        """The first rank has the same states."""


class _Together:
    """A drafter that works at the pace of the others: to wait for them in the middle of a micro-batch is no hang of its own."""

    def __init__(self, drafter: DrafterWorker, ranks: Ranks) -> None:
        self.device = drafter.device
        self._drafter, self._ranks = drafter, ranks

    def accumulate(self, states: TargetStates) -> None:
        doing = f"gradients of micro-batch {states.batch.index}, with the other drafters"
        with self._ranks.doing.at("waiting", doing), self._ranks.losing_peers():
            self._drafter.accumulate(states)

    def settle(self) -> None:
        with self._ranks.doing.at("waiting", "the gradients of a step, with the other drafters"), self._ranks.losing_peers():
            self._drafter.settle()


def _on_cpu(drafts: DraftCounts | None) -> DraftCounts | None:
    return None if drafts is None else drafts.to("cpu")


def _added(drafts: list[DraftCounts]) -> DraftCounts | None:
    total = None
    for one in drafts:
        total = one if total is None else total + one
    return total
