"""Operating characteristics of the gate and the watch: `python -m regression.simulate [--json FILE] [--seed N]`, seconds.

What decides here is the production code (`gate.decide`, `watch.replay`); only the throughputs are invented:

- A night is ln T = an AR(1) process with marginal sd 1 % and lag-1 correlation 0.3; 3 % of the nights are outliers, slower by
  5 to 15 % (uniform). Each history has 30 nights before the nights that are counted.
- A segment is ln T = noise with sd 0.5 %, independent, plus a drift of 0.1 % a segment over the session in the order ABBA.
- The gate of a suspect night compares baseline and candidate on that night's machine: an outlier night slows both.

An *alarm* is the first FAIL of a row of FAILs. A change is *caught within 2 nights* when one of its first two nights is FAIL.

`regression.simulate_machine` has the lines about a machine whose speed wanders, with and without control workloads.

The bounds hold for the rules as they are used. Two of them cannot be met otherwise, and the table shows by how much:

- The gate with a FAIL threshold equal to the tolerance finds a true loss of 2 % with probability 0.65: see `regression.gate`.
- The watch without a gate in the same night (no baseline build). Two outlier nights in a row alone are 0.09 alarms per 100
  nights, and both nights of a -5 % change lie below a limit estimated from 30 nights in 0.90 of all cases. When 4 of 5
  outliers are INVALID (throttled, shared machine), alarms fall to 0.05; 0.90 stays. So a suspect night asks for the gate.

Exit codes: 0 all bounds met, 1 a bound missed, 2 bad usage. A bound is met when the simulated value meets it; the Monte-Carlo
standard error is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from dflash.standard_output import outlive_reader
from regression import gate, watch
from regression import simulate_machine as wandering
from regression.gate import Pair, Rule
from regression.verdict import Kind
from regression.watch import Night

NIGHT_SD, CORRELATION, OUTLIERS = 0.01, 0.3, 0.03
SEGMENT_SD, DRIFT = 0.005, 0.001
_HISTORY = watch.WINDOW
_SERIES, _WATCHED, _STEPS, _GATES = 300, 250, 1000, 2000
_FRONTS, _MACHINES, _WANDERING_NIGHTS = 1000, 60, 100
_START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the table."""

    name: str
    value: float
    error: float  # Monte-Carlo standard error of the value
    at_most: float | None = None
    at_least: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the bound is met; None where the line has none."""
        if self.at_most is not None:
            return self.value <= self.at_most
        return None if self.at_least is None else self.value >= self.at_least


def gate_rate(
    rule: Rule,
    loss: float,
    kind: Kind,
    generator: np.random.Generator,
    runs: int | None = None,
    *,
    segment_sd: float = SEGMENT_SD,
) -> tuple[float, float]:
    """How often the gate says `kind` when the candidate is slower by `loss`, and the standard error."""
    runs = runs or _GATES
    found = sum(gate.decide(source(loss, generator, segment_sd), rule).kind is kind for _ in range(runs))
    return _share(found, runs)


def source(loss: float, generator: np.random.Generator, segment_sd: float = SEGMENT_SD) -> Callable[[int], list[Pair]]:
    """Pairs of segments in ABBA order, with noise and drift."""
    done = 0

    def next_pairs(count: int) -> list[Pair]:
        nonlocal done
        noise = generator.normal(0, segment_sd, size=(count, 2))
        pairs = []
        for number, (baseline, candidate) in enumerate(noise.tolist(), start=done + 1):
            first, second = -DRIFT * 2 * number, -DRIFT * (2 * number + 1)
            drift = (first, second) if number % 2 else (second, first)
            pairs.append(
                Pair(number=number, baseline=math.exp(baseline + drift[0]), candidate=(1 - loss) * math.exp(candidate + drift[1]))
            )
        done += count
        return pairs

    return next_pairs


def throughputs(
    series: int,
    nights: int,
    generator: np.random.Generator,
    *,
    loss: float = 0.0,
    since: int = 0,
    outliers: float = OUTLIERS,
    correlation: float = CORRELATION,
) -> list[list[float]]:
    """Simulated series, slower by `loss` from night `since` on."""
    noise = generator.normal(size=(series, nights)) * NIGHT_SD
    for night in range(1, nights):
        noise[:, night] = correlation * noise[:, night - 1] + math.sqrt(1 - correlation**2) * noise[:, night]
    outlier = generator.random((series, nights)) < outliers
    values = np.exp(noise) * np.where(outlier, 1 - generator.uniform(0.05, 0.15, (series, nights)), 1.0)
    values[:, since:] *= 1 - loss
    return [[float(value) for value in row] for row in values]


def kinds(values: Sequence[float], since: int, loss: float, generator: np.random.Generator | None) -> list[Kind]:
    """Verdicts of the watch about the nights from `since` on. With a generator the gate runs in each night that asks for it."""
    nights = [Night(series="simulated", time=_START + timedelta(days=day), value=value) for day, value in enumerate(values)]
    while True:
        verdicts = watch.replay(nights)
        asking = [day for day in range(since, len(nights)) if verdicts[day].wants_gate]
        if generator is None or not asking:
            return [verdict.kind for verdict in verdicts[since:]]
        for day in asking:  # at once: the watch ignores a gate's verdict about a night that turns out not to be below
            nights[day] = replace(nights[day], gate=gate.decide(source(loss, generator)).kind)


def alarm_rate(generator: np.random.Generator, *, gated: bool, outliers: float = OUTLIERS) -> tuple[float, float]:
    """Alarms per 100 nights when nothing changed, and the standard error over series."""
    counts = []
    for values in throughputs(_SERIES, _HISTORY + _WATCHED, generator, outliers=outliers):
        found = kinds(values, _HISTORY, 0.0, generator if gated else None)
        counts.append(sum(kind is Kind.FAIL and before is not Kind.FAIL for before, kind in _pairs(found)))
    rates = np.array(counts) * 100 / _WATCHED
    return float(rates.mean()), max(float(rates.std(ddof=1) / math.sqrt(_SERIES)), 100 / (_SERIES * _WATCHED))


def catch_rate(loss: float, generator: np.random.Generator, *, gated: bool) -> tuple[float, float]:
    """How often a fall by `loss` is FAIL on its first or second night, and the standard error."""
    series = throughputs(_STEPS, _HISTORY + 2, generator, loss=loss, since=_HISTORY)
    caught = sum(Kind.FAIL in kinds(values, _HISTORY, loss, generator if gated else None) for values in series)
    return _share(caught, _STEPS)


def simulate(seed: int) -> Iterator[Result]:
    """All lines of the table."""
    generator = np.random.default_rng(seed)
    with_gate, alone = "watch and gate", "watch alone"
    yield _result(f"{with_gate}: alarms per 100 nights", alarm_rate(generator, gated=True), at_most=0.1)
    yield _result(f"{with_gate}: -5 % caught within 2 nights", catch_rate(0.05, generator, gated=True), at_least=0.95)
    yield _result("gate: -2 % found", gate_rate(gate.DEFAULT, 0.02, Kind.FAIL, generator), at_least=0.95)
    eight = replace(gate.DEFAULT, max_pairs=8)
    yield _result("gate of 8 pairs, no more: -2 % found", gate_rate(eight, 0.02, Kind.FAIL, generator), at_least=0.95)
    yield _result("gate: equal builds fail", gate_rate(gate.DEFAULT, 0.0, Kind.FAIL, generator), at_most=0.005)
    significance = replace(gate.DEFAULT, fail_loss=1e-12)
    yield _result("gate, p alone: equal builds fail", gate_rate(significance, 0.0, Kind.FAIL, generator), at_most=0.005)
    yield _result("gate: equal builds pass", gate_rate(gate.DEFAULT, 0.0, Kind.PASS, generator))
    yield _result("gate: -2 % passes", gate_rate(gate.DEFAULT, 0.02, Kind.PASS, generator), at_most=gate.DEFAULT.pass_alpha)
    for threshold in (0.02, 0.015, 0.01):
        rule = replace(gate.DEFAULT, fail_loss=threshold)
        for loss in (0.02, 0.01):
            name = f"gate that fails from {threshold:.1%}: -{loss:.0%} fails"
            yield _result(name, gate_rate(rule, loss, Kind.FAIL, generator))
    yield _result(f"{alone}: alarms per 100 nights", alarm_rate(generator, gated=False))
    few = alarm_rate(generator, gated=False, outliers=OUTLIERS / 5)
    yield _result(f"{alone}, 4 of 5 outliers INVALID: alarms per 100 nights", few)
    for loss in (0.03, 0.05, 0.1):
        yield _result(f"{alone}: -{loss:.0%} caught within 2 nights", catch_rate(loss, generator, gated=False))
    yield from simulate_machine(generator)


def simulate_machine(generator: np.random.Generator) -> Iterator[Result]:
    """The lines about a machine whose speed wanders (`regression.simulate_machine`)."""

    def front(kinds: set[Kind], loss: float, machine: float, *, controls: bool = True, sd: float = 0.01) -> tuple[float, float]:
        found = [wandering.front_kind(loss, machine, generator, controls=controls, sd=sd) for _ in range(_FRONTS)]
        return _share(sum(kind in kinds for kind in found), _FRONTS)

    fails, counts = {Kind.FAIL}, {Kind.PASS}
    yield _result("front: equal code fails", front(fails, 0.0, 1.0), at_most=0.01)
    yield _result("front, machine 10 % slower: equal code fails", front(fails, 0.0, 0.9), at_most=0.01)
    yield _result("the same without controls", front(fails, 0.0, 0.9, controls=False))
    yield _result("front: -10 % fails", front(fails, 0.1, 1.0), at_least=0.9)
    yield _result("front, machine 10 % slower: -10 % fails", front(fails, 0.1, 0.9), at_least=0.9)
    yield _result("front, machine 10 % faster: -10 % passes", front(counts, 0.1, 1.1), at_most=0.1)
    yield _result("the same without controls", front(counts, 0.1, 1.1, controls=False))
    yield _result("front, noise of 5 %: equal code fails", front(fails, 0.0, 1.0, sd=0.05), at_most=0.01)
    yield _result("front, noise of 5 %: -10 % fails", front(fails, 0.1, 1.0, sd=0.05))
    for loss, bound in ((0.0, 0.005), (0.1, None)):
        runs = _GATES * (1 if loss else 10)  # the share of alarms is close to its bound: the noise alone decides there
        rate = gate_rate(gate.DEFAULT, loss, Kind.FAIL, generator, runs, segment_sd=0.05)
        yield _result(f"gate, segments of 5 % noise: -{loss:.0%} fails", rate, at_most=bound)
    for controls in (True, False):
        found = [wandering.alarms(generator, controls=controls, watched=_WANDERING_NIGHTS) for _ in range(_MACHINES)]
        name = f"wandering machine, watch {'with' if controls else 'without'} controls"
        yield _result(f"{name}: alarms per 100 nights", _per_100([one for one, _ in found]), at_most=0.2 if controls else None)
        yield _result(f"{name}: undecided nights of 100", _per_100([one for _, one in found]))


def _per_100(counts: Sequence[int]) -> tuple[float, float]:
    """Of counts in simulated machines: per 100 nights, and the standard error."""
    rates = np.array(counts) * 100 / _WANDERING_NIGHTS
    return float(rates.mean()), max(float(rates.std(ddof=1) / math.sqrt(_MACHINES)), 100 / (_MACHINES * _WANDERING_NIGHTS))


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, show, decide."""
    parser = argparse.ArgumentParser(
        prog="python -m regression.simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON, too")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers (default 0)")
    options = parser.parse_args(arguments)
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: there is no directory {options.json.parent}")
    results = list(simulate(options.seed))
    Console(width=None if sys.stdout.isatty() else 120).print(_table(results))
    if options.json:
        lines = [{**asdict(result), "met": result.met} for result in results]
        options.json.write_text(json.dumps({"seed": options.seed, "results": lines}, indent=1) + "\n")
    return int(any(result.met is False for result in results))


def _table(results: Sequence[Result]) -> Table:
    table = Table(title="Operating characteristics", title_justify="left")
    for header in ("quantity", "bound", "value", "error", "met"):
        table.add_column(header)
    for result in results:
        bound = f"<= {result.at_most:g}" if result.at_most is not None else ""
        bound = f">= {result.at_least:g}" if result.at_least is not None else bound
        met = {True: "[green]yes[/]", False: "[bold red]NO[/]", None: ""}[result.met]
        table.add_row(result.name, bound, f"{result.value:.4f}", f"{result.error:.4f}", met)
    return table


def _result(name: str, measured: tuple[float, float], *, at_most: float | None = None, at_least: float | None = None) -> Result:
    return Result(name=name, value=measured[0], error=measured[1], at_most=at_most, at_least=at_least)


def _share(found: int, runs: int) -> tuple[float, float]:
    """A share and its standard error; with none or all found, the error of one more or less (at least 1/runs)."""
    share = found / runs
    return share, max(math.sqrt(share * (1 - share) / runs), 1 / runs)


def _pairs(found: Sequence[Kind]) -> Iterator[tuple[Kind | None, Kind]]:
    return zip((None, *found[:-1]), found, strict=True)


if __name__ == "__main__":
    outlive_reader()
    sys.exit(main())
