"""Both ends of the transport, with threads in the place of ranks and queues in the place of process groups."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash.batch import PackedBatch, Position, TargetStates
from dflash.config import Topology
from dflash.engine.queue import WorkerFailed
from dflash.engine.roles import Roles
from dflash.engine.transport import ReceivingQueue, SendingQueue, StatesShape, TransportError, checksum, introduce, receive_states

WAIT_SECONDS = 60  # ends what hangs
SHAPE = StatesShape(features=(1, 4, 6), final_hidden=(1, 4, 2), dtype=torch.float32)


class Network:
    """Ordered channels between ranks; counts the sends that wait for their receiver."""

    def __init__(self) -> None:
        self.channels: dict[Any, queue.SimpleQueue[Any]] = defaultdict(queue.SimpleQueue)
        self.change: Callable[[Tensor], Tensor] = lambda tensor: tensor
        self.most_waiting = 0
        self.meeting, self.met, self.barriers = threading.Lock(), set[tuple[int, int, int]](), dict[Any, threading.Barrier]()


class Rank:
    """The wire of one rank."""

    device = torch.device("cpu")

    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank = network, rank

    def send_control(self, values: list[int], to: int, tag: int) -> Callable[[], None]:
        self.network.channels[self.rank, to, tag].put(values)
        return lambda: None

    def receive_control(self, count: int, source: int, tag: int) -> Callable[[], list[int]]:
        return lambda: self.network.channels[source, self.rank, tag].get(timeout=WAIT_SECONDS)[:count]

    def send_tensors(self, tensors: list[Tensor], to: int) -> Callable[[], None]:
        channel = self.network.channels[self.rank, to, "data"]
        channel.put([self.network.change(tensor.clone()) for tensor in tensors])
        self.network.most_waiting = max(self.network.most_waiting, channel.qsize())
        return lambda: None

    def receive_tensors(self, tensors: list[Tensor], source: int) -> Callable[[], None]:
        def wait() -> None:
            for tensor, sent in zip(
                tensors, self.network.channels[source, self.rank, "data"].get(timeout=WAIT_SECONDS), strict=True
            ):
                tensor.copy_(sent)

        return wait


def batch(number: int) -> PackedBatch:
    ids = torch.arange(4)[None] + number
    return PackedBatch(
        input_ids=ids,
        positions=ids,
        document_ids=ids,
        loss_mask=ids > 0,
        anchors=ids[:, :1],
        anchor_valid=ids[:, :1] > 0,
        sample_ids=((f"sample-{number}",),),
        index=number,
        position=Position(epoch=0, batch=number),
        num_tokens=4,
    )


def states(number: int) -> TargetStates:
    return TargetStates(
        batch=batch(number), features=torch.full(SHAPE.features, float(number)), final_hidden=torch.ones(1, 4, 2) * -number
    )


class ConnectingRank(Rank):
    """Its first transfer with a peer begins when the peer's does, as NCCL's does."""

    def send_tensors(self, tensors: list[Tensor], to: int) -> Callable[[], None]:
        self.meet(self.rank, to)
        return super().send_tensors(tensors, to)

    def receive_tensors(self, tensors: list[Tensor], source: int) -> Callable[[], None]:
        self.meet(source, self.rank)
        return super().receive_tensors(tensors, source)

    def meet(self, source: int, to: int) -> None:
        with self.network.meeting:
            known = (source, to, self.rank) in self.network.met
            self.network.met.add((source, to, self.rank))
            barrier = self.network.barriers.setdefault((source, to), threading.Barrier(2, timeout=WAIT_SECONDS))
        if not known:
            barrier.wait()


class Ranks:
    """Threads for all targets, and the drafters' queues."""

    def __init__(
        self, topology: Topology, *, end: int, slots: int, checksums: bool = False, network: Network | None = None
    ) -> None:
        self.network = network or Network()
        self.roles = Roles.assign(topology, (0,) * (topology.targets + topology.drafters))
        self.made: list[int] = []
        self.queues = [
            ReceivingQueue(
                Rank(self.network, rank),
                self.roles,
                SHAPE,
                batch,
                numbers=self.roles.numbers_of_drafter(rank, 3, end),
                slots=slots,
                checksums=checksums,
            )
            for rank in self.roles.drafters
        ]
        self.targets = [threading.Thread(target=self.serve, args=(rank, end, checksums)) for rank in self.roles.targets]
        for thread in self.targets:
            thread.start()
        for each in self.queues:
            each.start()

    def serve(self, rank: int, end: int, checksums: bool) -> None:
        sending = SendingQueue(Rank(self.network, rank), self.roles, SHAPE, first=3, end=end, checksums=checksums)
        while (number := sending.claim()) is not None:
            self.made.append(number)
            sending.put(number, states(number))

    def close(self) -> None:
        with ThreadPoolExecutor(len(self.queues)) as drafters:
            list(drafters.map(ReceivingQueue.close, self.queues))
        for thread in self.targets:
            thread.join(timeout=WAIT_SECONDS)
            assert not thread.is_alive()


def take(ranks: Ranks, before: int) -> list[list[int]]:
    """Numbers that each drafter gets, its items compared with what was sent."""

    def one(each: ReceivingQueue) -> list[int]:
        numbers: list[int] = []
        while (item := each.get(before=before)) is not None:
            assert torch.equal(item.features, states(item.batch.index).features)
            assert item.final_hidden is not None
            assert torch.equal(item.final_hidden, states(item.batch.index).final_hidden)
            numbers.append(item.batch.index)
        return numbers

    with ThreadPoolExecutor(len(ranks.queues)) as drafters:
        return list(drafters.map(one, ranks.queues))


def test_ranks_that_connect_at_their_first_transfer_do_not_wait_for_each_other() -> None:
    """A drafter's receive comes before its grant, which the target waits for."""
    network, roles = Network(), Roles.assign(Topology(3, 2), (0,) * 5)

    def live(rank: int) -> list[int]:
        wire = ConnectingRank(network, rank)
        introduce(wire, roles)
        if rank in roles.targets:
            sending = SendingQueue(wire, roles, SHAPE, first=0, end=12, checksums=False)
            made = []
            while (number := sending.claim()) is not None:
                made.append(number)
                sending.put(number, states(number))
            return made
        numbers = roles.numbers_of_drafter(rank, 0, 12)
        receiving = ReceivingQueue(wire, roles, SHAPE, batch, numbers=numbers, slots=2, checksums=False)
        receiving.start()
        taken = []
        while (item := receiving.get(before=12)) is not None:
            taken.append(item.batch.index)
        receiving.close()
        return taken

    with ThreadPoolExecutor(5) as ranks:
        done = list(ranks.map(live, range(5)))
    assert sorted(number for numbers in done for number in numbers) == sorted([*range(12), *range(12)])


def test_the_batch_is_moved_before_the_tensors_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the tensors completes what the receiving thread has copied to the device; another thread then reads it."""
    order: list[str] = []
    original = PackedBatch.to
    monkeypatch.setattr(PackedBatch, "to", lambda self, device: order.append("batch") or original(self, device))

    class Told(Rank):
        def receive_tensors(self, tensors: list[Tensor], source: int) -> Callable[[], None]:
            wait = super().receive_tensors(tensors, source)
            return lambda: order.append("tensors") or wait()

    network = Network()
    roles = Roles.assign(Topology(1, 1), (0, 0))
    SendingQueue(Rank(network, 1), roles, SHAPE, first=0, end=1, checksums=False).put(0, states(0))
    receive_states(Told(network, 0), lambda: batch(0), 1, SHAPE, checksums=False)()
    assert order == ["batch", "tensors"]


@pytest.mark.parametrize(("targets", "drafters"), [(1, 1), (1, 3), (3, 2), (2, 4)])
@pytest.mark.parametrize("slots", [1, 3])
def test_numbers_come_in_order_exactly_once_and_up_to_the_step(targets: int, drafters: int, slots: int) -> None:
    ranks = Ranks(Topology(targets, drafters), end=24, slots=slots, checksums=True)
    first, second = take(ranks, before=11), take(ranks, before=24)
    ranks.close()
    assert all(numbers == sorted(numbers) for numbers in first + second)
    assert sorted(n for numbers in first for n in numbers) == list(range(3, 11))
    assert sorted(n for numbers in second for n in numbers) == list(range(11, 24))
    assert sorted(ranks.made) == list(range(3, 24))


def test_a_target_makes_no_more_than_the_drafters_have_room_for() -> None:
    ranks = Ranks(Topology(1, 2), end=10_000, slots=2)
    taken = take(ranks, before=9)
    ranks.close()
    assert sorted(n for numbers in taken for n in numbers) == list(range(3, 9))
    assert len(ranks.made) <= 6 + 2 * 2  # what was taken, and two slots of two drafters
    assert ranks.network.most_waiting <= 2


def test_stopping_early_leaves_no_target_waiting() -> None:
    ranks = Ranks(Topology(3, 2), end=10**9, slots=3)
    take(ranks, before=14)
    ranks.close()  # asserts that the targets end; walking over what was to come would take hours


def test_a_changed_byte_is_found_with_checksums_only() -> None:
    network = Network()
    network.change = lambda tensor: tensor.index_fill_(1, torch.tensor([2]), 0.5)
    ranks = Ranks(Topology(1, 1), end=4, slots=1, checksums=True, network=network)
    with pytest.raises(WorkerFailed, match=r"rank 1 sent a micro-batch with checksum \d+, expected \d+"):
        ranks.queues[0].get(before=4)
    ranks.targets[0].join(timeout=WAIT_SECONDS)
    assert checksum([torch.zeros(3)]) != checksum([torch.tensor([0.0, 0.0, 1e-30])])


def test_ranks_that_read_different_data_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    other = dataclasses.replace(batch(3), sample_ids=(("another sample",),))
    monkeypatch.setitem(
        globals(), "states", lambda _: TargetStates(batch=other, features=torch.zeros(1, 4, 6), final_hidden=torch.ones(1, 4, 2))
    )
    ranks = Ranks(Topology(1, 1), end=4, slots=1)
    with pytest.raises(WorkerFailed, match="do all ranks read the same data") as caught:
        ranks.queues[0].get(before=4)
    assert isinstance(caught.value.__cause__, TransportError)
    ranks.targets[0].join(timeout=WAIT_SECONDS)


def test_states_of_another_shape_are_refused_before_they_are_sent() -> None:
    sending = SendingQueue(Rank(Network(), 1), Roles.assign(Topology(1, 1), (0, 0)), SHAPE, first=0, end=1, checksums=False)
    wrong = dataclasses.replace(states(0), features=torch.zeros(1, 4, 5))
    with pytest.raises(TransportError, match=r"\(1, 4, 5\)"):
        sending.put(0, wrong)
