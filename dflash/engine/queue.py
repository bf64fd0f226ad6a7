"""The queue between target and drafter workers: bounded, in order, and the one road for items, end of stream and failure.

Invariants:
- Micro-batches are numbered. A producer claims the next number, makes that item, puts it. Consumers receive the items in the
  order of the numbers, each exactly once, whatever the order in which producers finish.
- A number can be claimed only when fewer than `capacity` items are claimed or waiting ahead of the consumers, so memory is
  bounded, and the item that the consumers need next is never the one that has to wait: no cycle, no deadlock.
- After `fail` or `stop` every waiting and later call returns at once: `fail` raises `WorkerFailed` in all of them.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


class WorkerFailed(RuntimeError):
    """A worker of this run failed; `__cause__` is its exception, `worker` its name."""

    def __init__(self, worker: str, error: BaseException) -> None:
        super().__init__(f"{worker} failed: {type(error).__name__}: {error}")
        self.worker = worker
        self.__cause__ = error


@dataclass(frozen=True, kw_only=True)
class QueueStats:
    """What the queue has seen so far."""

    delivered: int
    claim_wait_seconds: float  # producers stood still: the queue was full
    get_wait_seconds: float  # consumers stood still: nothing was ready
    mean_occupancy: float  # items ready when a consumer came, as a part of the capacity


class OrderedQueue(Generic[Item]):
    """Numbered items from any number of producers to any number of consumers."""

    def __init__(self, *, capacity: int, first: int, end: int) -> None:
        """Items carry the numbers `first` to `end - 1`; at most `capacity` of them exist at one time."""
        if capacity < 1:
            raise ValueError(f"queue capacity is {capacity}: use at least 1")
        self._capacity = capacity
        self._end = end
        self._next_claim = first
        self._next_delivery = first
        self._ready: dict[int, Item] = {}
        self._failure: WorkerFailed | None = None
        self._stopped = False
        self._changed = threading.Condition()
        self._claim_wait_seconds = 0.0
        self._get_wait_seconds = 0.0
        self._occupancy_sum = 0.0
        self._delivered = 0

    def claim(self) -> int | None:
        """The number of the item that the calling producer shall make, or None at the end of the stream."""
        with self._changed:
            started = time.perf_counter()
            while not self._over() and self._next_claim < self._end and self._is_full():
                self._changed.wait()
            self._claim_wait_seconds += time.perf_counter() - started
            if self._over() or self._next_claim >= self._end:
                return None
            self._next_claim += 1
            return self._next_claim - 1

    def put(self, number: int, item: Item) -> None:
        """Hand over the item with a claimed number. Never blocks."""
        with self._changed:
            self._ready[number] = item
            self._changed.notify_all()

    def get(self, *, before: int) -> Item | None:
        """The next item, or None when its number is not below `before`, at the end, and after `stop`."""
        with self._changed:
            started = time.perf_counter()
            while not self._over() and self._next_delivery < min(before, self._end) and self._next_delivery not in self._ready:
                self._changed.wait()
            self._get_wait_seconds += time.perf_counter() - started
            if self._over() or self._next_delivery >= min(before, self._end):
                return None
            self._occupancy_sum += len(self._ready) / self._capacity
            self._delivered += 1
            item = self._ready.pop(self._next_delivery)
            self._next_delivery += 1
            self._changed.notify_all()
            return item

    def fail(self, worker: str, error: BaseException) -> None:
        """Stop everybody because `worker` met `error`. The first failure is the one that is told."""
        with self._changed:
            if self._failure is None and not isinstance(error, WorkerFailed):
                self._failure = WorkerFailed(worker, error)
            self._changed.notify_all()

    def stop(self) -> None:
        """End the stream early, without an error; items that were not delivered are dropped."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @property
    def failure(self) -> WorkerFailed | None:
        """The first failure, if any."""
        with self._changed:
            return self._failure

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        with self._changed:
            return self._stopped

    def stats(self) -> QueueStats:
        """Counters so far."""
        with self._changed:
            return QueueStats(
                delivered=self._delivered,
                claim_wait_seconds=self._claim_wait_seconds,
                get_wait_seconds=self._get_wait_seconds,
                mean_occupancy=self._occupancy_sum / self._delivered if self._delivered else 0.0,
            )

    def _is_full(self) -> bool:
        return self._next_claim - self._next_delivery >= self._capacity

    def _over(self) -> bool:
        if self._failure is not None:
            raise self._failure
        return self._stopped
