"""A drafter that has learnt something, in seconds: over-fitted on a few answers of the tiny target of fixtures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from helpers_training import make_config

from dflash.batch import Example
from dflash.checking.runner import check
from dflash.checking.settings import CheckConfig
from dflash.config import PrepareConfig, RunConfig, TargetConfig
from dflash.data.examples import load_examples, load_meta, write_examples
from dflash.data.prepare import prepare
from fixtures import tiny_target

TARGET = TargetConfig(path=str(tiny_target.PATH), dtype="float32")
PROMPTS = ("import os\n\ndef walk(", "class Queue:\n    def __init__(self", "for line in lines:\n    if ", "def parse(text):\n    return ")
BLOCK = 4


def prepared(directory: Path) -> Path:
    """Data whose held-out examples have the tokens of its training examples."""
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p{n}", "prompt": text}) + "\n" for n, text in enumerate(PROMPTS)))
    prepare(PrepareConfig(prompts=str(prompts), output=directory / "raw", target=TARGET, max_new_tokens=48, heldout_fraction=0.0))
    examples = load_examples(directory / "raw", "train")
    again = [dataclasses.replace(e, sample_id=f"again-{e.sample_id}") for e in examples]
    write_examples(directory / "data", {"train": again, "heldout": examples}, load_meta(directory / "raw"))
    return directory / "data"


def training(output: Path, data: Path, **changes: Any) -> RunConfig:
    """A run of a few seconds over prepared data."""
    sections: dict[str, dict[str, Any]] = {
        "drafter": {"block_size": BLOCK, "num_layers": 1, "num_features": 3, "init": "target"},
        "data": {"path": data, "sequence_length": 224, "rows_per_batch": 1, "num_anchors": 96, "validation_batches": 0},
        "optim": {"steps": 60, "batches_per_step": 1, "learning_rate": 3e-3},
        "checkpoint": {"every_steps": 1000, "keep_untrained": False},
    }
    for name, values in changes.items():
        sections[name] = sections.get(name, {}) | values
    return dataclasses.replace(make_config(output, **sections), target=TARGET)


def verdicts(path: Path, **settings: Any) -> dict[str, Any]:
    """What `check` says of a checkpoint: status and text of every check by name."""
    result = check(CheckConfig(path=path, **settings))
    return {found["name"]: (found["status"], found["found"]) for found in result["checks"]}


def failed(path: Path, **settings: Any) -> dict[str, str]:
    """The failed checks of a checkpoint, and what was found."""
    return {name: found for name, (status, found) in verdicts(path, **settings).items() if status == "fail"}


def example_of(tokens: list[int], prompt: int, name: str) -> Example:
    """An example whose tokens after `prompt` are supervised."""
    import numpy as np  # noqa: PLC0415

    return Example(sample_id=name, ids=np.array(tokens, dtype=np.int32), loss_mask=np.arange(len(tokens)) >= prompt)
