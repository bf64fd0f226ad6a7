"""Change points over the whole history of a series, for the report only: nothing is failed by them.

A Potts fit: piecewise constant levels of ln T that minimise the sum of squares plus a penalty for each change,

    4 s^2 ln(n) (1 + rho) / (1 - rho)

found exactly by dynamic programming. Nights that follow each other are alike (an AR(1) process with lag-1 correlation rho),
which makes the mean of a segment vary (1 + rho) / (1 - rho) times as much as that of independent nights. s and rho come from
differences over one and two nights, which a change of level hardly touches. A lone slow night is replaced by the median of its
neighbours first, so it is no change.

With the noise of `regression.simulate` (sd 1 %, rho 0.3, 3 % outliers), 5 % of series of 120 nights without a change show one;
taken for independent it would be 34 %, without the treatment of outliers 68 %. -3 % is placed within two nights of its
place with probability 0.72 after 10 nights and 0.91 after 30.

Limits: levels last at least 3 nights; a change in the last two nights is not seen yet (that is the watch's work); fewer than
10 nights give nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from regression.watch import NOISE_FLOOR, Night, chronological

SHORTEST_LEVEL = 3
PENALTY = 4.0
_LARGEST_CORRELATION = 0.8  # beyond, a series is a drift and not a row of levels
_FEWEST_NIGHTS = 10  # for an estimate of the noise

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ChangePoint:
    """A change of level between two nights. Levels are medians, in the unit of the nights."""

    night: Night  # the first of the new level
    before: float
    after: float

    @property
    def change(self) -> float:
        """Relative; negative: slower."""
        return self.after / self.before - 1


def find(nights: Iterable[Night]) -> list[ChangePoint]:
    """The changes of level among the valid nights of one series, the oldest first. Raises ValueError on several series."""
    valid = sorted({night for night in nights if not night.invalid}, key=chronological)
    if len({night.series for night in valid}) > 1:
        raise ValueError(f"nights of several series: {sorted({night.series for night in valid})}; look at each on its own")
    values = np.array([night.value for night in valid], dtype=float)
    starts = segment(values)
    bounds = [0, *starts, len(values)]
    levels = [float(np.median(values[low:high])) for low, high in itertools.pairwise(bounds)] if starts else []
    return [ChangePoint(night=valid[start], before=levels[k], after=levels[k + 1]) for k, start in enumerate(starts)]


def segment(values: Sequence[float] | Floats, *, penalty: float = PENALTY, correlated: bool = True) -> list[int]:
    """Where new levels begin in a row of positive throughputs; empty for fewer than 10.

    The keywords are for comparisons: another factor of the penalty, nights taken for independent.
    """
    if len(values) < _FEWEST_NIGHTS:
        return []
    logarithms = without_lone_outliers(np.log(values))
    spread, correlation = noise(logarithms, correlated=correlated)
    inflation = (1 + correlation) / (1 - correlation)
    return potts(logarithms, penalty * spread**2 * math.log(len(logarithms)) * inflation)


def potts(values: Floats, penalty: float) -> list[int]:
    """Starts of the levels, but the first, of the best piecewise constant fit; each level at least 3 long."""
    count = len(values)
    sums, squares = (np.concatenate(([0.0], np.cumsum(part))) for part in (values - values.mean(), (values - values.mean()) ** 2))
    best = np.full(count + 1, np.inf)
    best[0] = -penalty
    last_start = np.zeros(count + 1, dtype=int)
    for end in range(SHORTEST_LEVEL, count + 1):
        starts = np.arange(end - SHORTEST_LEVEL + 1)
        errors = squares[end] - squares[starts] - (sums[end] - sums[starts]) ** 2 / (end - starts)
        costs = best[starts] + errors + penalty
        last_start[end] = np.argmin(costs)
        best[end] = costs[last_start[end]]
    found, end = [], int(last_start[count])
    while end > 0:
        found.append(end)
        end = int(last_start[end])
    return found[::-1]


def without_lone_outliers(values: Floats, reach: int = 2) -> Floats:
    """Values further than 3.5 robust standard deviations from the median of the 2 reach + 1 around them become that median."""
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(values, reach, mode="reflect"), 2 * reach + 1)
    centre = np.median(windows, axis=1)
    off = values - centre
    limit = 3.5 * max(1.4826 * float(np.median(np.abs(off))), NOISE_FLOOR)
    return np.where(np.abs(off) > limit, centre, values)


def noise(values: Floats, *, correlated: bool = True) -> tuple[float, float]:
    """Standard deviation (at least 0.3 %) and lag-1 correlation (0 to 0.8) of an AR(1) process around levels that change rarely.

    With s its variance: var(x[t] - x[t-1]) = 2 s (1 - rho) and var(x[t] - x[t-2]) = 2 s (1 - rho^2), so their ratio is 1 + rho.
    """
    one, two = (_clipped_variance(values[lag:] - values[:-lag]) for lag in (1, 2))
    correlation = min(max(two / one - 1, 0.0), _LARGEST_CORRELATION) if correlated and one > 0 else 0.0
    return max(math.sqrt(one / (2 * (1 - correlation))), NOISE_FLOOR), correlation


def _clipped_variance(values: Floats) -> float:
    """Around zero; what is beyond three robust standard deviations counts as that."""
    limit = 3 * 1.4826 * float(np.median(np.abs(values)))
    return float(np.mean(np.clip(values, -limit, limit) ** 2))
