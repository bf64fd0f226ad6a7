"""Laws of the paired gate."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from regression import gate
from regression.gate import DEFAULT, Pair, Rule, Verdict
from regression.verdict import Kind

RATIOS = st.lists(st.floats(0.9, 1.1), min_size=8, max_size=16)
CLOSE_RATIOS = st.lists(st.floats(0.975, 0.99), min_size=8, max_size=16)  # where PASS and FAIL meet


def pairs(ratios: list[float], baseline: float = 100.0) -> list[Pair]:
    return [Pair(number=number, baseline=baseline, candidate=baseline * ratio) for number, ratio in enumerate(ratios, start=1)]


def spread(loss: float, sd: float, count: int = 8) -> list[float]:
    """Ratios whose logarithms have exactly the mean ln(1 - loss) and the standard deviation `sd` (divisor n - 1)."""
    half = sd * math.sqrt((count - 1) / count)
    return [(1 - loss) * math.exp(half if number % 2 else -half) for number in range(count)]


def feed(ratios: list[float], asked: list[int]) -> Callable[[int], list[Pair]]:
    left = pairs(ratios)

    def next_pairs(count: int) -> list[Pair]:
        asked.append(count)
        taken, left[:] = left[:count], left[count:]
        return taken

    return next_pairs


def test_loss_interval_and_p_are_those_of_a_paired_t_test() -> None:
    ratios = [0.979, 0.981, 0.972, 0.985, 0.977, 0.976, 0.983, 0.974]
    logarithms = np.log(ratios)
    test = stats.ttest_1samp(logarithms, 0, alternative="less")
    # One-sided 98.33 % at each end is a central interval of 96.67 %.
    interval = stats.ttest_1samp(logarithms, 0).confidence_interval(1 - 2 * 0.05 / 3)
    verdict = gate.judge(pairs(ratios))
    assert verdict.loss == pytest.approx(1 - stats.gmean(ratios))
    assert verdict.p == pytest.approx(test.pvalue, rel=1e-9)
    assert verdict.interval == pytest.approx((1 - math.exp(interval.high), 1 - math.exp(interval.low)))
    assert verdict.kind is Kind.FAIL
    assert "FAIL: 2.16% slower than the baseline" in verdict.sentence
    assert "8 pairs" in verdict.sentence


@pytest.mark.parametrize(
    ("loss", "sd", "kind"),
    [
        (0.0, 0.005, Kind.PASS),
        (0.012, 0.005, Kind.PASS),  # bound: 1.2 % + 2.60 * 0.5 % / sqrt(8) = 1.66 %
        (0.013, 0.007, Kind.PASS),  # bound 1.94 %
        (0.014, 0.008, Kind.UNKNOWN),  # bound 2.1 %, and the loss below 1.5 %
        (0.016, 0.005, Kind.FAIL),
        (0.016, 0.015, Kind.UNKNOWN),  # t = 3.04, and 4.29 are needed for p < 0.00167
        (-0.03, 0.005, Kind.WIN),
        (-0.01, 0.005, Kind.PASS),  # too small a gain for a new baseline
    ],
)
def test_verdicts_by_hand(loss: float, sd: float, kind: Kind) -> None:
    assert gate.judge(pairs(spread(loss, sd))).kind is kind


def test_each_look_uses_a_third_of_the_error_rate() -> None:
    needed = stats.t.isf(0.005 / 3, 7) * 0.01 / math.sqrt(8)  # mean d at which p is just the share of one look
    assert DEFAULT.looks == (8, 12, 16)
    for factor, kind in ((1.001, Kind.FAIL), (0.999, Kind.UNKNOWN)):
        loss = -math.expm1(-needed * factor)
        assert loss > 0.015
        assert gate.judge(pairs(spread(loss, 0.01))).kind is kind


def test_an_unknown_asks_for_four_more_and_gives_up_after_sixteen() -> None:
    asked: list[int] = []
    verdict = gate.decide(feed(spread(0.016, 0.05, 16), asked))
    assert asked == [8, 4, 4]
    assert (verdict.kind, verdict.pairs) == (Kind.INSUFFICIENT, 16)
    assert verdict.kind.exit_code == 3
    assert "neither a pass nor a failure" in verdict.sentence


def test_a_clear_case_asks_once() -> None:
    asked: list[int] = []
    assert gate.decide(feed(spread(0.05, 0.005, 16), asked)).kind is Kind.FAIL
    assert asked == [8]


def test_an_unknown_is_decided_by_the_pairs_that_follow() -> None:
    noisy, quiet = spread(0.0, 0.03), [1.0] * 8
    asked: list[int] = []
    assert gate.judge(pairs(noisy)).kind is Kind.UNKNOWN
    verdict = gate.decide(feed(noisy + quiet, asked))
    assert asked == [8, 4]
    assert (verdict.kind, verdict.pairs) == (Kind.PASS, 12)


def test_missing_pairs_are_never_a_pass() -> None:
    verdict = gate.decide(feed([1.0] * 7, []))
    assert (verdict.kind, verdict.pairs, verdict.loss) == (Kind.INSUFFICIENT, 7, None)
    assert "8 more valid pairs were needed, 7 came" in verdict.sentence
    assert gate.judge(pairs([1.0] * 7)).kind is Kind.INSUFFICIENT


def test_pairs_that_come_again_are_not_new() -> None:
    first = pairs(spread(0.016, 0.05))
    verdict = gate.decide(lambda _count: first)
    assert (verdict.kind, verdict.pairs) == (Kind.INSUFFICIENT, 8)
    assert "4 more valid pairs were needed, 0 came" in verdict.sentence


@pytest.mark.parametrize(
    ("ratio", "kind", "p"), [(0.98, Kind.FAIL, 0.0), (1.0, Kind.PASS, 0.5), (1.02, Kind.WIN, 1.0), (0.99, Kind.PASS, 0.0)]
)
def test_without_any_variance_the_interval_is_a_point(ratio: float, kind: Kind, p: float) -> None:
    verdict = gate.judge([Pair(number=number, baseline=1.0, candidate=ratio) for number in range(8)])
    assert (verdict.kind, verdict.p) == (kind, p)
    assert verdict.interval == pytest.approx((1 - ratio, 1 - ratio))


@pytest.mark.parametrize("unit", [1.0, 1.1, 0.7, 3.3, 1e-3 / 3, 1e6 / 7])
@pytest.mark.parametrize(("candidate", "kind"), [(985.0, Kind.FAIL), (1015.0, Kind.WIN)])
def test_a_tie_with_the_threshold_counts_in_any_unit(unit: float, candidate: float, kind: Kind) -> None:
    tied = [Pair(number=number, baseline=1000.0 * unit, candidate=candidate * unit) for number in range(8)]
    assert gate.judge(tied).kind is kind


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("side", ["baseline", "candidate"])
def test_a_throughput_that_is_none_is_refused(value: float, side: str) -> None:
    with pytest.raises(ValueError, match=f"pair 3: the {side} throughput is"):
        Pair(**{"number": 3, "baseline": 1.0, "candidate": 1.0, side: value})


def test_two_pairs_with_one_number_are_refused() -> None:
    with pytest.raises(ValueError, match=r"different pairs have the numbers \[8\]"):
        gate.judge([*pairs([1.0] * 8), Pair(number=8, baseline=1.0, candidate=2.0)])


@pytest.mark.parametrize(
    "figures",
    [{"first_pairs": 1}, {"first_pairs": 20}, {"more_pairs": 0}, {"alpha": 0.0}, {"fail_loss": 0.03}, {"tolerance": 1.0}],
)
def test_a_rule_that_cannot_be_is_refused(figures: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Rule(**figures)  # type: ignore[arg-type]


def test_looks_end_at_the_most_pairs_even_between_steps() -> None:
    assert Rule(first_pairs=8, more_pairs=4, max_pairs=14).looks == (8, 12, 14)
    assert Rule(first_pairs=8, max_pairs=8).looks == (8,)


def plain(verdict: Verdict) -> tuple[object, ...]:
    return verdict.kind, verdict.pairs, pytest.approx(verdict.loss, abs=1e-12)


@given(RATIOS | CLOSE_RATIOS, st.randoms(), st.floats(1e-6, 1e6))
def test_order_unit_and_duplicates_do_not_matter(ratios: list[float], random: object, unit: float) -> None:
    given_pairs = pairs(ratios)
    shuffled = [*given_pairs, *given_pairs[:3]]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    verdict = gate.judge(given_pairs)
    assert gate.judge(shuffled) == verdict
    scaled = [Pair(number=pair.number, baseline=pair.baseline * unit, candidate=pair.candidate * unit) for pair in given_pairs]
    assert plain(gate.judge(scaled)) == plain(verdict)


@given(CLOSE_RATIOS | RATIOS, st.data())
@settings(max_examples=400)
def test_faster_segments_never_turn_pass_into_fail(ratios: list[float], data: st.DataObject) -> None:
    gains = data.draw(st.lists(st.floats(1.0, 1.02), min_size=len(ratios), max_size=len(ratios)))
    faster = [ratio * gain for ratio, gain in zip(ratios, gains, strict=True)]
    before, after = gate.judge(pairs(ratios)).kind, gate.judge(pairs(faster)).kind
    if before in {Kind.PASS, Kind.WIN}:
        assert after is not Kind.FAIL
    if after is Kind.FAIL:
        assert before is not Kind.WIN


@given(st.integers(2, 40))
def test_a_bound_below_the_tolerance_with_a_failing_loss_is_significant(count: int) -> None:
    """What makes the rule monotone: (fail_loss, bound < tolerance) implies t beyond the critical value."""
    looks = len(DEFAULT.looks)
    room = math.log1p(-DEFAULT.fail_loss) - math.log1p(-DEFAULT.tolerance)  # what the bound may reach beyond the loss
    error = room / stats.t.isf(DEFAULT.pass_alpha / looks, count - 1)
    if count >= DEFAULT.first_pairs:
        assert -math.log1p(-DEFAULT.fail_loss) / error > stats.t.isf(DEFAULT.alpha / looks, count - 1)


@given(CLOSE_RATIOS, st.floats(1.0, 1.1))
def test_a_faster_candidate_never_ends_worse_over_all_looks(ratios: list[float], gain: float) -> None:
    rank = [Kind.FAIL, Kind.UNKNOWN, Kind.PASS, Kind.WIN]
    ratios = (ratios * 2)[:16]
    before = gate.decide(feed(ratios, [])).kind
    after = gate.decide(feed([ratio * gain for ratio in ratios], [])).kind
    if before in {Kind.PASS, Kind.WIN}:
        assert rank.index(after) >= rank.index(before)
