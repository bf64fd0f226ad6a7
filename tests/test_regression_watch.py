"""Laws of the night watch and of accepting a change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
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


def test_under_ten_quiet_nights_only_five_percent_count_and_that_is_said() -> None:
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
    assert [verdict.nights for verdict in replay(nights([*STEADY, 90.0, 100.0, 100.0]))[-3:]] == [10, 10, 12]


def test_a_suspect_does_not_soften_the_limit_that_its_confirmation_is_judged_by() -> None:
    assert kinds([100.0, 100.0, 100.0, 90.0, 94.0])[3:] == [Kind.SUSPECT, Kind.FAIL]
    assert kinds([100.0, 100.0, 100.0, 90.0, 96.0])[3:] == [Kind.SUSPECT, Kind.PASS]


def test_under_ten_nights_the_limit_is_as_wide_as_the_spread_seen_asks_for() -> None:
    noisy = [100.0, 92.0, 108.0, 97.0, 103.0]
    middle, limit = median_and_limit(noisy)
    reach = stats.t.ppf(0.99, 4) * np.std(noisy, ddof=1) * math.sqrt(1.2)
    assert (middle, limit) == (100.0, pytest.approx(100.0 - reach))
    assert last([*noisy, 80.0]) is Kind.PASS


def test_a_fall_never_fails_by_one_or_two_nights_and_never_becomes_the_reference() -> None:
    assert set(kinds([100.0, *[90.0] * 9])[1:]) == {Kind.SUSPECT}
    assert {verdict.median for verdict in replay(nights([100.0, 101.0, *[90.0] * 9]))[2:]} == {100.5}
    verdict = replay(nights([100.0, 90.0]))[-1]
    assert "no fall fails by fewer than 3 nights" in verdict.sentence
    assert kinds([100.0, 101.0, 99.0, 90.0, 90.0])[3:] == [Kind.SUSPECT, Kind.FAIL]


def controlled(values: Sequence[float], controls: Sequence[float]) -> list[Night]:
    """Two control workloads in different units; the second is twice the first."""
    row = zip(nights(values), controls, strict=True)
    return [replace(night, controls=(("copy", speed), ("matmul", 2 * speed))) for night, speed in row]


@pytest.mark.parametrize(
    ("value", "speed", "kind"),
    [
        (90.0, 5.0, Kind.SUSPECT),  # the controls stood still
        (90.0, 4.5, Kind.HARDWARE),  # they explain all of it
        (90.0, 4.52, Kind.HARDWARE),
        (80.0, 4.5, Kind.SUSPECT),  # half of it
        (100.0, 5.6, Kind.HARDWARE),  # a faster machine may hide a fall
        (90.0, 5.6, Kind.SUSPECT),
        (100.0, 5.0, Kind.PASS),
        (120.0, 6.0, Kind.PASS),
    ],
)
def test_only_a_fall_that_is_left_after_the_controls_correction_is_suspect(value: float, speed: float, kind: Kind) -> None:
    verdict = replay(controlled([*STEADY, value], [5.0] * 10 + [speed]))[-1]
    assert verdict.kind is kind
    assert verdict.wants_gate == (kind is not Kind.PASS)
    assert verdict.kind.exit_code == (0 if kind is Kind.PASS else 3)


def test_a_night_that_the_machine_explains_says_so_and_neither_breaks_a_row_nor_counts() -> None:
    row = controlled([*STEADY, 90.0, 90.0, 90.0, 100.0], [5.0] * 11 + [4.5, 5.0, 5.0])
    verdicts = replay(row)
    assert [verdict.kind for verdict in verdicts[10:]] == [Kind.SUSPECT, Kind.HARDWARE, Kind.FAIL, Kind.PASS]
    assert verdicts[-1].nights == 10
    assert verdicts[11].sentence == (
        "HARDWARE: -10.0% to the median of 10 nights (limit -2.3%), +0.0% (limit -2.3%) corrected for the control workloads' "
        "-10.0%; the machine changed, so the code can be neither blamed nor cleared: measure again, or compare in pairs"
    )


def test_a_machine_that_stays_slow_never_fails_and_can_be_accepted() -> None:
    row = controlled([*STEADY, *[90.0] * 5], [5.0] * 10 + [4.5] * 5)
    assert {verdict.kind for verdict in replay(row)[10:]} == {Kind.HARDWARE}
    assert accept(row, reason="a slower machine", author="me", time=START).since == row[10].time


@pytest.mark.parametrize(("gate", "kind"), [(Kind.FAIL, Kind.FAIL), (Kind.PASS, Kind.CLEARED), (Kind.UNKNOWN, Kind.HARDWARE)])
def test_the_gate_decides_where_throughput_and_controls_disagree(gate: Kind, kind: Kind) -> None:
    row = controlled([*STEADY, 90.0], [5.0] * 10 + [4.5])
    assert replay([*row[:-1], replace(row[-1], gate=gate)])[-1].kind is kind


def test_other_controls_correct_nothing() -> None:
    row = controlled([*STEADY, 90.0], [5.0] * 10 + [4.5])
    for controls in ((), (("copy", 4.5),), (("copy", 4.5), ("other", 9.0))):
        verdict = replay([*row[:-1], replace(row[-1], controls=controls)])[-1]
        assert (verdict.kind, verdict.corrected) == (Kind.SUSPECT, None)
        assert "without control workloads to correct by" in verdict.sentence


def test_noisy_controls_widen_the_corrected_limit() -> None:
    verdict = replay(controlled([*STEADY, 90.0], [5.0, 5.5, 4.5, 5.2, 4.8, 5.4, 4.6, 5.0, 5.3, 4.7, 5.0]))[-1]
    assert verdict.corrected is not None
    assert verdict.corrected.limit < -0.1
    assert verdict.kind is Kind.HARDWARE


def test_a_recorded_baseline_is_the_level_whatever_its_nights_look_like() -> None:
    recorded = [replace(night, recorded=True) for night in nights([100.0, 90.0, 91.0, 102.0, 98.0], first=10)]
    verdicts = replay([*nights([200.0] * 10), *recorded, *nights([97.0], first=15)])
    assert {verdict.kind for verdict in verdicts[11:]} == {Kind.PASS}
    assert (verdicts[-1].nights, verdicts[-1].median) == (5, 98.0)


def test_a_failure_leaves_the_reference_together_with_the_suspect_that_began_it() -> None:
    assert [verdict.nights for verdict in replay(nights([*STEADY, 90.0, 90.0, 90.0, 100.0, 100.0]))[-5:]] == [10, 10, 10, 10, 11]


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
        "SUSPECT: -10.0% to the median of 10 nights (limit -2.3%), without control workloads to correct by; gate: not run, "
        "one more such night fails"
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
