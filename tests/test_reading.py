"""The queue of a drafter that reads its own states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash.engine.queue import WorkerFailed
from dflash.engine.reading import ReadingQueue


class Reader:
    """States that are their numbers."""

    device = torch.device("cpu")

    def __init__(self, broken: int | None = None) -> None:
        self.broken, self.read = broken, list[int]()

    def produce(self, number: int) -> Any:
        if number == self.broken:
            raise OSError("the disk is gone")
        self.read.append(number)
        return SimpleNamespace(index=number)


def taken(queue: ReadingQueue, *, before: int) -> list[int]:
    found = []
    while (states := queue.get(before=before)) is not None:
        found.append(states.index)  # type: ignore[attr-defined]  # Reader makes them
    return found


def test_a_drafter_gets_its_own_numbers_in_order_and_no_more_than_the_step_has() -> None:
    queue = ReadingQueue(Reader(), numbers=range(4, 20, 3), slots=2)
    queue.start()
    assert taken(queue, before=8) == [4, 7]
    assert taken(queue, before=8) == []
    assert taken(queue, before=100) == [10, 13, 16, 19]
    queue.close()
    assert queue.stats().delivered == 6


def test_a_run_that_ends_early_reads_no_further_than_the_slots() -> None:
    reader = Reader()
    queue = ReadingQueue(reader, numbers=range(100), slots=3)
    queue.start()
    assert taken(queue, before=2) == [0, 1]
    queue.close()
    assert len(reader.read) <= 2 + 3


def test_what_fails_while_reading_reaches_the_drafter() -> None:
    queue = ReadingQueue(Reader(broken=2), numbers=range(4), slots=1)
    queue.start()
    with pytest.raises(WorkerFailed, match="the reading thread failed: OSError: the disk is gone"):
        taken(queue, before=4)
