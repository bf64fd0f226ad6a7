"""A drafter's queue where its own process reads the target states: the calls of `dflash.engine.transport.ReceivingQueue`.

One thread reads what comes next while the drafter works, at most `slots` micro-batches ahead.
"""

from __future__ import annotations

import threading

from dflash.batch import TargetStates
from dflash.engine.loops import TargetWorker
from dflash.engine.queue import OrderedQueue, QueueStats


class ReadingQueue:
    """The micro-batches of one drafter, in the order of their numbers."""

    def __init__(self, reader: TargetWorker, *, numbers: range, slots: int) -> None:
        self._reader, self._numbers = reader, numbers
        self._local: OrderedQueue[TargetStates] = OrderedQueue(capacity=slots, first=0, end=len(numbers))
        self._thread = threading.Thread(target=self._read, name="read", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def get(self, *, before: int) -> TargetStates | None:
        """The next item with a number below `before`, or None. Raises WorkerFailed when reading failed."""
        mine = len(range(self._numbers.start, min(before, self._numbers.stop), self._numbers.step))
        return self._local.get(before=mine)

    def close(self) -> None:
        """Drop what was read ahead, and end the thread."""
        self._local.stop()
        self._thread.join()

    def stats(self) -> QueueStats:
        """Counters so far."""
        return self._local.stats()

    def _read(self) -> None:
        try:
            while (place := self._local.claim()) is not None:
                self._local.put(place, self._reader.produce(self._numbers[place]))
        except BaseException as error:  # noqa: BLE001 - it must reach the main thread, which waits in `get`
            self._local.fail("the reading thread", error)
