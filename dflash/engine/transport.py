"""Target states from rank to rank: the queue of `dflash.engine.queue`, with a target's end and a drafter's end.

One life: the drafter has a free slot, so it grants its next micro-batch to the target whose turn it is (`Roles`), and posts
receives for it. The target, which makes its micro-batches in the order of their numbers, waits for that grant, makes the states
and sends a header and the tensors; they arrive in the slot while the drafter still works on the one before. So memory is bounded
by the slots, numbers come in order and exactly once by construction, and no target decides anything.

- Grants and headers are small integer tensors on the control group (Gloo), tensors go through the data group (NCCL or Gloo),
  both as `isend`/`irecv` of torch.distributed. The drafter packs the batch itself, from its number; the header must match it.
- A grant of STOP ends a stream early: the drafter first takes what it has granted and drops it, so that no send stays open.
- A header that does not match (number, place, samples, shape, checksum) raises TransportError: the ranks run different data.

Legend: R rows, S tokens, K features, H hidden size.
"""

from __future__ import annotations

import functools
import hashlib
import queue
import threading
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash.batch import PackedBatch, TargetStates
from dflash.engine.loops import on_device
from dflash.engine.queue import OrderedQueue, QueueStats
from dflash.engine.roles import Roles

STOP = -1
GRANT, HEADER = 1, 2  # tags of the control group
_HEADER_FIELDS = ("number", "epoch", "batch", "tokens", "samples", "checksum")


class TransportError(RuntimeError):
    """What arrived is not what was asked for."""


@dataclass(frozen=True, kw_only=True)
class StatesShape:
    """Shapes of what travels; fixed for a run."""

    features: tuple[int, ...]  # [R, S, K*H]
    final_hidden: tuple[int, ...] | None  # [R, S, H], only for the KL loss
    dtype: torch.dtype

    def empty(self, device: torch.device) -> list[Tensor]:
        """One slot."""
        shapes = [self.features] if self.final_hidden is None else [self.features, self.final_hidden]
        return [torch.empty(shape, dtype=self.dtype, device=device) for shape in shapes]

    def check(self, tensors: list[Tensor]) -> None:
        """Raise TransportError unless these tensors fit into a slot."""
        wanted = [self.features] if self.final_hidden is None else [self.features, self.final_hidden]
        found = [tuple(tensor.shape) for tensor in tensors]
        if found != wanted or any(tensor.dtype != self.dtype for tensor in tensors):
            raise TransportError(f"target states have shapes {found} of {tensors[0].dtype}, the run has {wanted} of {self.dtype}")


class Wire(Protocol):
    """What transport needs of the process groups. Every call raises PeerLost where a connection breaks."""

    device: torch.device

    @property
    def rank(self) -> int:
        """This process among all."""

    def send_control(self, values: list[int], to: int, tag: int) -> Callable[[], None]:
        """Begin to send integers; the result waits for the end."""

    def receive_control(self, count: int, source: int, tag: int) -> Callable[[], list[int]]:
        """Begin to receive integers; the result waits for them."""

    def send_tensors(self, tensors: list[Tensor], to: int) -> Callable[[], None]:
        """Begin to send tensors, which must stay as they are until the result, which waits, returns."""

    def receive_tensors(self, tensors: list[Tensor], source: int) -> Callable[[], None]:
        """Begin to receive into tensors; the result waits until they are complete on the device."""


def introduce(wire: Wire, roles: Roles) -> None:
    """Let every target send each of its drafters a number, in one order for all ranks. All ranks call it, before all else.

    NCCL connects two ranks at their first transfer, and both wait in it for each other. A drafter posts a receive before it sends
    the grant for it, and the target sends nothing before it has the grant: their first transfer would never end.
    """
    number = torch.zeros(1, device=wire.device)
    for target, drafter in roles.pairs:
        if wire.rank == target:
            wire.send_tensors([number], drafter)()
        elif wire.rank == drafter:
            wire.receive_tensors([number], target)()


def send_states(wire: Wire, states: TargetStates, to: int, shape: StatesShape, *, checksums: bool) -> Callable[[], None]:
    """Begin to send states to a rank; the result waits for the end."""
    tensors = _tensors(states)
    shape.check(tensors)
    header = wire.send_control(_header(states.batch, tensors, checksums=checksums), to, HEADER)
    payload = wire.send_tensors(tensors, to)

    def wait() -> None:
        header()
        payload()

    return wait


def receive_states(
    wire: Wire,
    pack: Callable[[], PackedBatch],
    source: int,
    shape: StatesShape,
    *,
    checksums: bool,
    slot: list[Tensor] | None = None,
) -> Callable[[], TargetStates]:
    """Begin to receive the states of a batch; the result packs it and waits. They lie in `slot`, or in tensors of their own."""
    tensors = shape.empty(wire.device) if slot is None else slot
    header = wire.receive_control(len(_HEADER_FIELDS), source, HEADER)
    payload = wire.receive_tensors(tensors, source)

    def wait() -> TargetStates:
        batch = pack()
        moved = batch.to(wire.device)  # complete with the payload: the drafter's own stream does not wait for this thread's
        found = header()
        payload()
        expected = _header(batch, tensors, checksums=checksums)
        wrong = [
            f"{name} {was}, expected {should}"
            for name, was, should in zip(_HEADER_FIELDS, found, expected, strict=True)
            if was != should
        ]
        if wrong:
            raise TransportError(f"rank {source} sent a micro-batch with {'; '.join(wrong)}: do all ranks read the same data?")
        final_hidden = None if shape.final_hidden is None else tensors[1]
        return TargetStates(batch=moved, features=tensors[0], final_hidden=final_hidden)

    return wait


class SendingQueue:
    """A target's end: its micro-batches in the order of their numbers, each when its drafter has room."""

    def __init__(self, wire: Wire, roles: Roles, shape: StatesShape, *, first: int, end: int, checksums: bool) -> None:
        self._wire, self._roles, self._shape, self._checksums = wire, roles, shape, checksums
        self._numbers = iter(range(first, end))
        self._served = {roles.drafter_of(n) for n in range(roles.period) if roles.target_of(n) == wire.rank}
        self._stopped: set[int] = set()
        self._in_flight: deque[tuple[Callable[[], None], TargetStates]] = deque()

    def claim(self) -> int | None:
        """The number of the micro-batch to make, or None at the end, when everything has been sent."""
        for number in self._numbers:
            drafter = self._roles.drafter_of(number)
            if self._roles.target_of(number) != self._wire.rank or drafter in self._stopped:
                continue
            (granted,) = self._wire.receive_control(1, drafter, GRANT)()
            if granted == number:
                return number
            if granted != STOP:
                raise TransportError(f"rank {drafter} grants micro-batch {granted}, its next one from here is {number}")
            self._stopped.add(drafter)
            if self._stopped == self._served:
                break
        while self._in_flight:
            self._in_flight.popleft()[0]()
        return None

    def put(self, number: int, item: TargetStates) -> None:
        """Begin to send the states of a claimed number, and wait for the one before the one before."""
        send = send_states(self._wire, item, self._roles.drafter_of(number), self._shape, checksums=self._checksums)
        self._in_flight.append((send, item))
        while len(self._in_flight) > 2:
            self._in_flight.popleft()[0]()


class ReceivingQueue:
    """A drafter's end. Its thread waits for what was granted; `get` hands it out and grants the next one.

    States stay valid until the next `get`: the slot is then used again.
    """

    def __init__(
        self,
        wire: Wire,
        roles: Roles,
        shape: StatesShape,
        batches: Callable[[int], PackedBatch],
        *,
        numbers: range,
        slots: int,
        checksums: bool,
    ) -> None:
        self._wire, self._roles, self._shape, self._checksums = wire, roles, shape, checksums
        self._batches, self._numbers = batches, numbers
        self._slots = [shape.empty(wire.device) for _ in range(slots)]
        self._granted = 0  # of `numbers`, how many
        self._taken = 0
        self._grants: list[Callable[[], None]] = []
        self._posted: queue.SimpleQueue[tuple[int, Callable[[], TargetStates]] | None] = queue.SimpleQueue()
        self._local: OrderedQueue[TargetStates] = OrderedQueue(capacity=slots, first=0, end=len(numbers))
        self._thread = threading.Thread(target=self._receive, name="receive", daemon=True)

    def start(self) -> None:
        """Grant as much as there are slots."""
        self._thread.start()
        for _ in self._slots:
            self._grant()

    def get(self, *, before: int) -> TargetStates | None:
        """The next item with a number below `before`, or None. Raises WorkerFailed when the transport failed."""
        if self._granted < self._taken + len(self._slots):  # the one handed out before is done with: its slot is free
            self._grant()
        mine = len(range(self._numbers.start, min(before, self._numbers.stop), self._numbers.step))
        states = self._local.get(before=mine)
        self._taken += states is not None
        return states

    def close(self) -> None:
        """Take what was granted, stop the targets that wait for a grant, and end the thread."""
        while self._taken < self._granted and self._local.get(before=self._granted) is not None:
            self._taken += 1
        soon = self._numbers[self._granted : self._granted + self._roles.period]  # all targets that have a number to come
        waiting = {self._roles.target_of(number) for number in soon}
        for target in sorted(waiting):
            self._grants.append(self._wire.send_control([STOP], target, GRANT))
        self._posted.put(None)
        self._thread.join()
        for wait in self._grants:
            wait()

    def stats(self) -> QueueStats:
        """Counters so far."""
        return self._local.stats()

    def _grant(self) -> None:
        if self._granted >= len(self._numbers):
            return
        number = self._numbers[self._granted]
        target = self._roles.target_of(number)
        slot = self._slots[self._granted % len(self._slots)]
        receive = receive_states(
            self._wire, functools.partial(self._batches, number), target, self._shape, checksums=self._checksums, slot=slot
        )
        self._grants = [*self._grants[-len(self._slots) :], self._wire.send_control([number], target, GRANT)]
        self._posted.put((self._granted, receive))
        self._granted += 1

    def _receive(self) -> None:
        try:
            with on_device(self._wire.device):
                while (posted := self._posted.get()) is not None:
                    place, receive = posted
                    self._local.put(place, receive())
        except BaseException as error:  # noqa: BLE001 - it must reach the main thread, which waits in `get`
            self._local.fail("the receiving thread", error)


def _tensors(states: TargetStates) -> list[Tensor]:
    return [states.features] if states.final_hidden is None else [states.features, states.final_hidden]


def _header(batch: PackedBatch, tensors: list[Tensor], *, checksums: bool) -> list[int]:
    return [
        batch.index,
        batch.position.epoch,
        batch.position.batch,
        batch.num_tokens,
        _digest(batch),
        checksum(tensors) if checksums else 0,
    ]


def checksum(tensors: list[Tensor]) -> int:
    """CRC-32 of the bytes of all tensors. Copies them to the CPU: slow, for debugging."""
    value = 0
    for tensor in tensors:
        value = zlib.crc32(_bytes(tensor), value)
    return value


def _digest(batch: PackedBatch) -> int:
    """Samples, tokens and anchors of a batch as one signed 64-bit number."""
    hasher = hashlib.blake2b(repr(batch.sample_ids).encode("utf-8", "surrogatepass"), digest_size=8)
    for tensor in (batch.input_ids, batch.anchors):
        hasher.update(_bytes(tensor))
    return int.from_bytes(hasher.digest(), "little", signed=True)


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().view(torch.uint8).cpu().numpy()
