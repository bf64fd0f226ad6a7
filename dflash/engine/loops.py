"""What a target and a drafter worker do all day, whatever runs them: a thread of one process, or a process of its own.

A loop takes micro-batches from, or brings them to, something with the calls of `dflash.engine.queue.OrderedQueue`, keeps the
times of its worker, and says in `Doing` what it is at, for whoever looks from another thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from dflash import events
from dflash.batch import TargetStates

Kind = Literal["slow", "working", "waiting"]


@dataclass(kw_only=True)
class WorkerTimes:
    """What one worker did with its time. Written by that worker only; read after it ended or as a live estimate."""

    worker: str
    device: str
    items: int = 0
    tokens: int = 0
    busy_seconds: float = 0.0
    busy_square_seconds: float = 0.0  # sum over items of the square of the seconds of each: how far they spread
    finish_seconds: float = 0.0  # a lone drafter's at the ends of steps, which count as busy
    wait_seconds: float = 0.0  # target: queue full; drafter: queue empty
    sync_seconds: float = 0.0  # drafter: waiting for the others and for the leader


@dataclass(kw_only=True)
class Doing:
    """What a worker is at. Written by that worker only.

    `slow` work (loading, compiling, saving) takes as long as it takes; `working` is one micro-batch or one update of the
    weights; `waiting` ends when others have done something.
    """

    kind: Kind = "slow"
    text: str = "starting"
    since: float = field(default_factory=time.monotonic)
    times: WorkerTimes | None = None  # of this worker, once it works
    seconds: dict[Kind, float] = field(default_factory=lambda: {"slow": 0.0, "working": 0.0, "waiting": 0.0})  # until `since`

    def spent(self) -> dict[Kind, float]:
        """Seconds spent with each kind until now. From another thread, a change just now may be missing or counted twice."""
        return self.seconds | {self.kind: self.seconds[self.kind] + time.monotonic() - self.since}

    @contextlib.contextmanager
    def at(self, kind: Kind, text: str) -> Iterator[None]:
        """Be at `text` inside the block, and back at what it was before once it ends; after an exception `text` stays."""
        before = self.kind, self.text
        self._set(kind, text)
        yield
        self._set(*before)

    def _set(self, kind: Kind, text: str) -> None:
        now = time.monotonic()
        self.seconds[self.kind] += now - self.since
        self.kind, self.text, self.since = kind, text, now


class TargetWorker(Protocol):
    """Makes target states."""

    device: torch.device

    def produce(self, number: int) -> TargetStates:
        """The states of one micro-batch, complete (synchronized) on this worker's device."""


class DrafterWorker(Protocol):
    """Turns target states into gradients."""

    device: torch.device

    def accumulate(self, states: TargetStates) -> None:
        """Forward and backward of one micro-batch; a GPU may still be at it on return."""

    def settle(self) -> None:
        """Return when the device is done with all micro-batches."""


class Sink(Protocol):
    """The producers' side of the queue."""

    def claim(self) -> int | None:
        """The number of the micro-batch to make, or None at the end."""

    def put(self, number: int, item: TargetStates, /) -> None:
        """Hand it over."""


class Source(Protocol):
    """The consumers' side of the queue."""

    def get(self, *, before: int) -> TargetStates | None:
        """The next item with a number below `before`, or None."""


def target_loop(queue: Sink, times: WorkerTimes, worker: TargetWorker, doing: Doing) -> None:
    """Make micro-batches until the queue has no more numbers."""
    while True:
        with _timed(times, "wait_seconds"), doing.at("waiting", "waiting for room at the drafters"):
            number = queue.claim()
        if number is None:
            return
        with _on_an_item(times), doing.at("working", f"target states of micro-batch {number}"):
            with events.span("target.forward", number=number):
                states = worker.produce(number)
            times.tokens += states.batch.num_tokens
            queue.put(number, states)


def consume(queue: Source, times: WorkerTimes, worker: DrafterWorker, doing: Doing, *, before: int, meets_others: bool) -> None:
    """Take micro-batches until the optimizer step has all of its own. With others to meet, the device is done with them, too."""
    while True:
        with _timed(times, "wait_seconds"), doing.at("waiting", f"waiting for a micro-batch before {before}"):
            states = queue.get(before=before)
        if states is None:
            break
        number = states.batch.index
        with _on_an_item(times), doing.at("working", f"gradients of micro-batch {number}"):
            with events.span("drafter.accumulate", number=number):
                worker.accumulate(states)
            times.tokens += states.batch.num_tokens
    if meets_others:
        with _timed(times, "busy_seconds"), doing.at("working", f"gradients of micro-batches before {before}"):
            worker.settle()


@contextlib.contextmanager
def finishing(times: WorkerTimes, *, meets_others: bool) -> Iterator[None]:
    """Count the block as time in which a drafter waits for the others, or works, where there are none."""
    busy = times.busy_seconds
    with _timed(times, "sync_seconds" if meets_others else "busy_seconds"):
        yield
    times.finish_seconds += times.busy_seconds - busy


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """A GPU worker gets its device and a stream of its own, so that workers sharing a GPU overlap."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]  # torch does not annotate it
        yield


@contextlib.contextmanager
def _timed(times: WorkerTimes, field_name: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        setattr(times, field_name, getattr(times, field_name) + time.perf_counter() - started)


@contextlib.contextmanager
def _on_an_item(times: WorkerTimes) -> Iterator[None]:
    """Count the block as work on one micro-batch."""
    before = times.busy_seconds
    with _timed(times, "busy_seconds"):
        yield
    times.items += 1
    times.busy_square_seconds += (times.busy_seconds - before) ** 2
