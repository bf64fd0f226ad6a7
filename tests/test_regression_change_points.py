"""Laws of the change points, of the secondary metrics, and of the alert about missing nights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from regression import secondary, simulate
from regression.change_points import find, noise, potts, segment, without_lone_outliers
from regression.watch import Night

START = datetime(2026, 3, 1, tzinfo=UTC)
NOISE = np.exp(np.random.default_rng(1).normal(size=60) * 0.005)


def nights(values: Sequence[float], series: str = "s") -> list[Night]:
    return [Night(series=series, time=START + timedelta(days=day), value=float(value)) for day, value in enumerate(values)]


def cost(values: np.ndarray, starts: Sequence[int], penalty: float) -> float:
    levels = itertools.pairwise([0, *starts, len(values)])
    return sum(float(np.var(values[low:high]) * (high - low)) for low, high in levels) + penalty * len(starts)


def all_segmentations(count: int) -> list[tuple[int, ...]]:
    """Every set of starts that leaves levels of at least three."""
    return [
        starts
        for size in range(count // 3)
        for starts in itertools.combinations(range(3, count - 2), size)
        if all(high - low >= 3 for low, high in itertools.pairwise([0, *starts, count]))
    ]


@given(st.lists(st.floats(-1, 1), min_size=6, max_size=12), st.floats(0.01, 2))
@settings(max_examples=60, deadline=None)
def test_the_fit_is_the_best_of_all_segmentations(values: list[float], penalty: float) -> None:
    array = np.array(values)
    found = potts(array, penalty)
    assert cost(array, found, penalty) <= min(cost(array, starts, penalty) for starts in all_segmentations(len(values))) + 1e-9
    assert all(high - low >= 3 for low, high in itertools.pairwise([0, *found, len(values)]))


def test_a_change_is_placed_at_its_night_with_both_levels() -> None:
    values = 100 * NOISE
    values[25:] *= 0.95
    values[45:] *= 1.10
    first, second = find(nights(values))
    assert [point.night.time for point in (first, second)] == [START + timedelta(days=day) for day in (25, 45)]
    assert (first.before, first.after) == (pytest.approx(100, rel=0.003), pytest.approx(95, rel=0.003))
    assert (first.change, second.change) == (pytest.approx(-0.05, abs=0.004), pytest.approx(0.10, abs=0.004))


def test_a_steady_series_and_a_lone_slow_night_have_no_change() -> None:
    values = 100 * NOISE
    assert find(nights(values)) == []
    values[30] *= 0.85
    assert find(nights(values)) == []


def test_invalid_nights_are_left_out() -> None:
    row = nights(100 * NOISE)
    row[20:40] = [replace(night, value=50.0, invalid=("throttled",)) for night in row[20:40]]
    assert find(row) == []


def test_a_short_series_has_none() -> None:
    assert segment([100.0] * 5 + [50.0] * 4) == []
    assert segment([100.0] * 5 + [50.0] * 5) == [5]


def test_several_series_are_refused() -> None:
    with pytest.raises(ValueError, match=r"nights of several series: \['a', 'b'\]"):
        find([*nights([1.0], "a"), *nights([1.0], "b")])


@given(st.floats(1e-3, 1e6), st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_order_unit_and_duplicates_do_not_matter(unit: float, random: object) -> None:
    values = np.concatenate((100 * NOISE, 96 * NOISE))
    expected = [point.night.time for point in find(nights(values))]
    row = nights(values * unit) * 2
    random.shuffle(row)  # type: ignore[attr-defined]
    assert expected == [START + timedelta(days=60)]
    assert [point.night.time for point in find(row)] == expected


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.6])
def test_noise_is_that_of_the_process_even_across_a_change(correlation: float) -> None:
    generator = np.random.default_rng(2)
    values = generator.normal(size=20000) * 0.02
    for night in range(1, len(values)):
        values[night] = correlation * values[night - 1] + math.sqrt(1 - correlation**2) * values[night]
    values[5000:] += 0.2
    assert noise(values) == (pytest.approx(0.02, rel=0.05), pytest.approx(correlation, abs=0.05))


def test_a_series_without_noise_has_the_noise_floor() -> None:
    assert noise(np.zeros(20)) == (0.003, 0.0)


def test_correlated_nights_need_more_evidence() -> None:
    series = simulate.throughputs(100, 120, np.random.default_rng(3), correlation=0.6)
    aware = sum(bool(segment(values)) for values in series)
    unaware = sum(bool(segment(values, correlated=False)) for values in series)
    assert aware < 20
    assert unaware > 2 * aware


def test_only_lone_outliers_are_replaced() -> None:
    values = np.array([0.0, 0.001, -0.001] * 5)
    values[7] = -0.1
    assert without_lone_outliers(values)[7] == pytest.approx(0.0, abs=0.001)
    values[7:10] = -0.1
    np.testing.assert_array_equal(without_lone_outliers(values), values)


def test_benjamini_and_hochberg_by_hand() -> None:
    p_values = {"memory": 0.001, "stall": 0.012, "queue": 0.014, "loss": 0.3, "warm-up": 0.9}
    # Largest k with p(k) <= 0.05 k / 5: 0.014 <= 0.03. Adjusted: min over the larger ones of 5 p(k) / k.
    found = secondary.discoveries(p_values)
    assert [discovery.metric for discovery in found] == ["memory", "stall", "queue"]
    assert [discovery.adjusted_p for discovery in found] == pytest.approx([0.005, 5 * 0.014 / 3, 5 * 0.014 / 3])
    assert secondary.discoveries({}) == []
    with pytest.raises(ValueError, match=r"no p values: .*nan"):
        secondary.discoveries({"x": math.nan})


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_discoveries_are_those_of_scipy(p_values: list[float]) -> None:
    adjusted = stats.false_discovery_control(p_values)
    expected = {str(number) for number, p in enumerate(adjusted) if p <= 0.05 - 1e-12}
    allowed = {str(number) for number, p in enumerate(adjusted) if p <= 0.05 + 1e-12}
    found = {discovery.metric for discovery in secondary.discoveries({str(number): p for number, p in enumerate(p_values)})}
    assert expected <= found <= allowed


def test_p_of_a_new_value_is_that_of_a_t_test_with_one_value_against_the_history() -> None:
    history = [10.0, 11.0, 9.5, 10.2, 10.4]
    t = (12.0 - np.mean(history)) / (np.std(history, ddof=1) * math.sqrt(1.2))
    assert secondary.p_of_change(12.0, history) == pytest.approx(2 * stats.t.sf(t, 4))
    assert secondary.p_of_change(1.0, [1.0] * 3) == 1.0
    assert secondary.p_of_change(2.0, [1.0] * 3) == 0.0
    with pytest.raises(ValueError, match="2 earlier values: expected at least 3"):
        secondary.p_of_change(1.0, [1.0, 2.0])


def test_a_missing_night_is_said_once_a_day() -> None:
    row = nights([100.0] * 3)
    after = row[-1].time
    assert secondary.missing_nights(row, now=after + timedelta(hours=36)) == []
    (alert,) = secondary.missing_nights(row, now=after + timedelta(hours=37))
    assert alert.sentence == "s: no valid night since 2026-03-03 00:00; nothing was measured after it"
    assert secondary.missing_nights(row, now=after + timedelta(hours=40), sent=[alert]) == []
    (again,) = secondary.missing_nights(row, now=after + timedelta(hours=49), sent=[alert])
    assert again.day == alert.day + timedelta(days=1)


def test_nights_that_are_all_invalid_are_missing_too() -> None:
    row = [replace(night, invalid=("GPU 3 was throttled",)) for night in nights([100.0] * 4)]
    assert secondary.missing_nights(row[:1], now=START + timedelta(hours=20)) == []
    (alert,) = secondary.missing_nights(row, now=row[-1].time)
    assert alert.sentence == "s: no valid night ever; the latest was INVALID: GPU 3 was throttled"
    one_valid = [replace(row[0], invalid=()), *row[1:]]
    assert "since 2026-03-01 00:00; the latest was INVALID" in secondary.missing_nights(one_valid, now=row[-1].time)[0].sentence


def test_each_series_is_missed_on_its_own() -> None:
    row = [*nights([1.0] * 9, "a"), *nights([1.0] * 3, "b")]
    assert [alert.series for alert in secondary.missing_nights(row, now=START + timedelta(days=8))] == ["b"]
