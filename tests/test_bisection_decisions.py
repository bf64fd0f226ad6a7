"""Laws of deciding what one candidate is: by a noisy figure, by exit codes; noise is not guessed at."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
from scipy import stats

from diagnostics.bisection.decisions import ByExitCode, ByFigure, p_value_of_lower
from diagnostics.bisection.outcomes import BadInput, Outcome, State, Trial

GOOD, BAD, CANDIDATE = (State(commit=None, pins=(name,), label=name) for name in ("good", "bad", "candidate"))
DONE = Trial(returncode=0, figure=None, seconds=0.1)


def played(figures: Callable[[State, int], float]) -> Callable[[str, State, int], Trial]:
    return lambda _stage, state, number: dataclasses.replace(DONE, figure=figures(state, number))


def noisy(means: dict[str, float], spread: float, seed: int) -> Callable[[str, State, int], Trial]:
    drawn = random.Random(seed)
    return played(lambda state, _: drawn.gauss(means[state.label], spread))


def test_the_p_value_is_welchs() -> None:
    low, high = [19.8, 20.4, 19.6, 17.8], [28.2, 26.6, 20.1, 23.3, 25.2, 22.1]
    means, variances = zip(*((sum(x) / len(x), stats.tvar(x) / len(x)) for x in (low, high)), strict=True)
    t = (means[0] - means[1]) / sum(variances) ** 0.5
    freedom = sum(variances) ** 2 / sum(v**2 / (len(x) - 1) for v, x in zip(variances, (low, high), strict=True))
    assert p_value_of_lower(low, high) == pytest.approx(stats.t.cdf(t, freedom))
    assert not p_value_of_lower([1.0, 1.0 + 1e-15], [1.0, 1.0]) < 0.3
    assert p_value_of_lower([1, 1], [2, 2]) == 0 < p_value_of_lower([2, 2], [1, 1]) == p_value_of_lower([1, 1], [1, 1])


@pytest.mark.parametrize(("mean", "expected"), [(100, Outcome.GOOD), (50, Outcome.BAD), (97, Outcome.GOOD), (53, Outcome.BAD)])
@pytest.mark.parametrize("higher_is_better", [True, False])
def test_a_noisy_candidate_is_put_to_the_end_it_belongs_to(mean: float, expected: Outcome, *, higher_is_better: bool) -> None:
    means = {"good": 100, "bad": 50, "candidate": mean}
    if not higher_is_better:
        means = {name: 150 - value for name, value in means.items()}
    judge = ByFigure(higher_is_better=higher_is_better)
    run = noisy(means, 3.0, seed=1)
    judge.check_ends(run, GOOD, BAD)
    assert judge.outcome(run, CANDIDATE) is expected


def test_noise_that_hides_the_difference_is_undecided_never_guessed() -> None:
    judge, means = ByFigure(), {"good": 100.0, "bad": 50.0, "candidate": 75.0}
    judge.check_ends(noisy(means, 1.0, seed=0), GOOD, BAD)
    outcomes = [judge.outcome(noisy(means, 200.0, seed), CANDIDATE) for seed in range(20)]
    assert outcomes.count(Outcome.UNDECIDED) >= 19


def test_a_wrong_decision_is_as_rare_as_the_error_rate_says() -> None:
    judge, means = ByFigure(error_rate=0.05), {"good": 100.0, "bad": 90.0, "candidate": 100.0}
    judge.check_ends(noisy(means, 0.1, seed=0), GOOD, BAD)
    outcomes = [judge.outcome(noisy(means, 8.0, seed), CANDIDATE) for seed in range(60)]
    assert outcomes.count(Outcome.BAD) <= 0.05 * 60
    assert outcomes.count(Outcome.GOOD) > 6


def test_trials_of_ends_and_candidate_take_turns() -> None:
    order: list[str] = []

    def run(_stage: str, state: State, _number: int) -> Trial:
        order.append(state.label)
        return dataclasses.replace(DONE, figure=100.0 if state is not BAD else 50.0)

    judge = ByFigure()
    judge.check_ends(run, GOOD, BAD)
    judge.outcome(run, CANDIDATE)
    assert order == ["good", "bad"] * 3 + ["good", "candidate", "bad"] * 3


@pytest.mark.parametrize("means", [{"good": 50.0, "bad": 100.0}, {"good": 100.0, "bad": 100.0}], ids=["exchanged", "equal"])
def test_ends_that_are_not_as_claimed_are_bad_input(means: dict[str, float]) -> None:
    with pytest.raises(BadInput, match="not seen to be worse"):
        ByFigure().check_ends(noisy(means, 5.0, seed=3), GOOD, BAD)


def test_an_end_without_a_number_is_bad_input_and_a_candidate_without_is_skipped() -> None:
    with pytest.raises(BadInput, match="the good end gave no number"):
        ByFigure().check_ends(lambda *_: DONE, GOOD, BAD)
    judge, run = ByFigure(), played(lambda state, _: 100.0 if state is GOOD else 50.0)
    judge.check_ends(run, GOOD, BAD)
    assert judge.outcome(lambda *asked: DONE if asked[1] is CANDIDATE else run(*asked), CANDIDATE) is Outcome.SKIPPED


def test_an_end_that_fails_for_once_spoils_its_round_only() -> None:
    judge, run = ByFigure(), played(lambda state, _: 50.0 if state is BAD else 100.0)
    judge.check_ends(run, GOOD, BAD)
    asked: list[int] = []

    def failing(stage: str, state: State, number: int) -> Trial:
        asked.append(number)
        return DONE if state is GOOD and number == 1 else run(stage, state, number)

    assert judge.outcome(failing, CANDIDATE) is Outcome.GOOD
    assert max(asked) == 3
    assert judge.outcome(lambda *given: DONE if given[1] is GOOD else run(*given), CANDIDATE) is Outcome.UNDECIDED


def exits(codes: dict[str, list[int]]) -> Callable[[str, State, int], Trial]:
    return lambda _stage, state, number: dataclasses.replace(
        DONE, returncode=codes[state.label][number % len(codes[state.label])]
    )


@pytest.mark.parametrize(
    ("codes", "told"),
    [({"good": [1], "bad": [1]}, "the good end fails"), ({"good": [0], "bad": [0]}, "the bad end passes, 2 of 2"),
     ({"good": [0, -11], "bad": [1]}, "the good end fails"), ({"good": [125], "bad": [1]}, "cannot be judged")],
)  # fmt: skip
def test_ends_that_do_not_fail_and_pass_as_claimed_are_bad_input(codes: dict[str, list[int]], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        ByExitCode(repeats=2).check_ends(exits(codes), GOOD, BAD)


def test_a_failure_that_does_not_always_happen_needs_more_passes() -> None:
    codes = {"good": [0], "bad": [0, 1], "candidate": [0, 0, 0, 0, 1]}
    judge = ByExitCode(repeats=4)
    judge.check_ends(exits(codes), GOOD, BAD)  # fails half of the time: 7 passes leave less than 1 %
    assert judge.outcome(exits(codes), CANDIDATE) is Outcome.BAD
    asked: list[int] = []
    run = exits({**codes, "candidate": [0]})
    assert judge.outcome(lambda *given: (asked.append(given[2]), run(*given))[1], CANDIDATE) is Outcome.GOOD
    assert len(asked) == 7
    few = ByExitCode(repeats=4, max_repeats=5)
    few.check_ends(exits(codes), GOOD, BAD)
    assert few.outcome(run, CANDIDATE) is Outcome.UNDECIDED
    assert few.outcome(exits({"candidate": [125]}), CANDIDATE) is Outcome.SKIPPED
