"""What to run: a preset, the fields that differ from it, and on how many GPUs. Imports no torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from dflash.config import ConfigError, Topology

CPU_PRESET = "tiny-cpu"
GPU_PRESET = "qwen3-8b"  # the real shape with random weights and tokens: throughput needs no trained ones
CPU_STEPS = 20
GPU_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One training run. Two runs are of one series only if their `name` is the same."""

    preset: str
    gpus: int
    steps: int
    overrides: tuple[str, ...] = ()  # further flags of `python -m dflash train`

    def __post_init__(self) -> None:
        if self.gpus < 0 or self.steps < 1:
            raise ConfigError(
                f"a run of {self.steps} steps on {self.gpus} GPUs: use at least 1 step and 0 GPUs (the CPU workload)"
            )

    @property
    def name(self) -> str:
        """The workload in words; part of a series."""
        where = f"{self.gpus} GPU{'s' if self.gpus != 1 else ''}" if self.gpus else "CPU"
        return f"{self.preset} on {where}, {self.steps} steps"

    def command(self, output: Path) -> list[str]:
        """The run as a command of this Python, writing into the new directory `output`."""
        flags = ("--preset", self.preset, "--output", str(output), "--optim.steps", str(self.steps), *self.overrides)
        return [sys.executable, "-m", "dflash", "train", *flags]


def workload(gpus: int, *, data: Path, steps: int | None = None) -> RunSpec:
    """The standard run for `gpus` GPUs. `data` is what `prepare_commands` made; only the CPU workload reads it."""
    if gpus == 0:
        return RunSpec(preset=CPU_PRESET, gpus=0, steps=steps or CPU_STEPS, overrides=("--data.path", str(data)))
    overrides = () if gpus == 1 else ("--topology", str(topology(gpus)), "--devices", "cuda")
    return RunSpec(preset=GPU_PRESET, gpus=gpus, steps=steps or GPU_STEPS, overrides=overrides)


def topology(gpus: int) -> Topology:
    """Split GPUs between targets and drafters about 5 to 3, at least one each. Raises ConfigError below two."""
    if gpus < 2:
        raise ConfigError(f"{gpus} GPUs cannot hold one target and one drafter each: use the preset's own placement")
    drafters = max(1, round(gpus * 3 / 8))
    return Topology(gpus - drafters, drafters)


def prepare_commands(directory: Path) -> list[list[str]]:
    """The commands that make the data of the CPU workload in `directory / "data"`, always the same."""
    prompts = directory / "prompts.jsonl"
    make = ("fixtures.stdlib_text", "--count", "40", "--split", "train", "--output", str(prompts))
    target = ("--target.path", "fixtures/tiny_target/model", "--target.dtype", "float32")
    lengths = ("--max-new-tokens", "96", "--heldout-fraction", "0.1")
    prepare = ("dflash", "prepare", "--prompts", str(prompts), "--output", str(directory / "data"), *target, *lengths)
    return [[sys.executable, "-m", *make], [sys.executable, "-m", *prepare]]
