import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.engine.queue import OrderedQueue, WorkerFailed


def produce(queue: OrderedQueue[int], claimed: list[int]) -> None:
    while (number := queue.claim()) is not None:
        claimed.append(number)
        queue.put(number, number)


@given(producers=st.integers(1, 4), consumers=st.integers(1, 4), capacity=st.integers(1, 5), count=st.integers(0, 40))
@settings(max_examples=40, deadline=None)
def test_every_item_is_delivered_once_and_in_order(producers: int, consumers: int, capacity: int, count: int) -> None:
    queue: OrderedQueue[int] = OrderedQueue(capacity=capacity, first=0, end=count)
    received: list[int] = []
    lock = threading.Lock()

    def consume() -> None:
        while True:
            with lock:  # the order of delivery is the order of the calls to get
                item = queue.get(before=count)
                if item is None:
                    return
                received.append(item)

    threads = [threading.Thread(target=produce, args=(queue, [])) for _ in range(producers)]
    threads += [threading.Thread(target=consume) for _ in range(consumers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    assert received == list(range(count))


def test_no_more_than_capacity_items_exist_ahead_of_the_consumers() -> None:
    queue: OrderedQueue[int] = OrderedQueue(capacity=3, first=0, end=100)
    claimed: list[int] = []
    thread = threading.Thread(target=produce, args=(queue, claimed))
    thread.start()
    for expected in range(100):
        assert queue.get(before=100) == expected
        assert len(claimed) <= expected + 1 + 3 + 1  # the producer may claim one more before the list is looked at
    thread.join(timeout=20)
    assert queue.stats().delivered == 100


def test_the_next_needed_item_is_never_held_back_by_later_ones() -> None:
    queue: OrderedQueue[str] = OrderedQueue(capacity=2, first=0, end=10)
    first, second = queue.claim(), queue.claim()
    assert (first, second) == (0, 1)
    queue.put(1, "later")
    received: list[str | None] = []
    consumer = threading.Thread(target=lambda: received.append(queue.get(before=10)))
    consumer.start()
    queue.put(0, "first")
    consumer.join(timeout=20)
    assert received == ["first"]


def test_get_stops_at_the_border_of_a_step() -> None:
    queue: OrderedQueue[int] = OrderedQueue(capacity=4, first=0, end=4)
    produce(queue, [])
    assert [queue.get(before=2) for _ in range(3)] == [0, 1, None]
    assert [queue.get(before=4) for _ in range(3)] == [2, 3, None]


def test_a_failure_wakes_everyone_and_keeps_its_cause() -> None:
    queue: OrderedQueue[int] = OrderedQueue(capacity=1, first=0, end=10)
    errors: list[BaseException] = []

    def wait(call: object) -> None:
        try:
            call()  # type: ignore[operator]  # a bound method
        except WorkerFailed as failure:
            errors.append(failure)

    queue.claim()  # full now
    threads = [threading.Thread(target=wait, args=(call,)) for call in (queue.claim, lambda: queue.get(before=10))]
    for thread in threads:
        thread.start()
    cause = ValueError("broken row")
    queue.fail("target-3", cause)
    queue.fail("drafter-0", RuntimeError("second"))
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    assert [error.__cause__ for error in errors] == [cause, cause]
    assert queue.failure is not None
    assert queue.failure.worker == "target-3"


def test_stop_ends_the_stream_without_an_error() -> None:
    queue: OrderedQueue[int] = OrderedQueue(capacity=2, first=0, end=10)
    queue.put(queue.claim() or 0, 0)
    queue.stop()
    assert queue.claim() is None
    assert queue.get(before=10) is None
    assert queue.stopped


def test_a_queue_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        OrderedQueue(capacity=0, first=0, end=1)
