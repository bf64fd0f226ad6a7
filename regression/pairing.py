"""Pairs at the front of pytest: the options of `--baseline-commit REV`, and the comparison that they ask for.

`pytest regression/ --baseline-commit REV` judges the throughput by `regression.ab` instead of by stored measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from regression import ab, gate
from regression.sides import CACHE, SideError, full_commit
from regression.spec import planted
from regression.verdict import Kind


def add_options(group: pytest.OptionGroup) -> None:
    """`--baseline-commit` and what belongs to it."""
    group.addoption("--baseline-commit", metavar="REV", help="compare with this commit in pairs, not with stored measurements")
    group.addoption("--pairs", type=int, metavar="N", help="with --baseline-commit: exactly so many (default: 8, then 12 and 16)")
    group.addoption("--tolerance", type=float, default=gate.DEFAULT.tolerance, metavar="X", help=f"of pairs: {ab.TOLERANCE_HELP}")
    group.addoption("--busy-counts", action="store_true", help="of pairs: other processes on the CPUs make no pair INVALID")
    group.addoption("--turns", type=int, default=ab.TURNS, metavar="N", help=f"of pairs: {ab.TURNS_HELP}")


def check_options(config: pytest.Config) -> None:
    """Raises ValueError on impossible figures, SideError where the commit is none of the repository in the current directory."""
    if (config.getoption("--pairs") or 2) < 2:
        raise ValueError(f"--pairs {config.getoption('--pairs')}: use at least 2")
    if not 0 < config.getoption("--tolerance") < 1:
        raise ValueError(f"--tolerance {config.getoption('--tolerance')}: use a share above 0 and below 1, for instance 0.05")
    if config.getoption("--turns") < 1:
        raise ValueError(f"--turns {config.getoption('--turns')}: use at least 1")
    commit = config.getoption("--baseline-commit")
    if commit and config.getoption("--record-baseline"):
        raise ValueError("--record-baseline and --baseline-commit exclude each other: a WIN writes the baseline itself")
    if commit:
        full_commit(commit, root=Path.cwd())


def compare(config: pytest.Config, directory: Path, *, timeout_seconds: float, tell: Callable[[str], None]) -> gate.Verdict:
    """The gate's verdict on the working tree; INSUFFICIENT with the reason where a side does not run."""
    option = config.getoption
    try:
        return ab.compare(
            option("--baseline-commit"),
            ab.pair_workload(option("--gpus"), option("--segment-seconds")),
            directory,
            cache=CACHE,
            timeout_seconds=timeout_seconds,
            tell=tell,
            rule=gate.rule_for(tolerance=option("--tolerance"), pairs=option("--pairs")),
            planted=planted(option("--burn-share")),
            busy_counts=option("--busy-counts"),
            turns=option("--turns"),
            heard=lambda one: tell(f"pair {one.number}: {one.baseline:,.1f} baseline, {one.candidate:,.1f} candidate"),
        )
    except SideError as error:
        sentence = f"INSUFFICIENT: the comparison did not run: {error}"
        return gate.Verdict(kind=Kind.INSUFFICIENT, loss=None, interval=None, p=None, pairs=0, sentence=sentence)
