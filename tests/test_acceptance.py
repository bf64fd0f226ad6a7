"""Laws of the acceptance statistics."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.decoding import acceptance
from dflash.decoding.acceptance import PositionAcceptance, RoundStats


def whole(accepted: int, drafted: int = 3) -> RoundStats:
    return RoundStats(drafted, accepted, accepted + 1, truncated=False)


def cut(committed: int, drafted: int = 3) -> RoundStats:
    return RoundStats(drafted, committed, committed, truncated=True)


def test_tau_weighs_requests_equally_and_tau_sum_rounds() -> None:
    requests = [[whole(3), whole(1)], [whole(0)] * 4]  # 4 + 2 tokens in 2 rounds; 4 tokens in 4 rounds
    assert acceptance.tau_by_request(requests) == [3.0, 1.0]
    assert acceptance.tau(requests) == 2.0
    assert acceptance.tau_sum(requests) == 10 / 6


def test_a_request_without_rounds_takes_no_part() -> None:
    assert acceptance.tau([[], [whole(2)]]) == 3.0
    assert acceptance.tau_sum([[], [whole(2)]]) == 3.0


def test_nothing_measured_is_none_and_not_zero() -> None:
    for requests in ([], [[]], [[], []]):
        assert acceptance.tau(requests) is None
        assert acceptance.tau_sum(requests) is None
        assert acceptance.acceptance_per_position(requests) == ()
    assert acceptance.tokens_per_target_forward(0, 0) is None
    assert acceptance.tokens_per_target_forward(12, 8) == 1.5


def test_a_cut_round_counts_with_what_it_committed() -> None:
    assert acceptance.tau([[whole(3), cut(2)]]) == 3.0


def test_positions_are_conditional_and_censored_at_the_cut() -> None:
    rounds = [whole(0), whole(1), whole(3), cut(1), cut(2), cut(3)]
    # 1: 5 of 6. 2: of the 5, cut(1) says nothing: 3 of 4. 3: of those 3, cut(2) says nothing: whole(3), cut(3): 2 of 2.
    assert acceptance.acceptance_per_position([rounds[:2], rounds[2:]]) == (
        PositionAcceptance(1, 5, 6),
        PositionAcceptance(2, 3, 4),
        PositionAcceptance(3, 2, 2),
    )


def test_a_position_that_no_round_reached_has_no_rate() -> None:
    rates = [position.rate for position in acceptance.acceptance_per_position([[whole(0), whole(1)]])]
    assert rates == [0.5, 0.0, None]


def test_plain_decoding_has_no_positions_and_tau_one() -> None:
    rounds = [whole(0, drafted=0)] * 5
    assert acceptance.acceptance_per_position([rounds]) == ()
    assert acceptance.tau([rounds]) == 1.0


def test_censoring_leaves_the_rates_of_a_geometric_drafter_unbiased() -> None:
    """Cutting rounds at a place chosen without looking at the drafts must not move the conditional rates."""
    rng = np.random.default_rng(11)
    rate, drafted = 0.7, 4
    rounds = []
    for _ in range(20_000):
        accepted = int(np.argmin([*(rng.random(drafted) < rate), False]))
        room = int(rng.integers(1, 8))
        rounds.append(whole(accepted, drafted) if room > accepted else cut(room, drafted))
    for position in acceptance.acceptance_per_position([rounds]):
        deviation = np.sqrt(rate * (1 - rate) / position.tried)
        assert abs(position.rate - rate) < 4 * deviation


def test_tau_block_is_the_mean_over_blocks_of_one_plus_the_accepted_drafts_when_nothing_is_cut() -> None:
    rng = np.random.default_rng(3)
    requests = [[whole(int(accepted)) for accepted in rng.integers(0, 4, size)] for size in (1, 5, 9)]
    rounds = [r for request in requests for r in request]
    assert acceptance.tau_block(requests) == pytest.approx(np.mean([1 + r.accepted for r in rounds]))
    assert acceptance.tau_block([[]]) is None


def test_cutting_rounds_blindly_lowers_tau_sum_and_leaves_tau_block() -> None:
    rng = np.random.default_rng(5)
    whole_rounds, cut_rounds = [], []
    for accepted, room in zip(rng.binomial(3, 0.7, 20_000).tolist(), rng.integers(1, 7, 20_000).tolist(), strict=True):
        whole_rounds.append(whole(accepted))
        cut_rounds.append(whole(accepted) if room > accepted else cut(room))
    exact = acceptance.tau_block([whole_rounds])
    assert acceptance.tau_sum([cut_rounds]) < exact - 0.2
    assert acceptance.tau_block([cut_rounds]) == pytest.approx(exact, abs=0.03)


def test_estimates_are_the_three_definitions_with_intervals_over_requests() -> None:
    """Against a loop that draws whole requests again and again: the same quantiles up to the noise of 2000 draws."""
    rng = np.random.default_rng(8)
    requests = [[whole(int(a)) for a in rng.binomial(3, rng.random(), rng.integers(1, 12))] + [cut(1)] for _ in range(25)]
    found = acceptance.estimates([*requests, []], seed=4)
    functions = {"tau": acceptance.tau, "tau_sum": acceptance.tau_sum, "tau_block": acceptance.tau_block}
    assert list(found) == list(functions)
    assert len({estimate.definition for estimate in found.values()}) == 3
    for name, function in functions.items():
        assert found[name].value == function(requests)
        drawn = [function([requests[i] for i in rng.integers(0, 25, 25)]) for _ in range(300)]
        low, high = np.quantile(drawn, [0.025, 0.975])
        assert found[name].interval == pytest.approx((low, high), abs=0.12 * (high - low) + 0.05)
    assert acceptance.estimates([requests[0]], seed=4)["tau_block"].interval is None


@pytest.mark.parametrize(
    "numbers",
    [(3, 4, 5, False), (3, -1, 0, False), (3, 1, 1, False), (3, 1, 2, True), (3, 0, 0, True)],
    ids=["more accepted than drafted", "negative", "no bonus", "bonus in a cut round", "cut before the first token"],
)
def test_impossible_rounds_are_refused(numbers: tuple[int, int, int, bool]) -> None:
    with pytest.raises(ValueError, match="is no round"):
        RoundStats(*numbers)


def test_the_bootstrap_interval_covers_as_often_as_it_says() -> None:
    """400 samples of 40 requests from a skewed population; 0.95 give or take 4 deviations of the simulation, less on top."""
    rng = np.random.default_rng(7)
    covered = 0
    for seed in range(400):
        values = 1 + rng.gamma(4.0, 0.5, size=40)  # mean 3
        low, high = acceptance.bootstrap_interval(list(values), seed=seed, resamples=1000)
        covered += low <= 3.0 <= high
    assert 0.90 <= covered / 400 <= 0.98


def test_the_bootstrap_interval_of_a_normal_mean_matches_the_formula() -> None:
    values = list(np.random.default_rng(1).normal(5.0, 2.0, size=2000))
    low, high = acceptance.bootstrap_interval(values, seed=3)
    half = 1.96 * np.std(values) / np.sqrt(2000)
    assert low == pytest.approx(np.mean(values) - half, abs=0.05 * half)
    assert high == pytest.approx(np.mean(values) + half, abs=0.05 * half)


def test_the_bootstrap_is_deterministic_by_seed_and_needs_two_requests() -> None:
    values = list(np.random.default_rng(2).normal(size=30))
    assert acceptance.bootstrap_interval(values, seed=5) == acceptance.bootstrap_interval(values, seed=5)
    assert acceptance.bootstrap_interval(values, seed=5) != acceptance.bootstrap_interval(values, seed=6)
    assert acceptance.bootstrap_interval([2.0], seed=5) is None


@given(st.lists(st.floats(1, 16), min_size=2, max_size=50), st.integers(0, 2**32))
def test_the_bootstrap_interval_lies_within_the_values(values: list[float], seed: int) -> None:
    low, high = acceptance.bootstrap_interval(values, seed=seed, resamples=100)
    tolerance = 1e-9
    assert min(values) - tolerance <= low <= high <= max(values) + tolerance


def test_importing_the_statistics_does_not_import_torch() -> None:
    code = "import sys, dflash.decoding.acceptance; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
