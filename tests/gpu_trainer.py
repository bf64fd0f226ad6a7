"""Laws of the trainer that only GPUs can show. Not collected by name; run it with

python -m pytest tests/gpu_trainer.py --gpus 1

With `--gpus 2` the second drafter has a GPU of its own, and its gradients cross to the leader's.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from helpers_training import make_config

from dflash import assembly, checkpoint
from dflash.trainer import train
from dflash.worker import DrafterModelWorker

ONE = {"topology": "1t+1d", "devices": "cuda:0,cuda:0"}


@pytest.fixture
def two(request: pytest.FixtureRequest) -> dict[str, str]:
    """One target and two drafters, on as many GPUs as the run may use."""
    last = "cuda:1" if request.config.getoption("--gpus") > 1 else "cuda:0"
    return {"topology": "1t+2d", "devices": f"cuda:0,cuda:0,{last}"}


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [line["fields"]["loss"] for line in lines if line["name"] == "step"]


def test_two_drafters_equal_one_with_twice_the_batch_in_fp32(
    tmp_path: Path, two: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DrafterModelWorker, "_autocast", lambda _self: nullcontext())
    monkeypatch.setattr(assembly, "_ends_dtype", lambda _device: torch.float32)
    train(make_config(tmp_path / "one", **ONE))
    train(make_config(tmp_path / "two", **two))
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), rel=1e-6)
    final = [checkpoint.load(checkpoint.resolve(tmp_path / run, "last")).weights for run in ("one", "two")]
    for name, value in final[0].items():
        torch.testing.assert_close(value, final[1][name], rtol=1e-4, atol=1e-6)


def test_two_compiled_drafters_in_bf16_start_equal_and_stay_close(tmp_path: Path, two: dict[str, str]) -> None:
    compiled = {"drafter": {"attention": "flex"}, "compile": {"policy": "prewarm"}}
    results = [train(make_config(tmp_path / name, **(compiled | where))) for name, where in (("one", ONE), ("two", two))]
    found = [losses(tmp_path / name) for name in ("one", "two")]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)  # summed in another order
    assert found[0] == pytest.approx(found[1], rel=2e-3)
    assert all((r["recompiles_after_warmup"], r["fallbacks"], r["fx_errors"]) == (0, 0, 0) for r in results)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # the target is fp32
@pytest.mark.parametrize(
    "lever", [{"compile": {"loss": True}}, {"compile": {"target": True}}, {"optim": {"bf16_copies": True}}], ids=str
)
def test_a_lever_changes_losses_by_rounding_at_most_and_recompiles_nothing(
    tmp_path: Path, lever: dict[str, dict[str, bool]]
) -> None:
    plain = {"drafter": {"attention": "flex"}, "compile": {"policy": "prewarm"}}
    faster = plain | {section: plain.get(section, {}) | fields for section, fields in lever.items()}
    results = [train(make_config(tmp_path / name, **(fields | ONE))) for name, fields in (("plain", plain), ("faster", faster))]
    assert losses(tmp_path / "faster") == pytest.approx(losses(tmp_path / "plain"), rel=2e-3)
    assert all((r["recompiles_after_warmup"], r["fallbacks"], r["fx_errors"]) == (0, 0, 0) for r in results)
