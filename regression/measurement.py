"""One measurement: the result of a fresh process, where it was taken, what is wrong with it, and whether it counts.

A *problem* (FX error, recompile, fallback) fails the build. A reason to be *invalid* (throttled, shared machine) makes the
throughput worthless, neither pass nor fail.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import psutil

from diagnostics import environment, gpu
from regression.child import run_json, run_to_success
from regression.spec import RunSpec, prepare_commands

REQUIRED_KEYS = (
    "preset",
    "engine",
    "topology",
    "steps",
    "tokens",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "loss",
    "recompiles_after_warmup",
    "fallbacks",
    "fx_errors",
    "checkpoint",
)
_COUNTED = {"fx_errors": "FX errors", "recompiles_after_warmup": "recompiles after the warm-up", "fallbacks": "fallbacks"}
_BUSY_PERCENT = 25.0
_FOREIGN_GPU_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run, as stored."""

    name: str  # the workload
    series: str  # what must be equal for two numbers to be comparable: workload and fingerprint
    time: str  # UTC, ISO 8601
    seconds: float  # of the whole process
    returncode: int
    result: dict[str, Any]
    fingerprint: dict[str, Any]
    invalid: tuple[str, ...]  # reasons why the throughput does not count

    def to_dict(self) -> dict[str, Any]:
        """The measurement as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read back what `to_dict` wrote. Raises TypeError or KeyError on anything else."""
        return cls(**{**values, "invalid": tuple(values["invalid"])})

    @property
    def tokens_per_second(self) -> float | None:
        """The throughput, None where the run has none."""
        value = self.result.get("tokens_per_second")
        return float(value) if isinstance(value, int | float) and math.isfinite(value) and value > 0 else None

    def problems(self) -> list[str]:
        """What fails a build, one sentence each."""
        missing = [key for key in REQUIRED_KEYS if key not in self.result]
        found = [f"the result has no {', '.join(missing)}"] if missing else []
        for key, words in _COUNTED.items():
            if self.result.get(key, 0) != 0:
                details = self.result.get("fx_error_messages") if key == "fx_errors" else None
                found.append(f"{self.result[key]} {words}" + (f": {'; '.join(details)}" if details else ""))
        if not missing and self.tokens_per_second is None:
            found.append(f"tokens_per_second is {self.result['tokens_per_second']!r}: nothing was trained")
        if self.returncode != 0 and not found:
            found.append(f"the run ended with exit code {self.returncode}")
        return found


def prepare_data(directory: Path, *, timeout_seconds: float) -> Path:
    """The data of the CPU workload in `directory`, made once and kept: all nights train on the same. Raises ChildFailed."""
    made = directory / "data.made"
    if not made.exists():
        for name, command in zip(("prompts", "prepare"), prepare_commands(directory), strict=True):
            run_to_success(command, log=directory / f"{name}.log", timeout_seconds=timeout_seconds)
        made.touch()
    return directory / "data"


def measure(spec: RunSpec, directory: Path, *, timeout_seconds: float) -> Measurement:
    """Train in a fresh process, writing into the new directory `directory`. Raises ChildFailed when it leaves no result."""
    directory.mkdir(parents=True)
    before, busy = gpu.snapshot(), psutil.cpu_percent(interval=1.0)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    child = run_json(spec.command(directory / "run"), log=directory / "stderr.log", timeout_seconds=timeout_seconds)
    where = environment.fingerprint()
    return Measurement(
        name=spec.name,
        series=f"{spec.name} [{environment.series_key(where)}]",
        time=started,
        seconds=child.seconds,
        returncode=child.returncode,
        result=child.result,
        fingerprint=where,
        invalid=tuple(invalid_reasons(spec, before, gpu.snapshot(), busy_percent=busy)),
    )


def invalid_reasons(spec: RunSpec, before: gpu.Snapshot, after: gpu.Snapshot, *, busy_percent: float) -> list[str]:
    """Why a throughput taken between the two looks does not count. `busy_percent`: CPU use just before the run."""
    reasons = []
    if busy_percent > _BUSY_PERCENT:
        reasons.append(f"other processes used {busy_percent:.0f} % of the CPUs before the run (limit {_BUSY_PERCENT:.0f} %)")
    if spec.gpus == 0:
        return reasons
    if before.unavailable or after.unavailable:
        reasons.append(before.unavailable or after.unavailable or "")
    # The look is of the whole machine: NVML numbers GPUs differently from CUDA, so that any of them may be ours.
    used = [f"GPU {one.index} ({one.memory_used_bytes / 2**30:.0f} GiB)" for one in before.gpus if _in_use(one)]
    if used:
        reasons.append(f"memory was in use before the run on {', '.join(used)}")
    slow = [f"GPU {one.index}: {', '.join(one.slowdowns)}" for one in after.gpus if one.slowdowns]
    if slow:
        reasons.append(f"slowed down right after the run: {'; '.join(slow)}")
    return reasons


def _in_use(one: gpu.Gpu) -> bool:
    return one.memory_used_bytes > _FOREIGN_GPU_BYTES
