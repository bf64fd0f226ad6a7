"""Baseline commit against candidate on one machine, in turns: `python -m regression.ab --baseline COMMIT [--pairs 8]`.

A segment is a fresh measuring process. Pairs run in the order AB BA AB BA ..., so that slow drift cancels: an odd pair has its
baseline first, an even one its candidate. The baseline runs in a git worktree of its commit; in this Python where both commits
ask for the same packages (hash of constraints.txt and the dependencies in pyproject.toml), else in an environment made for it
once and kept. Each pair is one JSON line on standard output: {"number", "baseline", "candidate"} in tokens per second per device.
The last line is the gate's verdict (`regression.gate`), which asks for 8 pairs, and for 4 more up to 16 while they decide
nothing; `--pairs N` runs exactly N and looks once.

An invalid segment is measured again, at most 3 times; then the pair is given up and no line is printed. Exit codes: 0 not
slower, 1 slower or a run failed, 2 bad usage, 3 not decided. Known limit: packages without a version in constraints.txt may
differ.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regression import gate, measurement, validity
from regression.child import Place
from regression.gate import Pair
from regression.measurement import ATTEMPTS, Measurement
from regression.spec import RunSpec, planted, workload

CACHE = Path.home() / ".cache/dflash-harness"  # environments of baselines
_GIT_SECONDS = 300
_INSTALL_SECONDS = 3600


class SideError(RuntimeError):
    """The baseline cannot be had, or one side does not run; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two builds."""

    name: str  # "baseline" or "candidate"
    directory: Path  # its code
    python: str
    planted: tuple[str, ...] = ()  # flags beside the workload's: a planted slowdown


class Pairs:
    """Measures pairs on demand: call it with the number of pairs wanted next, as often as a decision needs."""

    def __init__(
        self, sides: tuple[Side, Side], segment: Callable[[Side, int], Measurement], *, tell: Callable[[str], None]
    ) -> None:
        """`sides`: baseline, candidate. `segment` measures one of them, told how many segments ran before."""
        self._sides = sides
        self._segment = segment
        self._tell = tell
        self._number = self._segments = 0
        self.given_up: list[str] = []

    def __call__(self, count: int) -> Iterator[Pair]:
        """The next `count` pairs, without those that were given up. Raises SideError when a side does not run."""
        for _ in range(count):
            self._number += 1
            order = self._sides if self._number % 2 == 1 else self._sides[::-1]
            rates = {side.name: self._rate(side) for side in order}
            baseline, candidate = rates["baseline"], rates["candidate"]
            if baseline is None or candidate is None:
                self.given_up.append(f"pair {self._number}: no valid segment in {ATTEMPTS} attempts")
                self._tell(self.given_up[-1])
            else:
                yield Pair(number=self._number, baseline=baseline, candidate=candidate)

    def _rate(self, side: Side) -> float | None:
        for _ in range(ATTEMPTS):
            measured = self._segment(side, self._segments)
            self._segments += 1
            if measured.failure:
                raise SideError(_does_not_run(side, measured.failure))
            if not measured.invalid and measured.per_device is not None:
                return measured.per_device
            self._tell(f"{side.name}, segment {self._segments}: INVALID: {'; '.join(measured.invalid) or 'no throughput'}")
        return None


@contextlib.contextmanager
def baseline_side(commit: str, *, root: Path, cache: Path) -> Iterator[Side]:
    """The build of `commit` of the repository at `root`, for the length of the block. Raises SideError."""
    full = _git(root, "rev-parse", "--verify", f"{commit}^{{commit}}", what=f"{commit!r} is no commit of {root}")
    with tempfile.TemporaryDirectory(prefix="dflash-baseline-") as parent:
        directory = Path(parent) / full[:12]
        _git(root, "worktree", "add", "--detach", str(directory), full, what=f"cannot check out {full}")
        try:
            yield Side(name="baseline", directory=directory, python=environment_of(directory, root=root, cache=cache))
        finally:
            _git(root, "worktree", "remove", "--force", str(directory), what=f"cannot remove the worktree {directory}")


def environment_of(directory: Path, *, root: Path, cache: Path) -> str:
    """A Python with the packages that the code in `directory` asks for: this one, or one made once in `cache`."""
    wanted = dependencies_hash(directory)
    if wanted == dependencies_hash(root):
        return sys.executable
    environment = cache / wanted
    python = environment / "bin" / "python"
    if not (environment / "complete").exists():
        shutil.rmtree(environment, ignore_errors=True)
        constraints = directory / "constraints.txt"
        pinned = ["-c", str(constraints)] if constraints.exists() else []
        _install([sys.executable, "-m", "venv", str(environment)])
        _install([str(python), "-m", "pip", "install", "--quiet", *pinned, *_dependencies(directory)])
        (environment / "complete").touch()
    return str(python)


def dependencies_hash(directory: Path) -> str:
    """Of what a checkout asks for: equal hashes may share an environment."""
    constraints = directory / "constraints.txt"
    lines = constraints.read_text().splitlines() if constraints.exists() else []
    pinned = sorted(line for line in lines if line.strip() and not line.startswith("#"))
    return hashlib.sha256(json.dumps([pinned, _dependencies(directory)]).encode()).hexdigest()[:16]


def segment_of(
    spec: RunSpec, directory: Path, *, timeout_seconds: float, busy_counts: bool = False
) -> Callable[[Side, int], Measurement]:
    """Measures one segment of a side in a fresh process, keeping its files in `directory`.

    `busy_counts`: other processes on the CPUs make it no less valid.
    """

    def one(side: Side, number: int) -> Measurement:
        variables = {"PYTHONPATH": str(side.directory)}
        measured = measurement.measure(
            dataclasses.replace(spec, python=side.python, planted=(*spec.planted, *side.planted)),
            directory / f"{number:03}-{side.name}",
            timeout_seconds=timeout_seconds,
            place=Place(directory=side.directory, variables=variables),
            with_controls=False,  # the other side is the control
        )
        kept = [reason for reason in measured.invalid if not (busy_counts and reason.startswith(validity.BUSY))]
        return dataclasses.replace(measured, invalid=tuple(kept))

    return one


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
    heard: Callable[[Pair], None] = lambda _: None,
) -> gate.Verdict:
    """The gate's verdict on the working tree in the current directory against `commit`, `heard` of every pair.

    `planted`: flags of the candidate only. Files of the segments go to `directory`. Raises SideError.
    """
    root = Path.cwd()
    with baseline_side(commit, root=root, cache=cache) as baseline:
        candidate = Side(name="candidate", directory=root, python=sys.executable, planted=planted)
        segment = segment_of(spec, directory, timeout_seconds=timeout_seconds, busy_counts=busy_counts)
        pairs = Pairs((baseline, candidate), segment, tell=tell)

        def next_pairs(count: int) -> Iterator[Pair]:
            for pair in pairs(count):
                heard(pair)
                yield pair

        return gate.decide(next_pairs, rule)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the pairs and the verdict."""
    options = _options(arguments)
    spec = workload(options.gpus, segments=1, segment_seconds=options.segment_seconds, environment=os.environ)
    try:
        verdict = compare(
            options.baseline,
            spec,
            options.output,
            cache=options.cache,
            timeout_seconds=options.timeout_seconds,
            tell=_tell,
            rule=gate.Rule(first_pairs=options.pairs, max_pairs=options.pairs) if options.pairs else gate.DEFAULT,
            planted=planted(options.burn_share),
            busy_counts=options.busy_counts,
            heard=lambda pair: _print(dataclasses.asdict(pair)),
        )
    except SideError as error:
        _tell(f"error: {error}")
        return 1
    _print(dataclasses.asdict(verdict))
    _tell(verdict.sentence)
    return verdict.kind.exit_code


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m regression.ab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--baseline", required=True, metavar="COMMIT", help="of the repository in the current directory")
    parser.add_argument("--pairs", type=int, metavar="N", help="exactly so many, one look (default: 8, then 12 and 16)")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs to use; 0 (default): the CPU workload")
    parser.add_argument("--segment-seconds", type=float, help="default 60 on GPUs, 5 on a CPU")
    parser.add_argument("--output", type=Path, default=Path("runs/ab"), metavar="DIR", help="files of the segments (runs/ab)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="environments of baselines")
    parser.add_argument("--timeout-seconds", type=float, default=1500.0, help="of each process (default 1500)")
    parser.add_argument("--burn-share", type=float, default=0.0, metavar="X", help="plant a slowdown in the candidate")
    parser.add_argument(
        "--busy-counts", action="store_true", help="other processes on the CPUs make no segment INVALID: pairs share the noise"
    )
    options = parser.parse_args(arguments)
    seconds = options.segment_seconds
    if options.gpus < 0 or (seconds is not None and seconds <= 0):
        parser.error("--gpus and --segment-seconds: use positive numbers, or --gpus 0 for the CPU workload")
    if (options.pairs is not None and options.pairs < 2) or not 0 <= options.burn_share < 1:
        parser.error("--pairs: at least 2; --burn-share: at least 0 and below 1")
    if options.output.exists() and any(options.output.iterdir()):
        parser.error(f"--output {options.output} is not empty: name a new directory")
    options.output = options.output.absolute()
    return options


def _dependencies(directory: Path) -> list[str]:
    try:
        content: dict[str, Any] = tomllib.loads((directory / "pyproject.toml").read_text())
        return sorted(content["project"]["dependencies"])
    except (OSError, tomllib.TOMLDecodeError, KeyError) as error:
        raise SideError(f"{directory} has no pyproject.toml with project.dependencies ({error})") from error


def _install(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_INSTALL_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SideError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise SideError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _git(root: Path, *arguments: str, what: str) -> str:
    git = shutil.which("git")
    if git is None:
        raise SideError("a baseline commit needs git, which is not installed")
    done = subprocess.run((git, *arguments), cwd=root, capture_output=True, text=True, check=False, timeout=_GIT_SECONDS)
    if done.returncode != 0:
        raise SideError(f"{what}: {done.stderr.strip()}")
    return done.stdout.strip()


def _does_not_run(side: Side, failure: dict[str, Any]) -> str:
    hint = ""
    if side.name == "baseline" and "--measure" in failure["message"] and "nrecognized" in failure["message"]:
        hint = "\nThis commit cannot measure yet: choose a later one"
    return f"the {side.name} in {side.directory} failed, {failure['type']}: {failure['message']}{hint}"


def _print(values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def _tell(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
