"""What is reported beside the verdict and fails nothing: secondary metrics, and nights that are missing.

Secondary metrics (memory, stage times, queue waits ...) are many, so some are always "significant". `discoveries` controls the
false discovery rate at 5 % over all of them together (Benjamini and Hochberg 1995, statsmodels). It holds for independent
metrics and for positively dependent ones; metrics of one program are mostly that.

A nightly run that stops running looks like a week without regressions. `missing_nights` says so, once a day for each series;
who sends the alerts keeps those it sent (they are data) and hands them back in.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta

from scipy.special import stdtr

from regression.watch import Night, chronological

FALSE_DISCOVERY_RATE = 0.05
OVERDUE = timedelta(hours=36)  # a night and a half


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """A secondary metric that moved."""

    metric: str
    p: float  # two-sided, of this metric alone
    adjusted_p: float  # over all metrics; at most the false discovery rate


@dataclass(frozen=True, kw_only=True)
class MissingNight:
    """An alert: a series has had no valid night for too long."""

    series: str
    day: date  # of the alert; one a day
    sentence: str

    @property
    def key(self) -> tuple[str, date]:
        """What is the same when the alert was sent already."""
        return self.series, self.day


def p_of_change(tonight: float, history: Sequence[float]) -> float:
    """Two-sided p of one new value after `history`, by the t distribution of a prediction. Raises ValueError below 3 values."""
    count = len(history)
    if count < 3 or not all(map(math.isfinite, (tonight, *history))):
        raise ValueError(f"{count} earlier values: expected at least 3, all of them finite")
    mean = math.fsum(history) / count
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in history) / (count - 1))
    if deviation == 0:
        return float(tonight == mean)
    t = (tonight - mean) / (deviation * math.sqrt(1 + 1 / count))
    return float(2 * stdtr(count - 1, -abs(t)))


def discoveries(p_values: Mapping[str, float], rate: float = FALSE_DISCOVERY_RATE) -> list[Discovery]:
    """The metrics that moved, the surest first. Raises ValueError on what is no p value."""
    wrong = {metric: p for metric, p in p_values.items() if not 0 <= p <= 1}
    if wrong:
        raise ValueError(f"no p values: {wrong}; expected 0 to 1")
    if not p_values:
        return []
    from statsmodels.stats.multitest import multipletests  # noqa: PLC0415 - takes a second; the verdict does not wait for it

    rejected, adjusted, _, _ = multipletests(list(p_values.values()), alpha=rate, method="fdr_bh")
    found = [
        Discovery(metric=metric, p=p, adjusted_p=float(more))
        for (metric, p), more, yes in zip(p_values.items(), adjusted, rejected, strict=True)
        if yes
    ]
    return sorted(found, key=lambda discovery: (discovery.adjusted_p, discovery.p, discovery.metric))


def missing_nights(
    nights: Iterable[Night], *, now: datetime, sent: Collection[MissingNight] = (), overdue: timedelta = OVERDUE
) -> list[MissingNight]:
    """Series without a valid night in the last `overdue`, unless an alert was `sent` for them today (the day of `now`).

    A series whose fingerprint changed has ended and would be missed for ever: hand in nights with the workload's name as series.
    """
    first: dict[str, Night] = {}
    latest: dict[str, Night] = {}
    valid: dict[str, Night] = {}
    for night in sorted(set(nights), key=chronological):
        first.setdefault(night.series, night)
        latest[night.series] = night
        if not night.invalid:
            valid[night.series] = night
    keys = {alert.key for alert in sent}
    alerts = []
    for series, last in sorted(latest.items()):
        good = valid.get(series)
        if (series, now.date()) in keys or now - (good or first[series]).time <= overdue:
            continue
        since = f"no valid night since {good.time:%Y-%m-%d %H:%M}" if good else "no valid night ever"
        why = f"the latest was INVALID: {'; '.join(last.invalid)}" if last.invalid else "nothing was measured after it"
        alerts.append(MissingNight(series=series, day=now.date(), sentence=f"{series}: {since}; {why}"))
    return alerts
