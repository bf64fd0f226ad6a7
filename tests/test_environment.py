"""Laws of diagnostics.environment and diagnostics.gpu."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from diagnostics import environment, gpu

STORED = {
    "machine": "x86_64", "cpu": "AMD EPYC 9654", "cores": 96, "logical_cores": 192, "memory_gib": 1511,
    "gpus": [{"name": "NVIDIA H200", "memory_gib": 140}] * 8, "gpus_unavailable": None, "driver": "570.124.06",
    "cuda_visible_devices": None, "cuda": "12.8",
    "torch_git": "70d99e998b4955e0049d13a98d77ae1b14db1f45", "python": "3.12.3", "system": "Linux", "omp_num_threads": None,
    "packages": {"torch": "2.11.0+cu128", "triton": "3.6.0", "transformers": "5.8.1", "numpy": "2.4.6"},
    "git": {"commit": "0" * 40, "dirty": False}, "host": "0123456789ab",
}  # fmt: skip


@pytest.fixture(scope="module")
def values() -> Iterator[dict[str, Any]]:
    """A fingerprint, made where the host has a name that stands nowhere else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "planted-host")
        yield environment.fingerprint()


def test_the_series_of_stored_nights_stays_what_it_was(values: dict[str, Any]) -> None:
    assert environment.series_key(STORED) == "dcd042b0a90f"
    later = {**STORED, **{name: value for name, value in values.items() if name not in STORED}}
    assert environment.series_key(later) == "dcd042b0a90f"


def test_a_fingerprint_is_json_and_names_no_machine(values: dict[str, Any]) -> None:
    text = json.dumps(values, allow_nan=False)
    assert json.loads(text) == values
    assert "planted-host" not in text
    assert values["packages"]["torch"] == importlib.metadata.version("torch")
    assert values["torch_git"] == torch.version.git_version


def test_commit_and_host_are_recorded_but_do_not_split_a_series(values: dict[str, Any]) -> None:
    other = {**values, "git": {"commit": "0" * 40, "dirty": True}, "host": "another"}
    assert environment.series_key(other) == environment.series_key(values)


@pytest.mark.parametrize(
    "change",
    [{"cpu": "another"}, {"torch_git": "f" * 40}, {"gpus": [{"name": "H200", "memory_gib": 140}]}, {"driver": "999.1"},
     {"python": "9.9.1"}, {"packages": {"torch": "0.1"}}],
)  # fmt: skip
def test_what_changes_throughput_splits_a_series(values: dict[str, Any], change: dict[str, Any]) -> None:
    assert environment.series_key({**values, **change}) != environment.series_key(values)


def test_a_patch_release_of_python_or_of_the_driver_does_not_split_a_series(values: dict[str, Any]) -> None:
    values = {**values, "driver": "570.1"}
    major, minor, _ = platform.python_version_tuple()
    other = {**values, "driver": "570.2", "python": f"{major}.{minor}.99"}
    assert environment.series_key(other) == environment.series_key(values)


def test_a_directory_without_repository_has_no_commit(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment.fingerprint()["git"] is None


def test_a_machine_without_nvml_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    look = gpu.snapshot()
    assert look.gpus == ()
    assert look.unavailable is not None
    assert look.unavailable.startswith("no NVML on this machine")


def recorded_nvml(monkeypatch: pytest.MonkeyPatch, *, bits: int) -> None:
    """NVML's answers as one H200 gives them."""

    def unsupported(*_arguments: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlSystemGetDriverVersion": lambda: "570.124.06",
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda _handle: SimpleNamespace(total=150754820096, used=642056192, free=150112763904),
        "nvmlDeviceGetName": lambda _handle: "NVIDIA H200",
        "nvmlDeviceGetClockInfo": lambda _handle, _clock: 1980,
        "nvmlDeviceGetMaxClockInfo": unsupported,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda _handle: bits,
        "nvmlDeviceGetComputeRunningProcesses": lambda _handle: [SimpleNamespace(pid=12), SimpleNamespace(pid=7)],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)


def test_a_power_cap_is_normal_and_a_thermal_slowdown_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_nvml(monkeypatch, bits=0x4)
    (capped,) = gpu.snapshot().gpus
    recorded_nvml(monkeypatch, bits=0x4 | 0x20)
    (slowed,) = gpu.snapshot().gpus
    assert (capped.slowdowns, capped.clock_events) == ((), ("power cap",))
    assert slowed.slowdowns == ("software thermal slowdown",)


def test_what_a_gpu_does_not_answer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_nvml(monkeypatch, bits=0)
    look = gpu.snapshot()
    (one,) = look.gpus
    assert (one.name, one.sm_clock_mhz, one.sm_clock_max_mhz, one.processes) == ("NVIDIA H200", 1980, None, (7, 12))
    assert (look.driver, look.unavailable) == ("570.124.06", None)
    assert json.loads(json.dumps(look.to_dict()))["gpus"][0]["memory_total_bytes"] == 150754820096
