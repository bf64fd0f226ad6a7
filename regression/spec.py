"""What to run: a preset, the fields that differ from it, and on how many GPUs. Imports no torch."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash.config import ConfigError, Topology

CPU_PRESET = "tiny-cpu"
GPU_PRESET = "qwen3-8b"  # the real shape with random weights and tokens: throughput needs no trained ones
SEGMENTS = 3
CPU_SEGMENT_SECONDS = 5.0
GPU_SEGMENT_SECONDS = 60.0
CPU_PROBED_STEPS = 4
GPU_PROBED_STEPS = 20
_CPU_OVERRIDES = (  # many short steps in a segment
    *("--data.path", "synthetic:64", "--data.sequence-length", "128"),
    *("--data.rows-per-batch", "1", "--data.num-anchors", "16"),
)
_CPU_TOPOLOGY = ("--topology", "1t+2d")  # that of the preset; torchrun must know how many processes it starts
_ENDLESS = 1_000_000_000  # steps: a measuring run ends after its segments


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One workload. Two runs are of one series only if their `name` is the same."""

    preset: str
    gpus: int
    segments: int = SEGMENTS
    segment_seconds: float
    overrides: tuple[str, ...] = ()  # further flags of `python -m dflash train`, implied by the name
    planted: tuple[str, ...] = ()  # flags that are not part of the name: a planted slowdown belongs to the series it slows
    fault: str | None = None  # of `regression.faults`; no part of the name, as `planted`
    visible: tuple[str, ...] = ()  # what CUDA_VISIBLE_DEVICES names: indices or UUIDs
    python: str = sys.executable
    engine: Literal["threads", "processes"] = "threads"

    def __post_init__(self) -> None:
        if self.gpus < 0 or self.segments < 1 or self.segment_seconds <= 0:
            raise ConfigError(
                f"{self.segments} segments of {self.segment_seconds} s on {self.gpus} GPUs: use at least 1 segment, a positive "
                f"length and 0 GPUs (the CPU workload)"
            )
        if self.engine == "processes" and self.gpus == 1:
            raise ConfigError("--engine processes needs a GPU for each worker: use --gpus 2 or more, or --gpus 0")
        if self.engine == "processes" and "--topology" not in self.overrides:
            raise ConfigError("a run by processes names its --topology: add it to the overrides")

    @property
    def name(self) -> str:
        """The workload in words; part of a series."""
        where = f"{self.gpus} GPU{'s' if self.gpus != 1 else ''}" if self.gpus else "CPU"
        by = "" if self.engine == "threads" else f" by {self.engine}"
        return f"{self.preset} on {where}{by}, {self.segments} x {self.segment_seconds:g} s"

    @property
    def variables(self) -> dict[str, str]:
        """Pins the run to its GPUs, numbered as NVML numbers them; the CPU workload sees none."""
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(self.visible)}

    def command(self, output: Path) -> list[str]:
        """The measuring run as a command, writing into the new directory `output`."""
        segments = ("--measure.segments", str(self.segments), "--measure.segment-seconds", str(self.segment_seconds))
        return [*self._train(output, steps=_ENDLESS), "--measure", *segments, *self.planted]

    def probed_command(self, output: Path, report: Path) -> list[str]:
        """The same training under `diagnostics.fxprobe`, for a few steps; findings go to the file `report`.

        By threads always: fxprobe watches one process, and in each of several only one worker runs.
        """
        by_threads = dataclasses.replace(self, engine="threads")
        train = by_threads._train(output, steps=GPU_PROBED_STEPS if self.gpus else CPU_PROBED_STEPS)
        probe = ("-m", "diagnostics.fxprobe", "--json", str(report), "--progress", "0", "--")
        return [train[0], *probe, *train[1:], "--checkpoint.no-keep-untrained"]

    def _train(self, output: Path, *, steps: int) -> list[str]:
        flags = ("--preset", self.preset, "--output", str(output), "--optim.steps", str(steps), "--telemetry.wandb", "off")
        program = ("dflash",) if self.fault is None else ("regression.faults", self.fault)
        start = [self.python, "-m", *program, "train"]
        if self.engine == "processes":
            workers = Topology.parse(self._topology)
            torchrun = (
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(workers.targets + workers.drafters),
            )
            start = [self.python, *torchrun, "-m", *program, "train", "--engine", "processes"]
        return [*start, *flags, *self.overrides]

    @property
    def _topology(self) -> str:
        return self.overrides[self.overrides.index("--topology") + 1]


def workload(
    gpus: int,
    *,
    segments: int = SEGMENTS,
    segment_seconds: float | None = None,
    planted: tuple[str, ...] = (),
    fault: str | None = None,
    environment: Mapping[str, str] | None = None,
    engine: Literal["threads", "processes"] = "threads",
) -> RunSpec:
    """The standard run for `gpus` GPUs, the first of those that CUDA_VISIBLE_DEVICES in `environment` names."""
    if gpus == 0:
        seconds = CPU_SEGMENT_SECONDS if segment_seconds is None else segment_seconds
        return RunSpec(
            preset=CPU_PRESET,
            gpus=0,
            segments=segments,
            segment_seconds=seconds,
            overrides=_CPU_OVERRIDES if engine == "threads" else (*_CPU_OVERRIDES, *_CPU_TOPOLOGY),
            planted=planted,
            fault=fault,
            engine=engine,
        )
    return RunSpec(
        preset=GPU_PRESET,
        gpus=gpus,
        segments=segments,
        segment_seconds=GPU_SEGMENT_SECONDS if segment_seconds is None else segment_seconds,
        overrides=() if gpus == 1 else ("--topology", str(topology(gpus)), "--devices", "cuda"),
        planted=planted,
        fault=fault,
        engine=engine,
        visible=visible_gpus(gpus, (environment or {}).get("CUDA_VISIBLE_DEVICES")),
    )


def planted(burn_share: float) -> tuple[str, ...]:
    """Flags that plant a slowdown of this share of each step; none for 0."""
    return ("--measure.burn-share", str(burn_share)) if burn_share else ()


def visible_gpus(gpus: int, visible: str | None) -> tuple[str, ...]:
    """The GPUs to pin a run to. Raises ConfigError when CUDA_VISIBLE_DEVICES names fewer."""
    if visible is None:
        return tuple(str(index) for index in range(gpus))
    named = tuple(name.strip() for name in visible.split(",") if name.strip())
    if len(named) < gpus:
        raise ConfigError(f"needs {gpus} GPUs, CUDA_VISIBLE_DEVICES={visible} names {len(named)}: name more, or use fewer")
    return named[:gpus]


def topology(gpus: int) -> Topology:
    """Split GPUs between targets and drafters about 5 to 3, at least one each. Raises ConfigError below two."""
    if gpus < 2:
        raise ConfigError(f"{gpus} GPUs cannot hold one target and one drafter each: use the preset's own placement")
    drafters = max(1, round(gpus * 3 / 8))
    return Topology(gpus - drafters, drafters)


def workers(topology: Topology) -> list[str]:
    """The names of all workers of a run: each must appear in every segment."""
    return [f"target-{i}" for i in range(topology.targets)] + [f"drafter-{i}" for i in range(topology.drafters)]
