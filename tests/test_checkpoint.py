import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_training import make_config

from dflash import checkpoint
from dflash.checkpoint import TrainState
from dflash.config import DrafterConfig
from dflash.errors import CheckpointError
from dflash.modeling.drafter import Drafter, DrafterShape
from dflash.modeling.random_targets import RANDOM_TARGETS

ROOT = Path(__file__).parent.parent


def make_state(run: Path, step: int = 3, score: float = 1.0) -> TrainState:
    shape = DrafterShape.from_target(RANDOM_TARGETS["qwen3"](), DrafterConfig(block_size=4, num_layers=1, num_features=2), 5)
    drafter = Drafter(shape, generator=torch.Generator().manual_seed(step))
    moments = {"exp_avg": torch.rand(100), "exp_avg_sq": torch.rand(100), "step": torch.tensor(float(step))}
    return TrainState(
        step=step,
        weights={k: v.detach() for k, v in drafter.named_parameters()},
        moments=moments,
        shape=shape.to_zlab_config(),
        config=make_config(run),
        metrics={"score": score},
    )


def test_what_was_saved_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    state = make_state(tmp_path)
    loaded = checkpoint.load(checkpoint.save(tmp_path, state))
    assert (loaded.step, loaded.shape, loaded.config, loaded.metrics) == (3, state.shape, state.config, state.metrics)
    assert loaded.next_batch == 3 * 4
    for before, after in ((state.weights, loaded.weights), (state.moments, loaded.moments)):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", checkpoint.FILES)
@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, name: str, damage: str) -> None:
    directory = checkpoint.save(tmp_path, make_state(tmp_path))
    path = directory / name
    content = path.read_bytes()
    if damage == "delete":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    with pytest.raises(CheckpointError, match="use an earlier one: remove this directory"):
        checkpoint.load(directory)


def test_damaged_checkpoints_are_set_aside_until_one_is_whole(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        directory = checkpoint.save(tmp_path, make_state(tmp_path, step=step))
        if step != 2:
            (directory / "optimizer.safetensors").write_bytes(b"no tensors")
    told = checkpoint.set_aside_damaged(tmp_path)
    assert [text.partition(",")[0] for text in told] == ["set aside as damaged-step-000004", "set aside as damaged-step-000003"]
    assert all("optimizer.safetensors has 10 bytes" in text and "remove this directory" not in text for text in told)
    assert checkpoint.resolve(tmp_path, "last").name == "step-000002"
    assert checkpoint.set_aside_damaged(tmp_path) == []


def test_a_checkpoint_without_its_marker_does_not_exist(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, make_state(tmp_path, step=1))
    (checkpoint.save(tmp_path, make_state(tmp_path, step=2)) / checkpoint.MARKER).unlink()
    assert checkpoint.resolve(tmp_path, "last").name == "step-000001"
    with pytest.raises(CheckpointError, match="no complete checkpoint 'step-000002'"):
        checkpoint.resolve(tmp_path, "step-000002")


def test_a_foreign_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a checkpoint directory"):
        checkpoint.load(tmp_path)
    directory = checkpoint.save(tmp_path, make_state(tmp_path))
    state = json.loads((directory / "state.json").read_text())
    (directory / "state.json").write_text(json.dumps(state | {"format": "somebody else's"}))
    with pytest.raises(CheckpointError, match="not a checkpoint of this program"):
        checkpoint.read_state(directory)


def test_pruning_keeps_the_untrained_the_last_and_the_best(tmp_path: Path) -> None:
    scores = {0: 1.0, 10: 1.4, 20: 1.9, 30: 1.5, 40: 1.6}
    for step, score in scores.items():
        checkpoint.save(tmp_path, make_state(tmp_path, step=step, score=score))
    best = checkpoint.resolve(tmp_path, "best").name
    assert best == "step-000020"
    (checkpoint.checkpoint_dir(tmp_path) / ".step-000050.99.partial").mkdir()
    assert checkpoint.prune(tmp_path, keep_last=1, keep=frozenset({best})) == ["step-000010", "step-000030"]
    assert checkpoint.list_complete(tmp_path) == ["step-000000", "step-000020", "step-000040"]
    assert not list(checkpoint.checkpoint_dir(tmp_path).glob(".*"))


DISK_FULL = """
import resource, sys
from pathlib import Path
from test_checkpoint import make_state
from dflash import checkpoint
run = Path(sys.argv[1])
checkpoint.save(run, make_state(run, step=1))
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    checkpoint.save(run, make_state(run, step=2))
except checkpoint.CheckpointError as error:
    print(error)
"""


def test_a_full_disk_keeps_the_earlier_checkpoint_and_says_so(tmp_path: Path) -> None:
    environment: dict[str, Any] = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run(
        [sys.executable, "-c", DISK_FULL, str(tmp_path)], capture_output=True, text=True, env=environment, check=False
    )
    assert "cannot write checkpoint" in done.stdout, done.stderr
    assert "Earlier ones are untouched" in done.stdout
    assert checkpoint.load(checkpoint.resolve(tmp_path, "last")).step == 1
    assert sorted(p.name for p in checkpoint.checkpoint_dir(tmp_path).iterdir()) == ["step-000001"]


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        checkpoint.save(tmp_path, make_state(tmp_path, step=step))
    assert checkpoint.resolve(tmp_path, "last").name == "step-1000000"


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, make_state(tmp_path, step=1, score=1.0))
    directory = checkpoint.save(tmp_path, make_state(tmp_path, step=1, score=2.0))
    assert checkpoint.load(directory).metrics == {"score": 2.0}
    assert [path.name for path in checkpoint.checkpoint_dir(tmp_path).iterdir()] == ["step-000001"]
