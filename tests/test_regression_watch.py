"""Laws of the night watch and of accepting a change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from regression import acceptance, watch
from regression.acceptance import Acceptance, accept, mark
from regression.verdict import Kind
from regression.watch import Night, median_and_limit, replay

START = datetime(2026, 3, 1, tzinfo=UTC)
STEADY = [100.0, 101.0, 99.0, 100.5, 99.5, 100.2, 99.8, 100.0, 101.0, 99.0]  # median 100, MAD 0.5
VALUES = st.lists(st.floats(80, 120), min_size=1, max_size=45)


def nights(values: Sequence[float], series: str = "s", first: int = 0) -> list[Night]:
    return [Night(series=series, time=START + timedelta(days=first + day), value=value) for day, value in enumerate(values)]


def kinds(values: Sequence[float]) -> list[Kind]:
    return [verdict.kind for verdict in replay(nights(values))]


def last(values: Sequence[float]) -> Kind:
    return kinds(values)[-1]


def test_the_limit_is_three_robust_standard_deviations_of_a_new_night_below_the_median() -> None:
    middle, limit = median_and_limit(STEADY)
    spread = stats.median_abs_deviation(STEADY, scale=1 / 1.4826)
    assert (middle, spread) == pytest.approx((100.0, 0.7413))
    assert limit == pytest.approx(100 - 3 * 0.7413 * math.sqrt(1.1))  # 97.67


def test_a_quiet_series_still_may_fall_by_two_percent() -> None:
    assert median_and_limit([50.0] * 20) == (50.0, 49.0)


def test_the_noise_floor_alone_would_allow_less_than_two_percent() -> None:
    assert 3 * watch.NOISE_FLOOR * math.sqrt(1 + 1 / watch.FEW_NIGHTS) < watch.MIN_DROP


def test_under_ten_nights_only_five_percent_count_and_that_is_said() -> None:
    verdict = replay(nights([*STEADY[:9], 95.5]))[-1]
    assert (verdict.kind, verdict.limit, verdict.provisional) == (Kind.PASS, pytest.approx(95.0), True)
    assert "provisional" in verdict.sentence
    assert last([*STEADY[:9], 94.9]) is Kind.SUSPECT
    assert replay(nights([*STEADY, 95.5]))[-1].kind is Kind.SUSPECT
    assert not replay(nights([*STEADY, 95.5]))[-1].provisional


def test_the_first_night_is_not_a_pass() -> None:
    verdict = replay(nights([100.0]))[0]
    assert (verdict.kind, verdict.kind.exit_code) == (Kind.INSUFFICIENT, 3)
    assert "the first valid night" in verdict.sentence


def test_the_second_valid_night_in_a_row_fails() -> None:
    assert kinds([*STEADY, 90.0, 90.0])[-2:] == [Kind.SUSPECT, Kind.FAIL]
    assert kinds([*STEADY, 90.0, 100.0, 90.0])[-3:] == [Kind.SUSPECT, Kind.PASS, Kind.SUSPECT]


def test_an_invalid_night_neither_breaks_a_row_nor_counts() -> None:
    row = nights([*STEADY, 90.0, 55.0, 90.0])
    row[-2] = replace(row[-2], value=None, invalid=("GPU 3 was throttled", "a foreign process"))
    verdicts = replay(row)
    assert [verdict.kind for verdict in verdicts[-3:]] == [Kind.SUSPECT, Kind.INVALID, Kind.FAIL]
    assert verdicts[-2].sentence == "INVALID: GPU 3 was throttled; a foreign process"
    assert verdicts[-2].kind.exit_code == 3
    invalid = [replace(night, invalid=("shared machine",)) for night in nights([50.0] * 40, first=10)]
    assert replay([*nights(STEADY), *invalid, *nights([99.0], first=50)])[-1].median == 100.0


def test_a_regression_stays_red_until_it_is_accepted() -> None:
    fallen = nights([*(STEADY * 3), *(value * 0.9 for value in STEADY * 6)])
    verdicts = replay(fallen)
    assert verdicts[30].kind is Kind.SUSPECT
    assert {verdict.kind for verdict in verdicts[31:]} == {Kind.FAIL}
    assert {verdict.median for verdict in verdicts[31:]} == {100.0}
    record = accept(fallen, reason="attention is exact now", author="me", time=START + timedelta(days=99))
    assert record.since == fallen[30].time
    again = replay(mark(fallen, [record]))
    assert again[30].kind is Kind.INSUFFICIENT
    assert "attention is exact now" in again[30].sentence
    assert {verdict.kind for verdict in again[31:]} == {Kind.PASS}
    assert again[-1].median == 90.0


def test_a_lone_slow_night_stays_in_the_reference_as_noise_does() -> None:
    assert [verdict.nights for verdict in replay(nights([*STEADY, 90.0, 100.0, 100.0]))[-3:]] == [10, 11, 12]


def test_a_failure_leaves_the_reference_together_with_the_suspect_that_began_it() -> None:
    assert [verdict.nights for verdict in replay(nights([*STEADY, 90.0, 90.0, 90.0, 100.0, 100.0]))[-5:]] == [10, 11, 10, 10, 11]


@pytest.mark.parametrize("unit", [1.0, 0.7, 1 / 3, 1 / 9])  # a ninth is rounded to the other side
def test_a_tie_with_the_limit_is_no_fall_in_any_unit(unit: float) -> None:
    assert last([value * unit for value in [50.0] * 20 + [49.0]]) is Kind.PASS


def test_only_the_last_thirty_nights_count() -> None:
    verdict = replay(nights([200.0] * 10 + [200 - 0.25 * day for day in range(60)]))[-1]
    assert verdict.nights == 30
    assert verdict.median == pytest.approx(200 - 0.25 * 43.5)


@pytest.mark.parametrize(
    ("gate", "kind", "then"),
    [
        (None, Kind.SUSPECT, Kind.FAIL),
        (Kind.FAIL, Kind.FAIL, Kind.FAIL),
        (Kind.PASS, Kind.CLEARED, Kind.SUSPECT),
        (Kind.WIN, Kind.CLEARED, Kind.SUSPECT),
        (Kind.INSUFFICIENT, Kind.SUSPECT, Kind.FAIL),
    ],
)
def test_the_gate_of_the_same_night_decides(gate: Kind | None, kind: Kind, then: Kind) -> None:
    row = nights([*STEADY, 90.0, 90.0])
    assert replay(row[:-1])[-1].wants_gate
    row[-2] = replace(row[-2], gate=gate)
    verdicts = replay(row)
    assert [verdict.kind for verdict in verdicts[-2:]] == [kind, then]
    assert verdicts[-2].wants_gate == (gate is None)
    assert (verdicts[-2].kind.exit_code == 0) == (kind is Kind.CLEARED)


def test_a_gate_says_nothing_about_a_night_above_the_limit() -> None:
    assert replay([*nights(STEADY), replace(nights([100.0], first=10)[0], gate=Kind.FAIL)])[-1].kind is Kind.PASS


def test_the_sentence_says_by_how_much_and_against_what() -> None:
    assert replay(nights([*STEADY, 90.0]))[-1].sentence == (
        "SUSPECT: -10.0% to the median of 10 nights (limit -2.3%); gate: not run, one more such night fails"
    )


@pytest.mark.parametrize("value", [None, 0.0, -3.0, math.nan, math.inf])
def test_a_night_without_a_throughput_needs_a_reason(value: float | None) -> None:
    with pytest.raises(ValueError, match="expected a positive number"):
        Night(series="s", time=START, value=value)
    assert Night(series="s", time=START, value=value, invalid=("no result",)).invalid


def test_a_time_needs_a_zone() -> None:
    with pytest.raises(ValueError, match="without a time zone"):
        Night(series="s", time=datetime(2026, 3, 1), value=1.0)  # noqa: DTZ001 - what is refused


def test_series_are_judged_apart() -> None:
    mixed = [*nights([*STEADY, 90.0], "a"), *nights([*STEADY, 100.0], "b")]
    assert {series: verdict.kind for series, verdict in watch.decide(mixed).items()} == {"a": Kind.SUSPECT, "b": Kind.PASS}
    with pytest.raises(ValueError, match=r"nights of several series: \['a', 'b'\]"):
        replay(mixed)


@given(VALUES, st.randoms(use_true_random=False), st.floats(1e-6, 1e6), st.sets(st.integers(0, 44)))
@settings(max_examples=150)
def test_order_unit_and_duplicates_do_not_matter(values: list[float], random: object, unit: float, invalid: set[int]) -> None:
    row = [replace(night, invalid=("busy",)) if day in invalid else night for day, night in enumerate(nights(values))]
    verdicts = replay(row)
    shuffled = [*row, *row[::3]]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert replay(shuffled) == verdicts
    scaled = replay([replace(night, value=(night.value or 0) * unit) for night in row])
    assert [verdict.kind for verdict in scaled] == [verdict.kind for verdict in verdicts]


@given(VALUES, st.floats(0, 30), st.sampled_from([None, Kind.PASS, Kind.FAIL]))
def test_a_faster_night_never_turns_pass_into_fail(values: list[float], gain: float, gate: Kind | None) -> None:
    row = nights([*STEADY, *values])
    rank = [Kind.FAIL, Kind.SUSPECT, Kind.CLEARED, Kind.PASS]
    slower, faster = (replay([*row[:-1], replace(row[-1], value=values[-1] + more, gate=gate)])[-1].kind for more in (0, gain))
    assert rank.index(faster) >= rank.index(slower)


def test_a_win_can_be_accepted_from_its_first_night() -> None:
    row = nights([*STEADY, 120.0, 121.0])
    assert accept(row, reason="fused", author="me", time=START).since == row[-1].time
    assert accept(row, reason="fused", author="me", time=START, since=row[-2].time).since == row[-2].time


@pytest.mark.parametrize(
    ("row", "reason", "since", "message"),
    [
        (nights([100.0]), " ", None, "needs a reason"),
        ([], "x", None, "no valid night"),
        ([replace(nights([1.0])[0], invalid=("busy",))], "x", None, "no valid night"),
        (nights([100.0]), "x", START + timedelta(days=1), "after the last valid night"),
    ],
)
def test_what_cannot_be_accepted_is_said(row: list[Night], reason: str, since: datetime | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        accept(row, reason=reason, author="me", time=START, since=since)


def test_an_acceptance_marks_the_first_valid_night_of_its_own_series() -> None:
    row = [*nights([1.0, 1.0, 1.0], "a"), *nights([1.0, 1.0, 1.0], "b")]
    row[4] = replace(row[4], invalid=("busy",))
    record = Acceptance(series="b", since=row[4].time, time=START, reason="first", author="me")
    later = replace(record, time=START + timedelta(days=1), reason="second")
    marked = mark(row, [later, record])
    assert {(night.series, night.time): night.accepted for night in marked if night.accepted} == {("b", row[5].time): "second"}
    assert mark(row, [replace(record, since=START + timedelta(days=9))]) == sorted(row, key=watch.chronological)


class Memory:
    """A history without files."""

    def __init__(self, kept: list[Night]) -> None:
        self.kept, self.records = kept, list[Acceptance]()

    def nights(self, series: str) -> list[Night]:
        return mark([night for night in self.kept if night.series == series], self.records)

    def append(self, record: Acceptance) -> None:
        self.records.append(record)


def test_the_command_records_what_turns_the_next_night_green(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    store = Memory(nights([*STEADY, 90.0, 90.0, 90.5]))
    assert watch.decide(store.nights("s"))["s"].kind is Kind.FAIL
    command = ["accept", "s", "--reason", "exact attention", "--store", str(tmp_path)]
    assert acceptance.main(command, lambda _path: store) == 0
    assert "a new level since 2026-03-11T00:00:00+00:00 (exact attention)" in capsys.readouterr().out
    assert watch.decide(store.nights("s"))["s"].kind is Kind.PASS
    assert acceptance.main([*command, "--since", "2030-01-01"], lambda _path: store) == 2
    assert "after the last valid night" in capsys.readouterr().err
    assert acceptance.main(["accept", "t", *command[2:]], lambda _path: store) == 2
    assert "no night of the series 't'" in capsys.readouterr().err
    assert len(store.records) == 1
