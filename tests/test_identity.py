"""Laws of dflash.modeling.identity."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from dflash.config import TargetConfig
from dflash.modeling.identity import model_digest
from dflash.modeling.target import load_target

TINY = Path(__file__).parent.parent / "fixtures" / "tiny_target" / "model"


def digest(path: Path, dtype: str = "float32") -> str:
    return model_digest(load_target(TargetConfig(path=str(path), dtype=dtype), device="cpu")[0])


def test_a_model_is_the_same_wherever_it_lies_and_however_its_files_are_cut(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "copy")
    AutoModelForCausalLM.from_pretrained(TINY).save_pretrained(tmp_path / "cut", max_shard_size="2MB")
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 1
    assert digest(TINY) == digest(tmp_path / "copy") == digest(tmp_path / "cut")
    assert digest(TINY, "bfloat16") != digest(TINY)


def test_one_other_weight_or_another_setting_makes_another_model() -> None:
    model, _ = load_target(TargetConfig(path=str(TINY), dtype="float32"), device="cpu")
    before = model_digest(model)
    weight = next(iter(model.parameters())).view(-1)
    with torch.no_grad():
        kept = weight[-7].item()
        weight[-7] = torch.nextafter(weight[-7], torch.tensor(2.0))
        assert model_digest(model) != before
        weight[-7] = kept
    assert model_digest(model) == before
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 7.0}
    assert model_digest(model) != before
