"""Baseline commit against candidate on one machine, in turns: `python -m regression.ab --baseline COMMIT [--pairs 8]`.

A pair is two fresh training processes that run in turns, one standing still meanwhile (`regression.alternation`); an odd pair
begins with its baseline, an even one with its candidate. The baseline runs in a git worktree of its commit; in this Python where
both commits ask for the same packages (hash of constraints.txt and the dependencies in pyproject.toml), else in an environment
made for it once and kept. Each pair is one JSON line on standard output: {"number", "baseline", "candidate"} in tokens per second
per device. The last line is the gate's verdict (`regression.gate`), which asks for 8 pairs, and for 4 more up to 16 while they
decide nothing; `--pairs N` runs exactly N and looks once. A WIN measures the working tree and writes its new baseline.

An invalid pair is measured again, at most 3 times; then it is given up and no line is printed. Exit codes: 0 not slower,
1 slower or a run failed, 2 bad usage, 3 not decided. Known limit: packages without a version in constraints.txt may differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dflash.standard_output import outlive_reader
from regression import baseline, gate, measurement, validity
from regression.alternation import Build, BuildFailed, TurnsResult, run_in_turns
from regression.child import Place
from regression.gate import Pair
from regression.measurement import ATTEMPTS, Measurement
from regression.sides import CACHE, Side, SideError, Terminated, baseline_side
from regression.spec import RunSpec, planted, workload
from regression.verdict import Kind

TURNS = 6
CPU_SECONDS = 12.0  # of each side in a pair
TURNS_HELP = f"in which a side runs its seconds of a pair (default {TURNS})"
TOLERANCE_HELP = "loss that passes; failing begins at three quarters of it (default 0.02)"


class Pairs:
    """Measures pairs on demand: call it with the number of pairs wanted next, as often as a decision needs."""

    def __init__(
        self,
        sides: tuple[Side, Side],
        run: Callable[[Sequence[Side], str], TurnsResult],
        *,
        tell: Callable[[str], None],
    ) -> None:
        """`sides`: baseline, candidate. `run` runs a pair in the order of the sides, given a name for its files."""
        self._sides = sides
        self._run = run
        self._tell = tell
        self._number = 0
        self.given_up: list[str] = []

    def __call__(self, count: int) -> Iterator[Pair]:
        """The next `count` pairs, without those that were given up. Raises SideError when a side does not run."""
        for _ in range(count):
            self._number += 1
            rates = self._rates()
            if rates is None:
                self.given_up.append(f"pair {self._number}: not valid in {ATTEMPTS} attempts")
                self._tell(self.given_up[-1])
            else:
                yield Pair(number=self._number, baseline=rates["baseline"], candidate=rates["candidate"])

    def _rates(self) -> dict[str, float] | None:
        order = self._sides if self._number % 2 == 1 else self._sides[::-1]
        for attempt in range(1, ATTEMPTS + 1):
            found = self._run(order, f"{self._number:03}-{attempt}")
            if not found.invalid and len(found.rates) == len(order):
                return found.rates
            self._tell(f"pair {self._number}, attempt {attempt}: INVALID: {'; '.join(found.invalid) or 'no throughput'}")
        return None


def pair_workload(gpus: int, segment_seconds: float | None) -> RunSpec:
    """The workload of a pair; on a CPU longer than a measurement's segment, because it is divided into turns."""
    seconds = CPU_SECONDS if segment_seconds is None and gpus == 0 else segment_seconds
    return workload(gpus, segments=1, segment_seconds=seconds, environment=os.environ)


def in_turns(
    spec: RunSpec, directory: Path, *, turns: int, timeout_seconds: float, busy_counts: bool = False
) -> Callable[[Sequence[Side], str], TurnsResult]:
    """Runs a pair of sides, each for `spec.segment_seconds` in so many `turns`, keeping its files in `directory`.

    `busy_counts`: other processes on the CPUs make it no less valid.
    """

    def build(side: Side, name: str) -> Build:
        place = Place(directory=side.directory, variables={"PYTHONPATH": str(side.directory)})
        own = dataclasses.replace(spec, python=side.python, planted=(*spec.planted, *side.planted))
        return Build(name=side.name, spec=own, place=place, directory=directory / f"{name}-{side.name}")

    def run(order: Sequence[Side], name: str) -> TurnsResult:
        builds = [build(side, name) for side in order]
        seconds = spec.segment_seconds / turns
        try:
            found = run_in_turns(builds, turns=turns, turn_seconds=seconds, timeout_seconds=timeout_seconds)
        except BuildFailed as error:
            raise SideError(_does_not_run(error)) from error
        kept = [reason for reason in found.invalid if not (busy_counts and reason.startswith(validity.BUSY))]
        return dataclasses.replace(found, invalid=tuple(kept))

    return run


def compare(
    commit: str,
    spec: RunSpec,
    directory: Path,
    *,
    cache: Path,
    timeout_seconds: float,
    tell: Callable[[str], None],
    rule: gate.Rule = gate.DEFAULT,
    planted: tuple[str, ...] = (),
    busy_counts: bool = False,
    turns: int = TURNS,
    heard: Callable[[Pair], None] = lambda _: None,
) -> gate.Verdict:
    """The gate's verdict on the working tree in the current directory against `commit`, `heard` of every pair.

    `planted`: flags of the candidate only. Files of the runs go to `directory`. Raises SideError.
    """
    root = Path.cwd()
    with baseline_side(commit, root=root, cache=cache, tell=tell) as base:
        candidate = Side(name="candidate", directory=root, python=sys.executable, planted=planted)
        run = in_turns(spec, directory, turns=turns, timeout_seconds=timeout_seconds, busy_counts=busy_counts)
        pairs = Pairs((base, candidate), run, tell=tell)

        def next_pairs(count: int) -> Iterator[Pair]:
            for pair in pairs(count):
                heard(pair)
                yield pair

        return gate.decide(next_pairs, rule)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the pairs and the verdict."""
    options = _options(arguments)
    spec = pair_workload(options.gpus, options.segment_seconds)
    try:
        verdict = compare(
            options.baseline,
            spec,
            options.output,
            cache=options.cache,
            timeout_seconds=options.timeout_seconds,
            tell=_tell,
            rule=gate.rule_for(tolerance=options.tolerance, pairs=options.pairs),
            planted=planted(options.burn_share),
            busy_counts=options.busy_counts,
            turns=options.turns,
            heard=lambda pair: _print(dataclasses.asdict(pair)),
        )
    except SideError as error:
        _tell(f"error: {error}")
        return 1
    except Terminated:
        _tell("ended by SIGTERM; the worktree is removed")
        return 128 + signal.SIGTERM
    _print(dataclasses.asdict(verdict))
    _tell(verdict.sentence)
    if verdict.kind is Kind.WIN and not options.burn_share:
        _record(options)
    return verdict.kind.exit_code


def _record(options: argparse.Namespace) -> None:
    """Measure the working tree and write its baseline, ready to commit; says why where that cannot be."""
    spec = workload(options.gpus, segment_seconds=options.segment_seconds, environment=os.environ)

    def one(number: int, attempt: int) -> Measurement:
        directory = options.output / f"baseline-{number}-{attempt}"
        return measurement.measure(spec, directory, timeout_seconds=options.timeout_seconds)

    numbers = range(1, baseline.MEASUREMENTS + 1)
    _tell(f"measuring {len(numbers)} times for the new baseline")
    found = [measurement.measure_until_valid(partial(one, number), tell=_tell)[-1] for number in numbers]
    try:
        _tell(f"baseline written, commit it: {baseline.record(found, options.baselines)}")
    except baseline.BaselineError as error:
        _tell(str(error))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m regression.ab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--baseline", required=True, metavar="COMMIT", help="of the repository in the current directory")
    parser.add_argument("--pairs", type=int, metavar="N", help="exactly so many, one look (default: 8, then 12 and 16)")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs to use; 0 (default): the CPU workload")
    parser.add_argument("--segment-seconds", type=float, help="of each side in a pair (default 60 on GPUs, 12 on a CPU)")
    parser.add_argument("--turns", type=int, default=TURNS, metavar="N", help=TURNS_HELP)
    parser.add_argument("--output", type=Path, default=Path("runs/ab"), metavar="DIR", help="files of the runs (runs/ab)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="environments of baselines")
    parser.add_argument("--timeout-seconds", type=float, default=1500.0, help="of each process (default 1500)")
    parser.add_argument("--tolerance", type=float, default=gate.DEFAULT.tolerance, metavar="X", help=TOLERANCE_HELP)
    parser.add_argument(
        "--baselines", type=Path, default=baseline.DIRECTORY, metavar="DIR", help="where a WIN writes the new baseline"
    )
    parser.add_argument("--burn-share", type=float, default=0.0, metavar="X", help="plant a slowdown in the candidate")
    parser.add_argument(
        "--busy-counts", action="store_true", help="other processes on the CPUs make no pair INVALID: pairs share the noise"
    )
    options = parser.parse_args(arguments)
    seconds = options.segment_seconds
    if options.gpus < 0 or (seconds is not None and seconds <= 0):
        parser.error("--gpus and --segment-seconds: use positive numbers, or --gpus 0 for the CPU workload")
    if options.turns < 1:
        parser.error(f"--turns {options.turns}: use at least 1")
    if (options.pairs is not None and options.pairs < 2) or not 0 <= options.burn_share < 1:
        parser.error("--pairs: at least 2; --burn-share: at least 0 and below 1")
    if not 0 < options.tolerance < 1:
        parser.error(f"--tolerance {options.tolerance}: use a share above 0 and below 1, for instance 0.05 on a noisy machine")
    if options.output.exists() and any(options.output.iterdir()):
        parser.error(f"--output {options.output} is not empty: name a new directory")
    options.output = options.output.absolute()
    return options


def _does_not_run(error: BuildFailed) -> str:
    hint = ""
    if error.build.name == "baseline" and "--measure" in str(error) and "nrecognized" in str(error):
        hint = "\nThis commit cannot measure yet: choose a later one"
    return f"the {error.build.name} in {error.build.place.directory} failed, {error}{hint}"


def _print(values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def _tell(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    outlive_reader()
    sys.exit(main())
