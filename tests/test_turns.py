import threading

import pytest

from dflash.turns import Turns


def start(body: object) -> threading.Thread:
    thread = threading.Thread(target=body)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_many_work_together() -> None:
    turns, both = Turns(), threading.Barrier(2, timeout=60)

    def work() -> None:
        with turns.together():
            both.wait()

    for thread in [start(work), start(work)]:
        thread.join(60)
    assert not both.broken


def test_one_alone_keeps_all_others_out_and_counts_are_never_mixed() -> None:
    turns, inside, worst = Turns(), [0, 0], [0]
    lock = threading.Lock()

    def enter(kind: int) -> None:
        with lock:
            inside[kind] += 1
            if inside[1] > 1 or (inside[0] and inside[1]):
                worst[0] += 1
        with lock:
            inside[kind] -= 1

    def work() -> None:
        for number in range(300):
            alone = number % 3 == 0
            with turns.alone() if alone else turns.together():
                enter(int(alone))

    for thread in [start(work) for _ in range(4)]:
        thread.join(60)
    assert worst == [0]
    assert inside == [0, 0]


def test_who_waits_to_be_alone_goes_before_who_comes_later() -> None:
    turns, order = Turns(), []

    def alone() -> None:
        with turns.alone():
            order.append("alone")

    def together() -> None:
        with turns.together():
            order.append("together")

    with turns.together():
        first = start(alone)
        while not turns._want_alone:  # a look, not a race: the thread is sure to come
            pass
        second = start(together)
    first.join(60)
    second.join(60)
    assert order == ["alone", "together"]


def test_an_exception_gives_the_turn_back() -> None:
    turns = Turns()
    for turn in (turns.alone, turns.together):
        with pytest.raises(ValueError, match="failed inside"), turn():
            raise ValueError("failed inside")
    with turns.alone():
        pass
