"""A drafter that has learnt something, in seconds: over-fitted on a few answers of the tiny target of fixtures."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import torch
from helpers_training import make_config

from dflash import __main__ as command
from dflash.checking.runner import check
from dflash.checking.settings import CheckConfig
from dflash.command_config import PrepareConfig
from dflash.config import RunConfig, TargetConfig
from dflash.data.examples import load_examples, load_meta, write_examples
from dflash.data.prepare import prepare
from dflash.modeling.target import load_target
from dflash.trainer import train
from fixtures import tiny_target

TARGET = TargetConfig(path=str(tiny_target.PATH), dtype="float32")
PROMPTS = (
    "import os\n\ndef walk(",
    "class Queue:\n    def __init__(self",
    "for line in lines:\n    if ",
    "def parse(text):\n    return ",
)
BLOCK, STEPS = 4, 40


def prepared(directory: Path) -> Path:
    """Data whose held-out examples have the tokens of its training examples."""
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p{n}", "prompt": text}) + "\n" for n, text in enumerate(PROMPTS)))
    prepare(PrepareConfig(prompts=str(prompts), output=directory / "raw", target=TARGET, max_new_tokens=48, heldout_fraction=0.0))
    examples, meta = load_examples(directory / "raw", "train"), load_meta(directory / "raw")
    again = [dataclasses.replace(e, sample_id=f"again-{e.sample_id}") for e in examples]
    meta = dataclasses.replace(meta, truncated_answers=2 * meta.truncated_answers)
    write_examples(directory / "data", {"train": again, "heldout": examples}, meta)
    return directory / "data"


def training(output: Path, data: Path, **changes: Any) -> RunConfig:
    """A run of a few seconds over prepared data."""
    sections: dict[str, dict[str, Any]] = {
        "drafter": {"block_size": BLOCK, "num_layers": 1, "num_features": 3, "init": "target"},
        "data": {"path": data, "sequence_length": 224, "rows_per_batch": 1, "num_anchors": 96, "validation_batches": 0},
        "optim": {"steps": STEPS, "batches_per_step": 1, "learning_rate": 3e-3},
        "checkpoint": {"every_steps": 1000, "keep_untrained": False},
    }
    for name, values in changes.items():
        sections[name] = sections.get(name, {}) | values
    return dataclasses.replace(make_config(output, **sections), target=TARGET)


def trained(directory: Path) -> Path:
    """A finished run, with `data` and `export` beside it."""
    train(training(directory / "run", prepared(directory)))
    assert command.main(["export", str(directory / "run"), str(directory / "export"), "--checkpoint", "last"]) == 0
    return directory / "run"


@functools.cache
def cached_load(config: TargetConfig, *, device: torch.device) -> tuple[Any, Any]:
    """`load_target`, once for all tests: checks leave the model as it is."""
    return load_target(config, device=device)


def verdicts(path: Path, **settings: Any) -> dict[str, Any]:
    """What `check` says of a checkpoint: status and text of every check by name."""
    result = check(CheckConfig(path=path, **settings))
    return {found["name"]: (found["status"], found["found"]) for found in result["checks"]}


def failed(path: Path, **settings: Any) -> dict[str, str]:
    """The failed checks of a checkpoint, and what was found."""
    return {name: found for name, (status, found) in verdicts(path, **settings).items() if status == "fail"}
