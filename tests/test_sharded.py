"""Laws of drafters that share their parameters (FSDP2); the runs are those of helpers_processes.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_processes import Outcome, keep_until, losses, sharded, weights

from dflash import checkpoint
from dflash.config import ConfigError, RunConfig
from dflash.trainer import train

pytestmark = pytest.mark.timeout(2700)  # whoever comes first waits for all runs in processes


@pytest.fixture(scope="module")
def whole(outcomes: dict[str, Outcome], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training by threads, without an interruption."""
    run = tmp_path_factory.mktemp("whole")
    train(sharded(outcomes["sharded"].run.parents[1], output=run))
    return run


def test_a_run_begun_by_threads_and_sharded_equals_one_that_never_was(outcomes: dict[str, Outcome], whole: Path) -> None:
    run = outcomes["sharded"].run
    assert outcomes["sharded"].codes == {}, outcomes["sharded"].said()
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)
    for name, tensor in weights(run).items():
        torch.testing.assert_close(tensor, weights(whole)[name], rtol=1e-4, atol=1e-5)


def test_its_checkpoints_are_those_of_other_runs(outcomes: dict[str, Outcome], whole: Path) -> None:
    ours, theirs = (checkpoint.load(checkpoint.resolve(run, "last")) for run in (outcomes["sharded"].run, whole))
    assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-4)
    assert "validation_loss" in ours.metrics
    assert ours.moments.keys() == theirs.moments.keys()
    for name, tensor in ours.moments.items():
        torch.testing.assert_close(tensor, theirs.moments[name], rtol=1e-3, atol=1e-6)


def test_a_sharded_run_goes_on_in_threads(outcomes: dict[str, Outcome], whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(outcomes["sharded"].run, run)
    keep_until(run, 4)
    train(sharded(outcomes["sharded"].run.parents[1], output=run, topology="2t+1d", resume=True))
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)


def test_a_drafter_that_dies_while_others_need_its_part_is_named(outcomes: dict[str, Outcome]) -> None:
    (error,) = outcomes["sharded-killed"].errors()
    assert "rank 1 (drafter-1" in error
    assert outcomes["sharded-killed"].codes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "threads"}, "--fully-shard is for --engine processes"),
        ({"topology": "2t+1d"}, "one drafter has nobody to share with"),
        ({"optim": {"batches_per_step": 3}}, "use a multiple of 2"),
        ({"optim": {"bf16_copies": True, "batches_per_step": 2}}, "leave --optim.bf16-copies out"),
        ({"acceptance": {"decode_every_steps": 5}}, "--acceptance.decode-every-steps 0"),
        ({"compile": {"policy": "lock"}}, "use prewarm or eager"),
    ],
)
def test_what_cannot_work_with_it_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    base: dict[str, Any] = {"engine": "processes", "topology": "1t+2d", "optim": {"batches_per_step": 4}, "fully_shard": True}
    with pytest.raises(ConfigError, match=message):
        _config(tmp_path, base | changes)
    assert _config(tmp_path, base).fully_shard


def _config(output: Path, values: dict[str, Any]) -> RunConfig:
    return sharded(output, output=output, **values)
