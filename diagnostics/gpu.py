"""One look at the GPUs through NVML: what they are, how fast they are clocked, and whether something slows them down.

A machine without NVML is an answer, not an error: `Snapshot.unavailable` says why. This module imports no torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pynvml

# Bits of nvmlDeviceGetCurrentClocksEventReasons that make a throughput number meaningless; a power cap is normal under load.
_SLOWDOWNS = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
_HARMLESS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x10: "sync boost",
    0x100: "display clock",
    0x200: "board limit",
    0x400: "reliability voltage limit",
}


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as NVML shows it; `None` where it does not."""

    index: int
    name: str
    memory_total_bytes: int
    memory_used_bytes: int
    sm_clock_mhz: int | None
    sm_clock_max_mhz: int | None
    clock_event_bits: int | None
    processes: tuple[int, ...] | None  # process ids with memory on it

    @property
    def slowdowns(self) -> tuple[str, ...]:
        """What slows it down right now."""
        return tuple(text for bit, text in _SLOWDOWNS.items() if (self.clock_event_bits or 0) & bit)

    @property
    def clock_events(self) -> tuple[str, ...]:
        """Everything that decides its clock right now, the harmless included."""
        return tuple(text for bit, text in (_SLOWDOWNS | _HARMLESS).items() if (self.clock_event_bits or 0) & bit)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All GPUs at one moment, or why none can be seen."""

    driver: str | None
    gpus: tuple[Gpu, ...]
    unavailable: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The snapshot as JSON values."""
        return dataclasses.asdict(self)


def snapshot() -> Snapshot:
    """Look once. CUDA_VISIBLE_DEVICES does not hide GPUs from NVML: all of the machine are listed."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Snapshot(driver=None, gpus=(), unavailable=f"no NVML on this machine ({error}): GPU state is unknown")
    try:
        gpus = tuple(_gpu(index) for index in range(pynvml.nvmlDeviceGetCount()))
        return Snapshot(driver=_text(pynvml.nvmlSystemGetDriverVersion()), gpus=gpus)
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    reasons = getattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", pynvml.nvmlDeviceGetCurrentClocksThrottleReasons)
    processes = _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return Gpu(
        index=index,
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        memory_total_bytes=int(memory.total),
        memory_used_bytes=int(memory.used),
        sm_clock_mhz=_ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        sm_clock_max_mhz=_ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
        clock_event_bits=_ask(reasons, handle),
        processes=None if processes is None else tuple(sorted(process.pid for process in processes)),
    )


def _ask(function: Any, *arguments: Any) -> Any:
    """What NVML answers, or None where this GPU or this container does not support the question."""
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
