"""Does a measurement count? From samples of the machine, and from what the run says of itself, to reasons why not. Pure.

INVALID is neither pass nor fail. Reasons: in more than 1 % of the samples of a GPU a thermal, hardware or power-brake slowdown;
an SM clock under 0.97 of the baseline's; foreign processes on a GPU; an XID or an uncorrected ECC error; other processes using
the CPUs; another number of CPUs; swapping; a compile in a segment; a worker that did nothing; another fingerprint after the
run than before. A software power cap is normal under load: recorded only.

`regression.sampler` takes the samples. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from diagnostics.gpu import Gpu

SLOWDOWN_SHARE = 0.01
CLOCK_SHARE = 0.97
FOREIGN_CPU_SHARE = 0.15
BUSY = "other processes used"  # how the reason about them begins
SWAPPED_BYTES = 16 * 2**20
_POWER_CAP = 0x4


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The machine at one moment."""

    time_seconds: float  # wall clock
    gpus: tuple[Gpu, ...] = ()  # those of the run
    gpus_unavailable: str | None = None
    xids: tuple[str, ...] = ()  # since the sample before
    own_processes: tuple[int, ...] = ()  # the run and what it started
    foreign_cpu_share: float | None = None  # of all CPUs' time since the sample before, used by others; None in the first
    cpus: int = 1  # that this process may use
    swapped_bytes: int = 0  # in and out, since the machine started


def window(samples: Sequence[Sample], began: float, ended: float) -> list[Sample]:
    """The samples taken while segments ran (wall clock)."""
    return [sample for sample in samples if began <= sample.time_seconds <= ended]


def sample_reasons(
    before: Sample, samples: Sequence[Sample], *, num_gpus: int, processes: int = 1, baseline_clock_mhz: float | None = None
) -> list[str]:
    """Why a throughput taken during `samples` does not count. `before` was taken before the run; `processes` it has on a GPU."""
    if not samples:
        return ["no sample was taken while the segments ran: the state of the machine is unknown"]
    reasons = _cpu_reasons(before, samples)
    if num_gpus == 0:
        return reasons
    unavailable = next((sample.gpus_unavailable for sample in (before, *samples) if sample.gpus_unavailable), None)
    if unavailable:
        return [*reasons, unavailable]
    if len(before.gpus) != num_gpus:
        reasons.append(f"NVML shows {len(before.gpus)} of the {num_gpus} GPUs of the run: the state of the others is unknown")
    for index in [gpu.index for gpu in before.gpus]:
        looks = [gpu for sample in samples for gpu in sample.gpus if gpu.index == index]
        first = next(gpu for gpu in before.gpus if gpu.index == index)
        reasons += [f"GPU {index}: {reason}" for reason in _gpu_reasons(first, looks, baseline_clock_mhz)]
        reasons += [f"GPU {index}: {reason}" for reason in _foreign_processes(first, looks, samples, processes)]
    return [*reasons, *(xid for sample in samples for xid in sample.xids)]


def run_reasons(result: Mapping[str, Any], *, workers: Sequence[str], key_before: str, key_after: str) -> list[str]:
    """Why the run's own account says that its throughput does not count. Keys are of the fingerprint's."""
    measure = result.get("measure")
    if not isinstance(measure, Mapping):
        return ["the run measured nothing"]
    reasons = [str(measure["incomplete"])] if measure.get("incomplete") else []
    compiles = sum(segment["compiles"] for segment in measure["segments"])
    if compiles:
        reasons.append(f"{compiles} compile phases ended inside the segments")
    for number, segment in enumerate(measure["segments"], start=1):
        active = {row["worker"] for row in segment["workers"] if row["items"] > 0}
        missing = [worker for worker in workers if worker not in active]
        if missing:
            reasons.append(f"segment {number}: {', '.join(missing)} did nothing")
    if key_before != key_after:
        reasons.append(f"the fingerprint changed during the run, from {key_before} to {key_after}")
    return reasons


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """What is worth keeping of the samples, as JSON values."""
    shares = [sample.foreign_cpu_share for sample in samples if sample.foreign_cpu_share is not None]
    by_index: dict[int, list[Gpu]] = {}
    for sample in samples:
        for gpu in sample.gpus:
            by_index.setdefault(gpu.index, []).append(gpu)
    return {
        "samples": len(samples),
        "foreign_cpu_share": fmean(shares) if shares else None,
        "gpus": [_gpu_summary(looks) for looks in by_index.values()],
        "sm_clock_mhz": clock_mhz([gpu for looks in by_index.values() for gpu in looks]),
    }


def clock_mhz(looks: Sequence[Gpu]) -> float | None:
    """The median SM clock, None where it is unknown."""
    clocks = [gpu.sm_clock_mhz for gpu in looks if gpu.sm_clock_mhz is not None]
    return float(median(clocks)) if clocks else None


def _cpu_reasons(before: Sample, samples: Sequence[Sample]) -> list[str]:
    reasons = []
    shares = [sample.foreign_cpu_share for sample in samples if sample.foreign_cpu_share is not None]
    if shares and fmean(shares) > FOREIGN_CPU_SHARE:
        reasons.append(f"{BUSY} {fmean(shares):.0%} of the CPUs while the segments ran (limit {FOREIGN_CPU_SHARE:.0%})")
    counts = sorted({sample.cpus for sample in (before, *samples)})
    if len(counts) > 1:
        reasons.append(f"the number of CPUs changed between {counts[0]} and {counts[-1]} during the run")
    swapped = samples[-1].swapped_bytes - samples[0].swapped_bytes
    if swapped > SWAPPED_BYTES:
        reasons.append(f"the machine swapped {swapped / 2**20:.0f} MiB while the segments ran: it has too little memory")
    return reasons


def _gpu_reasons(first: Gpu, looks: Sequence[Gpu], baseline_clock_mhz: float | None) -> list[str]:
    if not looks:
        return ["not seen while the segments ran"]
    reasons = []
    slowed = [gpu for gpu in looks if gpu.slowdowns]
    if len(slowed) > SLOWDOWN_SHARE * len(looks):
        what = sorted({text for gpu in slowed for text in gpu.slowdowns})
        reasons.append(f"{', '.join(what)} in {len(slowed)} of {len(looks)} samples (limit {SLOWDOWN_SHARE:.0%})")
    clock = clock_mhz(looks)
    if clock is not None and baseline_clock_mhz and clock < CLOCK_SHARE * baseline_clock_mhz:
        share = clock / baseline_clock_mhz
        reasons.append(
            f"SM clock {clock:.0f} MHz is {share:.3f} of the baseline's {baseline_clock_mhz:.0f} (limit {CLOCK_SHARE})"
        )
    errors = (looks[-1].uncorrected_ecc_errors or 0) - (first.uncorrected_ecc_errors or 0)
    if errors > 0:
        reasons.append(f"{errors} uncorrected ECC errors during the run")
    return reasons


def _foreign_processes(first: Gpu, looks: Sequence[Gpu], samples: Sequence[Sample], expected: int) -> list[str]:
    """Other processes on the GPU. In a container process ids may be the host's: then only their number can be compared."""
    earlier = set(first.processes or ())
    if earlier:
        return [f"processes {', '.join(map(str, sorted(earlier)))} were on it before the run"]
    own = {process for sample in samples for process in sample.own_processes}
    seen = {process for gpu in looks for process in gpu.processes or ()}
    foreign = sorted(seen - own)
    if seen & own and foreign:
        return [f"foreign processes {', '.join(map(str, foreign))}"]
    most = max((len(gpu.processes or ()) for gpu in looks), default=0)
    if not seen & own and most > expected:
        return [f"{most} processes, the run has {expected}"]
    return []


def _gpu_summary(looks: Sequence[Gpu]) -> dict[str, Any]:
    def numbers(name: str) -> list[float]:
        return [float(value) for gpu in looks if (value := getattr(gpu, name)) is not None]

    capped = [bool((gpu.clock_event_bits or 0) & _POWER_CAP) for gpu in looks]
    powers, temperatures, busy = numbers("power_watts"), numbers("temperature_celsius"), numbers("utilization_percent")
    return {
        "index": looks[0].index,
        "name": looks[0].name,
        "sm_clock_mhz": clock_mhz(looks),
        "power_cap_share": fmean(capped),
        "slowdown_share": fmean(bool(gpu.slowdowns) for gpu in looks),
        "power_watts": fmean(powers) if powers else None,
        "temperature_celsius": max(temperatures) if temperatures else None,
        "utilization_percent": fmean(busy) if busy else None,
    }
