"""The paired gate: is the candidate slower than the baseline? Pure statistics, no torch.

Baseline and candidate run in turns on one machine, in the order ABBA ABBA ..., so that slow drift cancels. Each pair of
segments gives d = ln(T_candidate / T_baseline); the loss is L = 1 - exp(mean d). With a t test over the pairs:

- FAIL: one-sided p < 0.005 and L >= 1.5 %.
- WIN: as surely faster, by a gain as large. It asks for a new baseline.
- PASS: the upper 95 % bound of the loss is below the tolerance, 2 %.
- UNKNOWN: neither. `decide` asks for 4 more pairs, up to 16; still UNKNOWN there is INSUFFICIENT, never a pass.

There are three looks (8, 12, 16 pairs), so each look uses a third of both error rates (Bonferroni): p < 0.00167, and a
bound of 98.33 %.

Why FAIL begins at 1.5 % and not at the tolerance: when the true loss is 2 %, half of all estimates lie below 2 %.
`python -m regression.simulate` shows what each threshold does at a segment sd of 0.5 %: a true loss of 2 % is found with
probability 0.65 (threshold 2 %), 0.99 (1.5 %) or 1.00 (1 %); a true loss of 1 %, which is tolerated, fails with 0.00, 0.02
or 0.37. 1.5 % finds the one and spares the other. It also keeps the rule monotone: a bound below 2 % with a loss of at least
1.5 % is always significant, so on the same pairs no faster candidate segment turns PASS into FAIL.

Limits: pairs are taken as independent and d as about normal. One pair in which something disturbed one segment costs
power, not validity. When all d are equal (standard deviation zero) the interval is a point and p is 0, 0.5 or 1: the limit
of the t test. Figures with a threshold in them have a slack of one billionth, so that rounding after a change of unit
cannot flip a tie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from scipy.special import stdtr, stdtrit

from regression.verdict import Kind

_SLACK = 1e-9


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Throughputs of two neighbouring segments, in any one unit . Raises ValueError unless they are positive."""

    number: int  # 1, 2, ... as they ran: an odd pair ran its baseline first, an even one its candidate
    baseline: float
    candidate: float

    def __post_init__(self) -> None:
        for name, value in (("baseline", self.baseline), ("candidate", self.candidate)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(
                    f"pair {self.number}: the {name} throughput is {value}, expected a positive number: drop invalid segments"
                )

    @property
    def log_ratio(self) -> float:
        """The d of the module's docstring: negative when the candidate is slower."""
        return math.log(self.candidate / self.baseline)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The figures of the gate; the defaults are the project's. Shares are of 1. Raises ValueError on what cannot be."""

    first_pairs: int = 8
    more_pairs: int = 4
    max_pairs: int = 16
    alpha: float = 0.005  # chance, over all looks, that equal builds are called slower
    pass_alpha: float = 0.05  # chance, over all looks, that a loss of the tolerance passes
    tolerance: float = 0.02
    fail_loss: float = 0.015

    def __post_init__(self) -> None:
        if not (2 <= self.first_pairs <= self.max_pairs and self.more_pairs >= 1):
            raise ValueError(f"{self}: expected 2 <= first_pairs <= max_pairs and more_pairs >= 1")
        if not (0 < self.alpha < 0.5 and 0 < self.pass_alpha < 0.5 and 0 < self.fail_loss <= self.tolerance < 1):
            raise ValueError(f"{self}: expected both alphas in (0, 0.5) and 0 < fail_loss <= tolerance < 1")

    @property
    def looks(self) -> tuple[int, ...]:
        """Numbers of pairs at which is decided."""
        return (*range(self.first_pairs, self.max_pairs, self.more_pairs), self.max_pairs)


DEFAULT = Rule()


def rule_for(*, tolerance: float = DEFAULT.tolerance, pairs: int | None = None) -> Rule:
    """The default rule with another tolerance (failing begins at three quarters of it), or with exactly so many pairs."""
    rule = replace(DEFAULT, tolerance=tolerance, fail_loss=tolerance * DEFAULT.fail_loss / DEFAULT.tolerance)
    return replace(rule, first_pairs=pairs, max_pairs=pairs) if pairs else rule


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the gate says. Numbers are None where there were too few pairs to compute them."""

    kind: Kind
    loss: float | None  # share of the baseline's throughput; negative: a gain
    interval: tuple[float, float] | None  # of the loss; each end holds with 95 % over all looks together
    p: float | None  # one-sided, for "the candidate is slower"
    pairs: int
    sentence: str


def decide(next_pairs: Callable[[int], Iterable[Pair]], rule: Rule = DEFAULT) -> Verdict:
    """Measure and judge until it is decided. `next_pairs(n)` runs n more pairs; fewer than n new ones ends as INSUFFICIENT."""
    pairs: set[Pair] = set()
    verdict = judge(pairs, rule)
    for look in rule.looks:
        wanted, before = look - len(pairs), len(pairs)
        pairs |= set(next_pairs(wanted))
        if len(pairs) < look:
            sentence = f"INSUFFICIENT: {wanted} more valid pairs were needed, {len(pairs) - before} came: not a pass"
            return Verdict(kind=Kind.INSUFFICIENT, loss=None, interval=None, p=None, pairs=len(pairs), sentence=sentence)
        verdict = judge(pairs, rule)
        if verdict.kind is not Kind.UNKNOWN:
            break
    return verdict


def judge(pairs: Iterable[Pair], rule: Rule = DEFAULT) -> Verdict:
    """Judge pairs in any order, equal ones counted once. Raises ValueError when two pairs have one number."""
    unique = set(pairs)
    _check_numbers(unique)
    count = len(unique)
    if count < rule.first_pairs:
        sentence = f"INSUFFICIENT: {count} pairs, at least {rule.first_pairs} are needed: not a pass"
        return Verdict(kind=Kind.INSUFFICIENT, loss=None, interval=None, p=None, pairs=count, sentence=sentence)
    mean, error = _mean_and_error([pair.log_ratio for pair in unique])
    looks = len(rule.looks)
    reach = -float(stdtrit(count - 1, rule.pass_alpha / looks)) * error
    loss, low, high = (-math.expm1(value) for value in (mean, mean + reach, mean - reach))
    slower, faster = _p_below_zero(mean, error, count), _p_below_zero(-mean, error, count)
    kind = Kind.UNKNOWN if count < rule.max_pairs else Kind.INSUFFICIENT
    if slower < rule.alpha / looks and loss >= rule.fail_loss - _SLACK:
        kind = Kind.FAIL
    elif faster < rule.alpha / looks and math.expm1(mean) >= rule.fail_loss - _SLACK:
        kind = Kind.WIN
    elif high < rule.tolerance - _SLACK:
        kind = Kind.PASS
    sentence = f"{kind}: {_words(loss)} ({low:+.2%} to {high:+.2%}, {count} pairs, p = {slower:.2g}){_advice(kind, rule)}"
    return Verdict(kind=kind, loss=loss, interval=(low, high), p=slower, pairs=count, sentence=sentence)


def _check_numbers(pairs: Collection[Pair]) -> None:
    if len({pair.number for pair in pairs}) < len(pairs):
        numbers = [pair.number for pair in pairs]
        twice = sorted({number for number in numbers if numbers.count(number) > 1})
        raise ValueError(f"different pairs have the numbers {twice}: give each pair of one comparison its own number")


def _mean_and_error(values: Collection[float]) -> tuple[float, float]:
    """Mean and its standard error, exact sums: the same in any order."""
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def _p_below_zero(mean: float, error: float, count: int) -> float:
    """One-sided p of a t test for a true mean below zero."""
    if error == 0:
        return 0.5 if mean == 0 else float(mean > 0)
    return float(stdtr(count - 1, mean / error))


def _words(loss: float) -> str:
    return f"{abs(loss):.2%} {'slower' if loss > 0 else 'faster'} than the baseline"


def _advice(kind: Kind, rule: Rule) -> str:
    return {
        Kind.PASS: f": a loss of {rule.tolerance:.0%} or more is ruled out",
        Kind.WIN: ": record a new baseline",
        Kind.UNKNOWN: f": {rule.more_pairs} more pairs are needed",
        Kind.INSUFFICIENT: ": neither a pass nor a failure; use longer segments or a quieter machine",
    }.get(kind, "")
