"""Do our change points agree with Apache Otava's? `python -m regression.otava_agreement --otava PATH` or `nox -s otava`.

The same simulated series go to both, to Otava as CSV files. Otava (0.8, its defaults: E-divisive in windows of 50 nights, t test
with p < 0.001) knows no correlation and no outliers, so the two must differ somewhere. Each difference is put down to a cause by
an experiment: take the cause away on one side, and the difference has to go.

| only Otava reports it, and | then the cause is |
|---|---|
| we do, when nights count as independent | correlation |
| we do, with half the penalty | threshold |
| we do, with both | correlation and threshold |
| Otava does not, once lone slow or fast nights are replaced | outliers |
| Otava does not, with one window over the whole series | window |

| only we report it, and | then the cause is |
|---|---|
| Otava does, once lone slow or fast nights are replaced | outliers |
| Otava does, with p < 0.01 | threshold |
| Otava does, with both | outliers and threshold |
| Otava does, with one window over the whole series | window |
| we do not, once what is far from the median of the eleven nights around it is replaced, too | dense outliers |

The first that holds is shown. When both report a change that the other does not, 4 to 10 nights apart, the cause is "place".
Points within 3 nights are the same point. Exit codes: 0 no unexplained difference, 1 an unexplained one, 2 bad usage, 3 Otava did
not run.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from dflash.standard_output import outlive_reader
from regression.change_points import PENALTY, segment, without_lone_outliers
from regression.simulate import CORRELATION, OUTLIERS, throughputs

_START = datetime(2025, 1, 1, tzinfo=UTC)
_SAME, _SAME_CHANGE = 3, 10  # nights
_TIMEOUT_SECONDS = 300.0

Points = dict[str, list[int]]


class NotObservedError(RuntimeError):
    """Otava gave no answer."""


@dataclass(frozen=True)
class Difference:
    """A change point that one side reports and the other does not."""

    series: str
    night: int
    only: str  # "ours" or "Otava"
    planted: bool
    cause: str  # empty: unexplained


@dataclass(frozen=True)
class Answers:
    """What both sides say about all series, as they are and with one cause taken away."""

    ours: Points
    ours_more_replaced: Points
    ours_independent: Points
    ours_half_penalty: Points
    ours_independent_half_penalty: Points
    otava: Points
    otava_without_outliers: Points
    otava_larger_p: Points
    otava_without_outliers_larger_p: Points
    otava_one_window: Points


def make_series(seed: int = 0) -> tuple[dict[str, list[float]], Points]:
    """Series by name, and the nights at which their level was planted to change."""
    generator = np.random.default_rng(seed)
    series: dict[str, list[float]] = {}
    planted: Points = {}

    def add(
        name: str,
        changes: Mapping[int, float],
        nights: int = 120,
        *,
        outliers: float = OUTLIERS,
        correlation: float = CORRELATION,
    ) -> None:
        level = np.cumprod([1 + changes.get(night, 0.0) for night in range(nights)])
        (values,) = throughputs(1, nights, generator, outliers=outliers, correlation=correlation)
        series[name], planted[name] = [100 * float(value) for value in level * values], sorted(changes)

    add("steady", {}, outliers=0.0, correlation=0.0)
    for correlation in (CORRELATION, 0.6, 0.8):
        add(f"correlated {correlation}", {}, outliers=0.0, correlation=correlation)
    for share in (OUTLIERS, 0.1):
        add(f"outliers {share:.0%}", {}, outliers=share, correlation=0.0)
    for loss in (0.01, 0.02, 0.03, 0.05, 0.1):
        add(f"fall {loss:.0%}", {60: -loss})
    add("rise 5%", {60: 0.05})
    add("two falls 4%", {40: -0.04, 80: -0.04})
    add("dip of 10 nights", {60: -0.05, 70: 1 / 0.95 - 1})
    add("fall 5% 6 nights ago", {114: -0.05})
    add("fall 5% last night", {119: -0.05})
    add("a year, three changes", {90: -0.04, 180: 0.06, 270: -0.03}, nights=365)
    add("a year, outliers 10%", {180: -0.05}, nights=365, outliers=0.1)
    return series, planted


def ask_otava(otava: Path, series: Mapping[str, Sequence[float]], *flags: str) -> Points:
    """Otava's change points. Raises NotObservedError where it gives no answer for each series."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tests = {}
        for number, values in enumerate(series.values()):
            file = directory / f"series{number}.csv"
            _write(file, values)
            tests[f"series{number}"] = {"type": "csv", "file": str(file), "time_column": "time", "metrics": ["throughput"]}
        config = directory / "otava.yaml"
        config.write_text(json.dumps({"tests": tests}))  # JSON is YAML
        command = [str(otava), "analyze", *tests, "--since", "2024-01-01", "--output", "json", *flags]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "OTAVA_CONFIG": str(config)},
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotObservedError(f"{otava} did not run: {error}") from error
    found: Points = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found |= {test: [group["changes"][0]["index"] for group in groups] for test, groups in json.loads(line).items()}
    if done.returncode != 0 or list(found) != list(tests):
        raise NotObservedError(
            f"{otava}: exit code {done.returncode}, {len(found)} of {len(tests)} answers\n{done.stderr[-2000:]}"
        )
    return dict(zip(series, found.values(), strict=True))


def ask_both(otava: Path, series: Mapping[str, Sequence[float]]) -> Answers:
    """All answers that the comparison needs; five runs of Otava. Raises NotObservedError."""
    clean = {name: _replaced(values) for name, values in series.items()}
    longest = max(len(values) for values in series.values())
    return Answers(
        ours={name: segment(values) for name, values in series.items()},
        ours_more_replaced={name: segment(_replaced(values, reach=5)) for name, values in series.items()},
        ours_independent={name: segment(values, correlated=False) for name, values in series.items()},
        ours_half_penalty={name: segment(values, penalty=PENALTY / 2) for name, values in series.items()},
        ours_independent_half_penalty={
            name: segment(values, penalty=PENALTY / 2, correlated=False) for name, values in series.items()
        },
        otava=ask_otava(otava, series),
        otava_without_outliers=ask_otava(otava, clean),
        otava_larger_p=ask_otava(otava, series, "-P", "0.01"),
        otava_without_outliers_larger_p=ask_otava(otava, clean, "-P", "0.01"),
        otava_one_window=ask_otava(otava, series, "--window", str(2 * longest)),
    )


def differences(answers: Answers, planted: Points) -> list[Difference]:
    """Every point of one side without one of the other within 3 nights, with its cause."""
    found = []
    for name, ours in answers.ours.items():
        theirs = answers.otava[name]
        only_ours = [night for night in ours if not _near(night, theirs)]
        only_otava = [night for night in theirs if not _near(night, ours)]
        for night in only_ours:
            cause = "place" if _near(night, only_otava, _SAME_CHANGE) else _why_only_ours(answers, name, night)
            found.append(Difference(name, night, "ours", _near(night, planted[name]), cause))
        for night in only_otava:
            cause = "place" if _near(night, only_ours, _SAME_CHANGE) else _why_only_otava(answers, name, night)
            found.append(Difference(name, night, "Otava", _near(night, planted[name]), cause))
    return found


def _why_only_otava(answers: Answers, name: str, night: int) -> str:
    if _near(night, answers.ours_independent[name]):
        return "correlation"
    if _near(night, answers.ours_half_penalty[name]):
        return "threshold"
    if _near(night, answers.ours_independent_half_penalty[name]):
        return "correlation and threshold"
    if not _near(night, answers.otava_without_outliers[name]):
        return "outliers"
    return "" if _near(night, answers.otava_one_window[name]) else "window"


def _why_only_ours(answers: Answers, name: str, night: int) -> str:
    if _near(night, answers.otava_without_outliers[name]):
        return "outliers"
    if _near(night, answers.otava_larger_p[name]):
        return "threshold"
    if _near(night, answers.otava_without_outliers_larger_p[name]):
        return "outliers and threshold"
    if _near(night, answers.otava_one_window[name]):
        return "window"
    return "" if _near(night, answers.ours_more_replaced[name]) else "dense outliers"


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask both, show the table, decide."""
    parser = argparse.ArgumentParser(
        prog="python -m regression.otava_agreement", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--otava", type=Path, required=True, metavar="PATH", help="the command `otava` of its environment")
    parser.add_argument("--seed", type=int, default=0, help="of the series (default 0)")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    series, planted = make_series(options.seed)
    try:
        answers = ask_both(options.otava, series)
    except NotObservedError as error:
        console.print(f"not observed: {error}", markup=False, highlight=False)
        return 3
    found = differences(answers, planted)
    console.print(_table(answers, planted, found))
    same = sum(not any(one.series == name for one in found) for name in series)
    unexplained = sum(not one.cause for one in found)
    console.print(f"{same} of {len(series)} series agree; {len(found)} differences, {unexplained} unexplained", highlight=False)
    return int(unexplained > 0)


def _table(answers: Answers, planted: Points, found: Sequence[Difference]) -> Table:
    table = Table(title="Nights at which a new level begins", title_justify="left")
    for header in ("series", "planted", "ours", "Otava", "differences"):
        table.add_column(header)
    for name in answers.ours:
        words = [_words(one) for one in found if one.series == name]
        nights = (", ".join(map(str, points[name])) for points in (planted, answers.ours, answers.otava))
        table.add_row(name, *nights, "\n".join(words))
    return table


def _words(one: Difference) -> str:
    cause = one.cause or "[bold red]UNEXPLAINED[/]"
    return f"{one.night} only {one.only} ({'planted' if one.planted else 'not planted'}): {cause}"


def _replaced(values: Sequence[float], reach: int = 2) -> list[float]:
    return [float(value) for value in np.exp(without_lone_outliers(np.log(values), reach))]


def _near(night: int, nights: Sequence[int], reach: int = _SAME) -> bool:
    return min((abs(night - other) for other in nights), default=math.inf) <= reach


def _write(file: Path, values: Sequence[float]) -> None:
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(("time", "throughput"))
        writer.writerows(((_START + timedelta(days=night)).isoformat(), value) for night, value in enumerate(values))


if __name__ == "__main__":
    outlive_reader()
    sys.exit(main())
