"""Settings of the GPUs that change how fast they are: power limits, clocks, MIG, ECC, PCIe, NVLink. Through NVML.

`settings` gives one list a setting, with a value for each GPU in NVML's order. What a GPU, driver or container does not answer
is the text "not observed: REASON" in its place. Values that move by themselves (temperature, present clock, the generation
of an idle PCIe link) are left out: two descriptions of an unchanged machine are equal. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml

NOT_OBSERVED = "not observed: "


def settings() -> dict[str, Any]:
    """Setting -> its value on each GPU; `driver` and `cuda_of_driver` are of the machine."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"nvml": f"{NOT_OBSERVED}no NVML on this machine ({error})"}
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        found: dict[str, Any] = {
            "driver": _ask("nvmlSystemGetDriverVersion"),
            "cuda_of_driver": _cuda_version(_ask("nvmlSystemGetCudaDriverVersion_v2")),
        }
        found.update({name: [ask(handle) for handle in handles] for name, ask in _SETTINGS.items()})
    except pynvml.NVMLError as error:
        return {"nvml": f"{NOT_OBSERVED}{error}"}
    finally:
        pynvml.nvmlShutdown()
    return found


def _ask(function: str, *arguments: Any) -> Any:
    """What NVML answers, or why it does not."""
    try:
        value = getattr(pynvml, function)(*arguments)
    except pynvml.NVMLError as error:
        return f"{NOT_OBSERVED}{error}"
    except AttributeError:
        return f"{NOT_OBSERVED}this nvidia-ml-py has no {function}"
    return value.decode() if isinstance(value, bytes) else value


def _is_missing(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(NOT_OBSERVED)


def _watts(function: str) -> Callable[[Any], Any]:
    def ask(handle: Any) -> Any:
        value = _ask(function, handle)
        return value if _is_missing(value) else value / 1000

    return ask


def _on_or_off(function: str) -> Callable[[Any], Any]:
    """The present mode; NVML answers with the present and the pending one, or with one number."""

    def ask(handle: Any) -> Any:
        value = _ask(function, handle)
        if _is_missing(value):
            return value
        return "on" if (value[0] if isinstance(value, list | tuple) else value) else "off"

    return ask


def _clock(function: str, clock: int) -> Callable[[Any], Any]:
    return lambda handle: _ask(function, handle, clock)


def _nvlinks(handle: Any) -> Any:
    """How many NVLinks are up; a GPU without any answers that it does not support the question."""
    states = [_ask("nvmlDeviceGetNvLinkState", handle, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS)]
    answered = [state for state in states if not _is_missing(state)]
    return sum(bool(state) for state in answered) if answered else states[0]


def _cuda_version(number: Any) -> Any:
    return number if _is_missing(number) else f"{number // 1000}.{number % 1000 // 10}"


_SETTINGS: dict[str, Callable[[Any], Any]] = {
    "name": lambda handle: _ask("nvmlDeviceGetName", handle),
    "vbios": lambda handle: _ask("nvmlDeviceGetVbiosVersion", handle),
    "power_limit_watts": _watts("nvmlDeviceGetEnforcedPowerLimit"),
    "default_power_limit_watts": _watts("nvmlDeviceGetPowerManagementDefaultLimit"),
    "max_sm_clock_mhz": _clock("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM),
    "max_memory_clock_mhz": _clock("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_MEM),
    "application_sm_clock_mhz": _clock("nvmlDeviceGetApplicationsClock", pynvml.NVML_CLOCK_SM),
    "application_memory_clock_mhz": _clock("nvmlDeviceGetApplicationsClock", pynvml.NVML_CLOCK_MEM),
    "mig": _on_or_off("nvmlDeviceGetMigMode"),
    "ecc": _on_or_off("nvmlDeviceGetEccMode"),
    "persistence": _on_or_off("nvmlDeviceGetPersistenceMode"),
    "compute_mode": lambda handle: _ask("nvmlDeviceGetComputeMode", handle),
    "pcie_max_generation": lambda handle: _ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
    "pcie_width": lambda handle: _ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
    "pcie_max_width": lambda handle: _ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
    "nvlinks_up": _nvlinks,
}
