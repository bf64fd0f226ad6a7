"""A training run that takes about a second: random Qwen3 target, random tokens, two CPU threads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from dflash.config import (
    CheckpointConfig,
    CompileConfig,
    DataConfig,
    DrafterConfig,
    OptimConfig,
    RunConfig,
    TargetConfig,
    TelemetryConfig,
)

BASE = RunConfig(
    preset="test",
    topology="1t+1d",
    devices="cpu",
    seed=3,
    target=TargetConfig(path="random:qwen3", mask_token_id=5, dtype="float32"),
    drafter=DrafterConfig(block_size=4, num_layers=1, num_features=2, attention="sdpa"),
    data=DataConfig(path=Path("synthetic:16"), sequence_length=32, rows_per_batch=2, num_anchors=6),
    optim=OptimConfig(steps=6, batches_per_step=4, learning_rate=3e-3),
    compile=CompileConfig(policy="eager"),
    checkpoint=CheckpointConfig(every_steps=3, keep_last=9),
    telemetry=TelemetryConfig(wandb="off", log_every_steps=1),
)


def make_config(output: Path, **changes: Any) -> RunConfig:
    """BASE with changed fields; a nested section is given as a dictionary of its changes."""
    nested = {key: dataclasses.replace(getattr(BASE, key), **value) for key, value in changes.items() if isinstance(value, dict)}
    return dataclasses.replace(BASE, output=output, **(changes | nested))
