"""The GPUs through NVML: what they are, how fast they are clocked, and whether something slows them down or fails.

`snapshot` looks once, `Watch` many times and hears of XIDs. A machine without NVML is an answer, not an error:
`Snapshot.unavailable` says why. This module imports no torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

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
    processes: tuple[int, ...] | None  # process ids with memory on it; inside a container they may be the host's
    uuid: str | None = None
    uncorrected_ecc_errors: int | None = None  # since the driver was loaded
    utilization_percent: int | None = None  # of the last sample period of NVML: part of it in which a kernel ran
    power_watts: float | None = None
    temperature_celsius: int | None = None

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
    with Watch() as watch:
        return watch.snapshot()


class Watch:
    """NVML, open for many looks. For one thread; a context manager."""

    def __init__(self) -> None:
        self.unavailable: str | None = None  # why there is no NVML
        self.xids_unobserved: str | None = None  # why XIDs cannot be heard
        self._events: Any = None

    def __enter__(self) -> Self:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.unavailable = f"no NVML on this machine ({error}): GPU state is unknown"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        if self.unavailable is None:
            if self._events is not None:
                _ask(pynvml.nvmlEventSetFree, self._events)
            pynvml.nvmlShutdown()

    def snapshot(self) -> Snapshot:
        """All GPUs now."""
        if self.unavailable is not None:
            return Snapshot(driver=None, gpus=(), unavailable=self.unavailable)
        gpus = tuple(_gpu(index) for index in range(pynvml.nvmlDeviceGetCount()))
        return Snapshot(driver=_text(pynvml.nvmlSystemGetDriverVersion()), gpus=gpus)

    def listen_for_xids(self) -> None:
        """From now on `xids` hears of the critical errors of every GPU that can tell; the others go to `xids_unobserved`."""
        if self.unavailable is not None:
            self.xids_unobserved = self.unavailable
            return
        deaf = []
        try:
            self._events = pynvml.nvmlEventSetCreate()
            for index in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                try:
                    pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
                except pynvml.NVMLError as error:
                    deaf.append(f"GPU {index}: {error}")
        except pynvml.NVMLError as error:
            deaf.append(str(error))
        self.xids_unobserved = "; ".join(deaf) or None

    def xids(self) -> tuple[str, ...]:
        """The XIDs since the last call, as sentences."""
        found = []
        while self._events is not None:
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
            except pynvml.NVMLError:  # a time-out: nothing more is waiting
                break
            found.append(f"GPU {_ask(pynvml.nvmlDeviceGetIndex, event.device)}: XID {event.eventData}")
        return tuple(found)


def missing_gpus(wanted: int, found: int, visible: str | None) -> str | None:
    """Say what is missing and what to do, or None."""
    if found >= wanted:
        return None
    where = "CUDA_VISIBLE_DEVICES is not set" if visible is None else f"CUDA_VISIBLE_DEVICES={visible}"
    fewer = f"run with --gpus {found}, or --gpus 0 for the CPU workload" if found else "run with --gpus 0 for the CPU workload"
    return f"needs {wanted} GPUs, found {found} ({where}): {fewer}"


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
        uuid=None if (uuid := _ask(pynvml.nvmlDeviceGetUUID, handle)) is None else _text(uuid),
        uncorrected_ecc_errors=_ask(
            pynvml.nvmlDeviceGetTotalEccErrors, handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        ),
        utilization_percent=None if (rates := _ask(pynvml.nvmlDeviceGetUtilizationRates, handle)) is None else int(rates.gpu),
        power_watts=None if (power := _ask(pynvml.nvmlDeviceGetPowerUsage, handle)) is None else power / 1000,
        temperature_celsius=_ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
    )


def _ask(function: Any, *arguments: Any) -> Any:
    """What NVML answers, or None where this GPU or this container does not support the question."""
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
