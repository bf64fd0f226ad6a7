"""Laws of looking at GPUs: what NVML cannot tell is said. NVML is played in its recorded shape where there is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from diagnostics import gpu


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two GPUs; the second supports no XIDs, no ECC and no process list."""
    told: dict[str, Any] = {"xids": [], "open": 0}

    def unsupported(*_: Any) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def first_only(value: Any) -> Any:
        return lambda handle, *_: value if handle == 0 else unsupported()

    def wait(_events: Any, milliseconds: int) -> Any:
        assert milliseconds == 0
        if not told["xids"]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return SimpleNamespace(device=0, eventData=told["xids"].pop(0))

    played = {
        "nvmlInit": lambda: told.update(open=told["open"] + 1),
        "nvmlShutdown": lambda: told.update(open=told["open"] - 1),
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetIndex": lambda handle: handle,
        "nvmlSystemGetDriverVersion": lambda: "580.159.04",
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=150 * 10**9, used=10**9),
        "nvmlDeviceGetComputeRunningProcesses": first_only([SimpleNamespace(pid=7)]),
        "nvmlDeviceGetName": lambda _: "NVIDIA H200",
        "nvmlDeviceGetClockInfo": lambda *_: 1980,
        "nvmlDeviceGetMaxClockInfo": lambda *_: 1980,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda _: 0x44,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetTotalEccErrors": first_only(0),
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=97),
        "nvmlDeviceGetPowerUsage": lambda _: 690_500,
        "nvmlDeviceGetTemperature": lambda *_: 61,
        "nvmlEventSetCreate": lambda: "events",
        "nvmlEventSetFree": lambda _: None,
        "nvmlDeviceRegisterEvents": first_only(None),
        "nvmlEventSetWait_v2": wait,
    }
    for name, function in played.items():
        monkeypatch.setattr(pynvml, name, function)
    return told


def test_a_machine_without_nvml_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    with gpu.Watch() as watch:
        watch.listen_for_xids()
        assert watch.snapshot().gpus == ()
        assert "no NVML on this machine" in (watch.snapshot().unavailable or "")
        assert watch.xids() == ()
        assert "no NVML on this machine" in (watch.xids_unobserved or "")


def test_what_a_gpu_does_not_tell_is_none(nvml: dict[str, Any]) -> None:
    first, second = gpu.snapshot().gpus
    assert (first.processes, first.uncorrected_ecc_errors, first.power_watts, first.uuid) == ((7,), 0, 690.5, "GPU-0")
    assert (second.processes, second.uncorrected_ecc_errors, second.utilization_percent) == (None, None, 97)
    assert first.slowdowns == ("hardware thermal slowdown",)
    assert first.clock_events == ("hardware thermal slowdown", "power cap")
    assert nvml["open"] == 0


def test_xids_are_heard_once_and_deaf_gpus_are_told(nvml: dict[str, Any]) -> None:
    with gpu.Watch() as watch:
        watch.listen_for_xids()
        assert (watch.xids_unobserved or "").startswith("GPU 1: ")
        nvml["xids"] += [79, 48]
        assert watch.xids() == ("GPU 0: XID 79", "GPU 0: XID 48")
        assert watch.xids() == ()
        assert nvml["open"] == 1
    assert nvml["open"] == 0
