"""A training run that takes about a second: random Qwen3 target, random tokens, two CPU threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dflash.batch import PackedBatch
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
from dflash.data.examples import Meta, write_examples
from dflash.data.packing import PackedStream
from dflash.data.synthetic import synthetic_examples

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


def examples_of(config: RunConfig, lengths: list[int]) -> list[Any]:
    """Random examples of these lengths; their second half is supervised."""
    made = synthetic_examples(Path(f"synthetic:{len(lengths)}"), config.data, vocab_size=200, seed=0)
    return [
        type(e)(sample_id=e.sample_id, ids=e.ids[:n], loss_mask=torch.arange(n).numpy() >= n // 2)
        for e, n in zip(made, lengths, strict=True)
    ]


def write_synthetic(config: RunConfig, path: Path, lengths: list[int], **meta: Any) -> None:
    """Prepared data of such examples; the first two are held out as well."""
    values: dict[str, Any] = {"target": "random", "vocab_size": 512, "mask_token_id": 5, "pad_token_id": 0, "eos_token_ids": (1,)}
    held = [type(e)(sample_id=f"held-{e.sample_id}", ids=e.ids, loss_mask=e.loss_mask) for e in examples_of(config, lengths)[:2]]
    write_examples(path, {"train": examples_of(config, lengths), "heldout": held}, Meta(**(values | meta)))


def without_anchors(original: Any, numbers: Sequence[int]) -> Any:
    """`PackedStream.batch` in which these micro-batches have no valid anchor."""

    def batch(self: PackedStream, index: int) -> PackedBatch:
        made: PackedBatch = original(self, index)
        return dataclasses.replace(made, anchor_valid=made.anchor_valid & False) if index in numbers else made

    return batch
