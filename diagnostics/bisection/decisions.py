"""Good or bad, from trials: by exit codes, or by a noisy number with Welch's test. Pure: trials come through a function.

By a number, each round runs the good end, the candidate and the bad end after each other, so that a machine that drifts moves
all three. After each round from the least number on, Welch's t test compares the candidate with both ends: bad, if it is worse
than the good end and nearer to the bad one; good, if it is better than the bad end and nearer to the good one. The error rate
is divided by the number of such looks, so it holds for the whole decision. Without a decision after the last round it is
undecided.

By exit codes, one failure is bad. A failure that does not always happen needs several passes before a state is good: so many
that the bad end's rate of failures would have shown one with the error rate's certainty.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scipy import stats

from diagnostics.bisection.outcomes import SKIP_CODE, BadInput, Outcome, State, Trial

Run = Callable[[str, State, int], Trial]  # stage, state, number of the trial in it


class Judge(Protocol):
    """Tells good from bad by running trials."""

    def check_ends(self, run: Run, good: State, bad: State) -> str:
        """How the ends differ, in a sentence. Raises BadInput if they are not good and bad as claimed."""

    def outcome(self, run: Run, candidate: State) -> Outcome:
        """About a state between the ends; after `check_ends`."""


@dataclass(kw_only=True)
class ByExitCode:
    """See the module."""

    repeats: int = 1
    max_repeats: int = 20
    error_rate: float = 0.01
    _passes: int = field(default=1, init=False)  # that make a state good

    def check_ends(self, run: Run, good: State, bad: State) -> str:
        """See Judge."""
        numbers = range(self.repeats)
        ends = {name: [run("ends", state, number) for number in numbers] for name, state in (("good", good), ("bad", bad))}
        for name, trials in ends.items():
            if any(trial.returncode == SKIP_CODE for trial in trials):
                raise BadInput(f"the {name} end ended with {SKIP_CODE}, which means that it cannot be judged: name another end")
        failures = {name: sum(trial.failed for trial in trials) for name, trials in ends.items()}
        if failures["good"]:
            trial = next(trial for trial in ends["good"] if trial.failed)
            raise BadInput(f"the good end fails ({_ended(trial)}): it has to pass every time, or the ends are exchanged")
        runs = self.repeats
        if not failures["bad"]:
            raise BadInput(f"the bad end passes, {runs} of {runs} times: it has to fail (a rare failure: raise --repeat)")
        self._passes = self._passes_for(failures["bad"] / runs)
        return f"the good end passed {runs} of {runs} times, the bad end failed {failures['bad']} of {runs}"

    def outcome(self, run: Run, candidate: State) -> Outcome:
        """See Judge."""
        for number in range(min(self._passes, self.max_repeats)):
            trial = run("candidate", candidate, number)
            if trial.failed:
                return Outcome.BAD
            if trial.returncode == SKIP_CODE:
                return Outcome.SKIPPED
        return Outcome.GOOD if self._passes <= self.max_repeats else Outcome.UNDECIDED

    def _passes_for(self, failure_rate: float) -> int:
        if failure_rate == 1:
            return self.repeats
        return max(self.repeats, math.ceil(math.log(self.error_rate) / math.log(1 - failure_rate)))


@dataclass(kw_only=True)
class ByFigure:
    """See the module."""

    higher_is_better: bool = True
    repeats: int = 3  # the least number of rounds
    max_repeats: int = 10
    error_rate: float = 0.01
    _ends: tuple[State, ...] = field(default=(), init=False)

    def check_ends(self, run: Run, good: State, bad: State) -> str:
        """See Judge."""
        figures: tuple[list[float], list[float]] = ([], [])
        for number in range(self.max_repeats):
            for name, state, kept in zip(("good", "bad"), (good, bad), figures, strict=True):
                kept.append(_figure_of_end(name, run("ends", state, number)))
            if number + 1 >= self.repeats and self._is_worse(figures[1], than=figures[0]):
                self._ends = (good, bad)
                return f"good end {summary(figures[0])}, bad end {summary(figures[1])}"
        raise BadInput(
            f"the bad end is not seen to be worse: good end {summary(figures[0])}, bad end {summary(figures[1])} "
            f"({'higher' if self.higher_is_better else 'lower'} is better). Are they exchanged, or is more needed (--max-repeat)?"
        )

    def outcome(self, run: Run, candidate: State) -> Outcome:
        """See Judge."""
        good, bad = self._ends
        rounds: list[dict[str, float]] = []
        for number in range(self.max_repeats):
            one = {
                name: run("candidate" if state is candidate else f"beside {candidate.label}", state, number).figure
                for name, state in (("good", good), ("candidate", candidate), ("bad", bad))
            }
            if one["candidate"] is None:
                return Outcome.SKIPPED
            figures = {name: figure for name, figure in one.items() if figure is not None}
            if len(figures) == len(one):  # an end that failed for once spoils its round, not the bisection
                rounds.append(figures)
            if len(rounds) >= self.repeats:
                decided = self._decide(*([each[name] for each in rounds] for name in one))
                if decided is not None:
                    return decided
        return Outcome.UNDECIDED

    def _decide(self, good: Sequence[float], candidate: Sequence[float], bad: Sequence[float]) -> Outcome | None:
        mean = statistics.fmean(candidate)
        is_nearer_to_bad = abs(mean - statistics.fmean(bad)) < abs(mean - statistics.fmean(good))
        if is_nearer_to_bad:
            return Outcome.BAD if self._is_worse(candidate, than=good) else None
        return Outcome.GOOD if self._is_worse(bad, than=candidate) else None

    def _is_worse(self, figures: Sequence[float], *, than: Sequence[float]) -> bool:
        looks = self.max_repeats - self.repeats + 1
        low, high = (figures, than) if self.higher_is_better else (than, figures)
        return p_value_of_lower(low, high) < self.error_rate / looks


def p_value_of_lower(low: Sequence[float], high: Sequence[float]) -> float:
    """Welch's one-sided p value that `low` has the lower mean; samples without any spread are compared as they are."""
    if max(low) == min(low) and max(high) == min(high):
        return 0.0 if low[0] < high[0] else 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # scipy's, about figures that hardly differ: NaN decides nothing
        return float(stats.ttest_ind(low, high, equal_var=False, alternative="less").pvalue)


def summary(figures: Sequence[float]) -> str:
    """Mean, spread and number."""
    spread = f" ± {statistics.stdev(figures):.4g}" if len(figures) > 1 else ""
    return f"{statistics.fmean(figures):.6g}{spread} (n={len(figures)})"


def _figure_of_end(name: str, trial: Trial) -> float:
    if trial.figure is None:
        raise BadInput(f"the {name} end gave no number ({_ended(trial)}): check --metric and the command")
    return trial.figure


def _ended(trial: Trial) -> str:
    how = "timed out" if trial.timed_out else f"exit code {trial.returncode}"
    return f"{how}, its last line: {trial.last_line or 'none'}"
