from dflash.engine.waits import WaitsMeter, waited_for

WORKERS = ["rank 0 (drafter-0)", "rank 1 (drafter-1)", "rank 2 (target-0)"]


def spent(*rows: tuple[float, float]) -> list[dict[str, float] | None]:
    return [{"slow": 1.0, "working": working, "waiting": waiting} for working, waiting in rows]


def test_the_one_that_waits_least_by_far_is_waited_for() -> None:
    assert waited_for({"a": 0.9, "b": 0.02, "c": 0.4}) == "b"


def test_nobody_is_waited_for_where_two_wait_equally_little_or_one_is_alone() -> None:
    assert waited_for({"a": 0.1, "b": 0.02, "c": 0.9}) is None
    assert waited_for({"a": 0.0}) is None


def test_a_stretch_counts_from_the_end_of_the_one_before() -> None:
    meter = WaitsMeter(WORKERS, least_seconds=1.0)
    assert meter.stretch(spent((0, 9), (0, 9), (9, 0))) is None  # the beginning
    first = meter.stretch(spent((1, 10), (1, 10), (11, 0)))
    assert first is not None
    assert first.waiting == {WORKERS[0]: 0.5, WORKERS[1]: 0.5, WORKERS[2]: 0.0}
    second = meter.stretch(spent((5, 10), (5, 10), (11, 4)))
    assert second is not None
    assert second.waiting == {WORKERS[0]: 0.0, WORKERS[1]: 0.0, WORKERS[2]: 1.0}
    assert (first.waited_for, second.waited_for) == (WORKERS[2], None)


def test_a_stretch_that_is_short_on_one_rank_grows() -> None:
    meter = WaitsMeter(WORKERS, least_seconds=1.0)
    meter.stretch(spent((0, 0), (0, 0), (0, 0)))
    assert meter.stretch(spent((4, 0), (4, 0), (0, 0.5))) is None
    assert meter.stretch([*spent((6, 0), (6, 0)), None]) is None
    grown = meter.stretch(spent((8, 0), (8, 0), (0, 8)))
    assert grown is not None
    assert grown.waiting[WORKERS[2]] == 1.0
