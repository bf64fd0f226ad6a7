"""A night below its limit is compared with a baseline commit in the same night: which commit, and what the gate says."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regression import ab
from regression.history import History, nights
from regression.measurement import Measurement
from regression.sides import CACHE
from regression.spec import workload
from regression.verdict import Kind
from regression.watch import replay

_GIT_SECONDS = 60


def baseline_commit(measured: Measurement, history: History) -> tuple[str | None, str]:
    """The commit of the newest night of the present level that passed, or None and why there is none.

    The first valid night of a level counts as passed. A night of a working tree with changes has no commit.
    """
    commits = {
        one.time: str(git["commit"])
        for one in history.of(measured.series)
        if one.time != measured.time and (git := one.fingerprint.get("git")) and not git.get("dirty")
    }
    for verdict in reversed(replay(nights(history, measured.series, tonight=measured))):
        time = verdict.night.time.isoformat(timespec="seconds")
        if verdict.kind in {Kind.PASS, Kind.INSUFFICIENT} and time in commits:
            commit = commits[time]
            if _is_here(commit):
                return commit, ""
            return None, f"{commit[:12]}, the commit of the newest night that passed, is not in this repository"
        if verdict.night.accepted:
            break
    return None, "no earlier night of this level passed with a clean commit"


def run_gate(
    commit: str,
    directory: Path,
    *,
    gpus: int,
    segment_seconds: float | None,
    timeout_seconds: float,
    planted: tuple[str, ...],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """The gate's verdict on the working tree against `commit`, as JSON values. Raises SideError."""
    spec = workload(gpus, segments=1, segment_seconds=segment_seconds, environment=os.environ)
    verdict = ab.compare(
        commit, spec, directory, cache=CACHE, timeout_seconds=timeout_seconds, tell=tell, planted=planted,
        heard=lambda pair: tell(f"pair {pair.number}: {pair.baseline:,.1f} baseline, {pair.candidate:,.1f} candidate"),
    )  # fmt: skip
    return {**dataclasses.asdict(verdict), "baseline": commit}


def _is_here(commit: str) -> bool:
    git = shutil.which("git")
    if git is None:
        return False
    command = (git, "cat-file", "-e", f"{commit}^{{commit}}")
    return subprocess.run(command, capture_output=True, check=False, timeout=_GIT_SECONDS).returncode == 0
