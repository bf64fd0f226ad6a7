"""The trainer as a child process, for benches of whole runs: measured, and without checkpoints."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regression.bench.settings import Settings
from regression.child import HERE, ChildFailed, Place, run_to_success
from regression.cold_starts import FULL_SPEED

TIMEOUT_SECONDS = 280.0
STEPS = 1_000_000  # a measuring run ends after its segments


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that ended."""

    started: float  # wall clock, in seconds
    result: dict[str, Any]  # the trainer's result line
    events: tuple[dict[str, Any], ...]

    @property
    def tokens_per_second(self) -> float:
        """Of the measured segments. Raises ChildFailed where there are none."""
        rate = self.result["measure"]["tokens_per_second"]
        if rate is None:
            raise ChildFailed(f"the run was not measured: {self.result['measure']['incomplete']}")
        return float(rate)

    @property
    def seconds_to_full_speed(self) -> float:
        """From the start of the process to the end of the first step of at least 90 % of the steady rate (median, last half)."""
        steps = [(e["time_seconds"], e["fields"]["tokens_per_second"]) for e in self.events if e["name"] == "step"]
        steady = statistics.median(rate for _, rate in steps[len(steps) // 2 :])
        return float(next(moment for moment, rate in steps if rate >= FULL_SPEED * steady) - self.started)

    def phases(self) -> dict[str, float]:
        """Seconds from the start of the process to the beginning of each phase that the trainer reports."""
        found: dict[str, float] = {}
        for event in self.events:
            if event["name"] == "phase":
                found.setdefault(event["fields"]["text"], event["time_seconds"] - self.started)
        return found


def train(
    settings: Settings,
    directory: Path,
    *,
    seconds: float,
    segments: int = 1,
    cache: Path | None = None,
    before: Sequence[str] = (),
    more: Sequence[str] = (),
    place: Place = HERE,
) -> Run:
    """Train in a fresh process for `segments` segments of `seconds` once it is steady; files go to the new `directory`.

    Compiled code is kept in `cache`, or where torch keeps it, warm if other benches have run. `before` stands between Python
    and the trainer's module, `more` after its flags, which it overrides.
    Raises ChildFailed on any exit code but 0, or without a result.
    """
    directory.mkdir(parents=True)
    run = directory / "run"
    command = [sys.executable, *before, "-m", "dflash", "train", *settings.train_flags(), *more, "--output", str(run)]
    command += ["--optim.steps", str(STEPS), "--measure", *(("--compile.cache", str(cache)) if cache else ())]
    command += ["--measure.segments", str(segments), "--measure.segment-seconds", str(seconds)]
    started = time.time()
    try:
        run_to_success(command, log=directory / "stderr.log", timeout_seconds=TIMEOUT_SECONDS, place=place)
    except ChildFailed:
        if not (run / "result.json").exists():  # fxprobe's exit code tells of findings, which are not the question here
            raise
    events = tuple(json.loads(line) for line in (run / "events.jsonl").read_text().splitlines())
    return Run(started=started, result=json.loads((run / "result.json").read_text()), events=events)
