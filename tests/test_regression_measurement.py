"""Laws of measurements: what a run is, what fails a build, what makes a number worthless."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import tyro

from dflash.config import ConfigError, RunConfig, Topology
from dflash.presets import preset
from diagnostics.gpu import Gpu, Snapshot
from regression.measurement import REQUIRED_KEYS, Measurement, invalid_reasons
from regression.spec import RunSpec, prepare_commands, topology, workload

# The last line of a real run of the preset tiny-cpu, shortened to what is read.
RECORDED: dict[str, Any] = json.loads(
    '{"preset": "tiny-cpu", "engine": "threads", "topology": "1t+2d", "steps": 12, "tokens": 22030, "tokens_per_second": 434.4,'
    ' "tokens_per_second_per_device": 144.8, "loss": 2.969, "recompiles_after_warmup": 0, "graph_breaks": 0, "fallbacks": 0,'
    ' "fx_errors": 0, "fx_error_messages": [], "checkpoint": "run/checkpoints/step-000012"}'
)


def measurement(*, returncode: int = 0, invalid: tuple[str, ...] = (), **changes: Any) -> Measurement:
    return Measurement(
        name="tiny-cpu on CPU, 12 steps", series="s", time="2026-01-01T00:00:00+00:00", seconds=60.0, returncode=returncode,
        result={**RECORDED, **changes}, fingerprint={"git": None}, invalid=invalid,
    )  # fmt: skip


def test_a_recorded_run_has_no_problem() -> None:
    assert measurement().problems() == []
    assert measurement().tokens_per_second == 434.4


@pytest.mark.parametrize("key", ["fx_errors", "recompiles_after_warmup", "fallbacks"])
def test_what_must_not_happen_is_a_problem(key: str) -> None:
    (problem,) = measurement(**{key: 3}, returncode=1).problems()
    assert problem.startswith("3 ")


@pytest.mark.parametrize("key", REQUIRED_KEYS)
def test_a_missing_number_is_a_problem(key: str) -> None:
    result = {name: value for name, value in RECORDED.items() if name != key}
    (problem,) = dataclasses.replace(measurement(), result=result).problems()
    assert problem == f"the result has no {key}"


@pytest.mark.parametrize("value", [0, -1.0, None, float("nan"), "434"])
def test_a_throughput_that_is_no_positive_number_is_a_problem(value: object) -> None:
    assert measurement(tokens_per_second=value).tokens_per_second is None
    assert len(measurement(tokens_per_second=value).problems()) == 1


def test_a_failing_exit_code_without_another_reason_is_a_problem() -> None:
    assert measurement(returncode=1).problems() == ["the run ended with exit code 1"]


def test_a_measurement_survives_json() -> None:
    one = measurement(invalid=("busy",))
    assert Measurement.from_dict(json.loads(json.dumps(one.to_dict()))) == one


def gpu(**changes: Any) -> Gpu:
    values: dict[str, Any] = {
        "index": 0, "name": "NVIDIA H200", "memory_total_bytes": 150 * 10**9, "memory_used_bytes": 0, "sm_clock_mhz": 1980,
        "sm_clock_max_mhz": 1980, "clock_event_bits": 0x4, "processes": (),
    }  # fmt: skip
    return Gpu(**{**values, **changes})


def reasons(gpus: int, *, before: Gpu | None = None, after: Gpu | None = None, busy_percent: float = 0.0) -> list[str]:
    looks = [Snapshot(driver="570.1", gpus=(one or gpu(),)) for one in (before, after)]
    spec = RunSpec(preset="p", gpus=gpus, steps=1)
    return invalid_reasons(spec, *looks, busy_percent=busy_percent)


def test_a_quiet_machine_is_valid() -> None:
    assert reasons(1) == []


def test_a_busy_machine_is_invalid() -> None:
    assert len(reasons(0, busy_percent=60.0)) == 1


def test_a_gpu_that_somebody_uses_is_invalid_for_gpu_runs_only() -> None:
    used = gpu(memory_used_bytes=5 * 2**30)
    (reason,) = reasons(1, before=used)
    assert "GPU 0 (5 GiB)" in reason
    assert reasons(0, before=used) == []


def test_a_throttled_gpu_is_invalid() -> None:
    (reason,) = reasons(1, after=gpu(clock_event_bits=0x40))
    assert "hardware thermal slowdown" in reason


def test_a_gpu_run_that_nvml_cannot_see_is_invalid() -> None:
    unseen = Snapshot(driver=None, gpus=(), unavailable="no NVML on this machine")
    assert invalid_reasons(RunSpec(preset="p", gpus=1, steps=1), unseen, unseen, busy_percent=0.0) == ["no NVML on this machine"]


@pytest.mark.parametrize("gpus", [0, 1, 2, 8])
def test_the_command_of_a_workload_is_one_that_the_trainer_accepts(gpus: int) -> None:
    spec = workload(gpus, data=Path("somewhere"), steps=7)
    _, *command = spec.command(Path("out"))
    assert command[:3] == ["-m", "dflash", "train"]
    config = tyro.cli(RunConfig, default=preset(spec.preset), args=command[3:])
    assert (config.preset, config.optim.steps, config.output) == (spec.preset, 7, Path("out"))
    used = Topology.parse(config.topology)
    assert gpus <= 1 or used.targets + used.drafters == gpus
    assert (config.data.path == Path("somewhere")) == (gpus == 0)


def test_gpus_are_split_five_to_three() -> None:
    assert [str(topology(gpus)) for gpus in (2, 4, 8)] == ["1t+1d", "2t+2d", "5t+3d"]
    with pytest.raises(ConfigError, match="1 GPUs cannot hold"):
        topology(1)


def test_steps_and_gpus_are_part_of_the_name_of_a_series() -> None:
    names = {workload(gpus, data=Path(), steps=steps).name for gpus in (0, 1) for steps in (5, 6)}
    assert len(names) == 4


def test_data_is_always_made_by_the_same_commands(tmp_path: Path) -> None:
    make, prepare = prepare_commands(tmp_path)
    assert make[1:3] == ["-m", "fixtures.stdlib_text"]
    assert prepare[1:4] == ["-m", "dflash", "prepare"]
    assert prepare_commands(tmp_path) == [make, prepare]
