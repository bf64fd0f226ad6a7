"""A run goes on with any other topology as if nothing had happened; by processes: tests/test_processes.py."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from helpers_processes import keep_until, same_bits, steps_of
from helpers_training import make_config

from dflash.config import RunConfig
from dflash.trainer import train

STEPS, PER_STEP, EXAMPLES = 4, 4, 16  # two epochs of eight micro-batches of two rows


def config(output: Path, topology: str, *, resume: bool = False) -> RunConfig:
    optim = {"steps": STEPS, "batches_per_step": PER_STEP}
    return make_config(output, topology=topology, resume=resume, optim=optim, checkpoint={"every_steps": 1})


def test_five_targets_and_three_drafters_go_on_as_fewer_and_back_and_count_each_sample_once(tmp_path: Path) -> None:
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    train(config(whole, "1t+1d"))
    for life, topology in enumerate(("5t+3d", "2t+2d", "1t+1d", "5t+3d")):
        if life:
            keep_until(moved, life)
        train(config(moved, topology, resume=life > 0))
    assert same_bits(whole, moved)
    consumed = [sample for step in range(1, STEPS + 1) for sample in steps_of(moved)[step]["sample_ids"]]
    assert len(consumed) == STEPS * PER_STEP * 2
    for epoch in range(len(consumed) // EXAMPLES):
        counts = Counter(consumed[epoch * EXAMPLES : (epoch + 1) * EXAMPLES])
        assert len(counts) == EXAMPLES
        assert set(counts.values()) == {1}
