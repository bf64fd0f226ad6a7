"""One measurement: a fresh process without probes, the machine beside it, and whether its throughput counts.

A *problem* (`regression.laws`) fails the build. A reason to be *invalid* (`regression.validity`) makes the throughput worthless,
neither pass nor fail.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from dflash.config import Topology
from diagnostics import environment
from regression import controls, validity
from regression.child import HERE, ChildFailed, Place, run_json
from regression.interval import batch_means
from regression.sampler import Sampler
from regression.spec import RunSpec, workers

ATTEMPTS = 3
_DERIVED = ("kind", "tokens_per_second", "tokens_per_second_per_device", "problems")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run, as stored."""

    name: str  # the workload
    series: str  # what must be equal for two numbers to be comparable: workload and fingerprint
    time: str  # UTC, ISO 8601
    seconds: float  # of the whole process
    returncode: int
    result: dict[str, Any]  # its last line; empty where it failed
    fingerprint: dict[str, Any]
    invalid: tuple[str, ...]  # reasons why the throughput does not count
    failure: dict[str, Any] | None = None  # type and message of what ended a run without a result
    state: dict[str, Any] = field(default_factory=dict)  # `validity.summary`
    controls: dict[str, float] = field(default_factory=dict)  # rates of `regression.controls`, mean of before and after
    interval: dict[str, Any] | None = None  # `interval.Interval` of tokens per second per device
    steps: dict[str, list[float]] = field(default_factory=dict)  # every step: see `dflash.measuring`

    def to_record(self) -> dict[str, Any]:
        """The measurement as a record of the store: JSON values."""
        rates = {"tokens_per_second": self.tokens_per_second, "tokens_per_second_per_device": self.per_device}
        values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self), allow_nan=False))
        return {"kind": "measurement", **values, **rates}

    @classmethod
    def from_record(cls, values: dict[str, Any]) -> Self:
        """Read back what `to_record` wrote. Raises TypeError or KeyError on anything else."""
        own = {key: value for key, value in values.items() if key not in _DERIVED}
        return cls(**{**own, "invalid": tuple(values["invalid"])})

    @property
    def tokens_per_second(self) -> float | None:
        """The throughput over all segments, None where the run has none."""
        return _positive(self._rates().get("tokens_per_second"))

    @property
    def per_device(self) -> float | None:
        """Tokens per second per GPU, or per worker thread on a CPU: the number that is judged."""
        return _positive(self._rates().get("tokens_per_second_per_device"))

    def _rates(self) -> dict[str, Any]:
        # Lines of the earlier history have the rate of the whole run only.
        rates: dict[str, Any] = self.result.get("measure", self.result)
        return rates


def measure(
    spec: RunSpec,
    directory: Path,
    *,
    timeout_seconds: float,
    place: Place = HERE,
    baseline_clock_mhz: float | None = None,
    with_controls: bool = True,
) -> Measurement:
    """Measure once, writing into the new directory `directory`. A run that leaves no result is a measurement with a failure."""
    directory.mkdir(parents=True)
    output, log = directory / "run", directory / "stderr.log"
    started, before = datetime.now(UTC).isoformat(timespec="seconds"), environment.fingerprint()
    speeds = [controls.run(spec, directory, "before") if with_controls else {}]
    result: dict[str, Any] = {}
    returncode, seconds, failure = 1, 0.0, None
    with Sampler(spec.visible if spec.gpus else None) as sampler:
        where = dataclasses.replace(place, variables={**place.variables, **spec.variables}, started=sampler.started)
        try:
            child = run_json(spec.command(output), log=log, timeout_seconds=timeout_seconds, place=where)
        except ChildFailed as error:
            failure = failure_of(output, error)
        else:
            result, returncode, seconds = child.result, child.returncode, child.seconds
    speeds.append(controls.run(spec, directory, "after") if with_controls else {})
    rates = controls.between(*speeds)
    shutil.rmtree(output / "checkpoints", ignore_errors=True)
    segments = result.get("measure", {}).get("segments") or []
    samples = validity.window(sampler.samples, segments[0]["began"], segments[-1]["ended"]) if segments else []
    after = environment.fingerprint()
    key = environment.series_key(before)
    invalid = [] if failure else validity.run_reasons(
        result, workers=_workers(result), key_before=key, key_after=environment.series_key(after)
    )  # fmt: skip
    if segments:
        invalid += validity.sample_reasons(
            sampler.before, samples, num_gpus=spec.gpus, baseline_clock_mhz=baseline_clock_mhz
        )  # fmt: skip
    steps = _steps(output)
    return Measurement(
        name=spec.name,
        series=f"{spec.name} [{key}]",
        time=started,
        seconds=seconds,
        returncode=returncode,
        result=result,
        fingerprint=before,
        invalid=tuple(invalid),
        failure=failure,
        state={
            **validity.summary(samples),
            "xids_unobserved": sampler.xids_unobserved,
            "controls_before_after": speeds,
            "controls_unobserved": None
            if rates or not with_controls
            else f"the control workloads failed: see {directory}/controls-*.log",
        },
        controls=rates,
        interval=_interval(steps, result),
        steps=steps,
    )


def measure_until_valid(
    one: Callable[[int], Measurement], *, attempts: int = ATTEMPTS, tell: Callable[[str], None]
) -> list[Measurement]:
    """Call `one` with 1, 2, ... until its throughput counts or the run failed, at most `attempts` times. The last one decides."""
    tried: list[Measurement] = []
    for attempt in range(1, attempts + 1):
        tried.append(one(attempt))
        if tried[-1].failure or not tried[-1].invalid:
            break
        tell(f"attempt {attempt} of {attempts} is INVALID: {'; '.join(tried[-1].invalid)}")
    return tried


def _workers(result: dict[str, Any]) -> list[str]:
    return workers(Topology.parse(result["topology"])) if "topology" in result else []


def failure_of(output: Path, error: ChildFailed) -> dict[str, Any]:
    """Type and message of what the run wrote about its end, or of what the parent saw."""
    try:
        written: dict[str, Any] = json.loads((output / "failure.json").read_text())
    except (OSError, ValueError):
        return {"type": type(error).__name__, "message": str(error)}
    return written


def _steps(output: Path) -> dict[str, list[float]]:
    try:
        steps: dict[str, list[float]] = json.loads((output / "steps.json").read_text())
    except (OSError, ValueError):
        return {}
    return steps


def _interval(steps: dict[str, list[float]], result: dict[str, Any]) -> dict[str, Any] | None:
    """The interval of tokens per second per device over the steps of all segments."""
    devices = result.get("measure", {}).get("num_devices")
    if not steps or not devices:
        return None
    durations = [now - before for before, now in itertools.pairwise([0.0, *steps["end_seconds"]])]
    chosen = [place for place, segment in enumerate(steps["segment"]) if segment >= 0]
    found = batch_means([durations[place] for place in chosen], [steps["tokens"][place] / devices for place in chosen])
    return dataclasses.asdict(found) if found else None


def _positive(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 < value < float("inf") else None
