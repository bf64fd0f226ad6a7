"""How sure is a throughput, from the steps of one run: batch means with autocorrelation. Imports no torch.

Steps in a row are joined to batches; the batches' throughputs have a lag-1 autocorrelation rho (taken as at least 0), and count
as n_eff = n (1 - rho) / (1 + rho) independent ones. Known limit: this is the spread inside one run. Two runs of the same code
differ by more, so no decision rests on it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.special import stdtrit

MAX_BATCHES = 20
MIN_BATCHES = 4
_MAX_RHO = 0.99


@dataclass(frozen=True, kw_only=True)
class Interval:
    """95 % interval of a throughput, in its unit; None where too few batches are independent."""

    low: float | None
    high: float | None
    batches: int
    rho: float
    n_eff: float


def batch_means(seconds: Sequence[float], tokens: Sequence[float]) -> Interval | None:
    """The interval of tokens per second from the durations and tokens of steps in a row; None below 4 steps."""
    count = min(MAX_BATCHES, len(seconds))
    if count < MIN_BATCHES:
        return None
    edges = [len(seconds) * number // count for number in range(count + 1)]
    spans = [slice(first, last) for first, last in itertools.pairwise(edges)]
    rates = [sum(tokens[span]) / sum(seconds[span]) for span in spans]
    mean, spread = fmean(rates), stdev(rates)
    rho = min(_MAX_RHO, max(0.0, lag_one(rates)))
    n_eff = count * (1 - rho) / (1 + rho)
    if n_eff <= 1.5:
        return Interval(low=None, high=None, batches=count, rho=rho, n_eff=n_eff)
    half = float(stdtrit(n_eff - 1, 0.975)) * spread / math.sqrt(n_eff)
    return Interval(low=mean - half, high=mean + half, batches=count, rho=rho, n_eff=n_eff)


def lag_one(values: Sequence[float]) -> float:
    """Lag-1 autocorrelation; 0 for values that are all equal."""
    mean = fmean(values)
    deviations = [value - mean for value in values]
    total = sum(deviation**2 for deviation in deviations)
    return sum(a * b for a, b in itertools.pairwise(deviations)) / total if total else 0.0
