from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from modeling_batches import lively_drafter, tiny_shape
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config

from dflash.config import ConfigError
from dflash.errors import ContractError
from dflash.modeling.contract import check_export, write_export
from dflash.modeling.drafter import Drafter, DrafterShape

Values = dict[str, Any]
Weights = dict[str, Tensor]


@pytest.fixture
def export(tmp_path: Path) -> Path:
    shape = tiny_shape(bos_token_id=5, eos_token_id=(6, 7), pad_token_id=8)
    write_export(tmp_path / "export", lively_drafter(shape).state_dict(), shape, "Qwen/Qwen3-8B")
    return tmp_path / "export"


def test_an_export_has_no_problems_and_gives_the_drafter_back(export: Path) -> None:
    assert check_export(export) == []
    shape = DrafterShape.from_zlab_config(json.loads((export / "config.json").read_text(encoding="utf-8")))
    assert shape == tiny_shape(bos_token_id=5, eos_token_id=(6, 7), pad_token_id=8)
    drafter = Drafter(shape)
    drafter.load_state_dict(load_file(export / "model.safetensors"))
    expected = lively_drafter(shape).state_dict()
    assert all(torch.equal(weight, expected[name].bfloat16().float()) for name, weight in drafter.state_dict().items())


def test_the_configuration_is_one_of_qwen3_for_transformers(export: Path) -> None:
    config = Qwen3Config.from_pretrained(export)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}
    assert (config.num_hidden_layers, config.head_dim, config.layer_types) == (2, 16, ["full_attention"] * 2)


def test_every_value_that_readers_look_for_is_written(export: Path) -> None:
    values = json.loads((export / "config.json").read_text(encoding="utf-8"))
    expected = (
        "architectures model_type auto_map block_size dflash_config num_target_layers num_hidden_layers hidden_size "
        "intermediate_size num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps rope_theta rope_parameters "
        "rope_scaling max_position_embeddings layer_types sliding_window use_sliding_window max_window_layers attention_bias "
        "dtype attention_dropout initializer_range tie_word_embeddings use_cache vocab_size bos_token_id "
        "eos_token_id pad_token_id"
    )
    assert set(values) == set(expected.split())
    assert values["dflash_config"] == {
        "block_size": 4,
        "mask_token_id": 511,
        "num_target_layers": 8,
        "target_layer_ids": [1, 3, 5],
    }


def test_the_model_card_names_target_and_flags(export: Path) -> None:
    card = (export / "README.md").read_text(encoding="utf-8")
    for text in (
        "base_model: Qwen/Qwen3-8B",
        "--speculative-num-draft-tokens 4",
        '"num_speculative_tokens": 3',
        "1, 3, 5",
        "511",
    ):
        assert text in card


def test_weights_are_as_readable_as_the_configuration(export: Path) -> None:
    assert (export / "model.safetensors").stat().st_mode == (export / "config.json").stat().st_mode


def change_config(**changes: Any) -> Callable[[Values, Weights], None]:
    return lambda values, _: values.update(changes)


def drop(*keys: str) -> Callable[[Values, Weights], None]:
    def edit(values: Values, _: Weights) -> None:
        for key in keys[:-1]:
            values = values[key]
        del values[keys[-1]]

    return edit


def inner(**changes: Any) -> Callable[[Values, Weights], None]:
    return lambda values, _: values["dflash_config"].update(changes)


def rename(old: str, new: str) -> Callable[[Values, Weights], None]:
    return lambda _, weights: weights.update({new: weights.pop(old)})


def discard(name: str) -> Callable[[Values, Weights], None]:
    def edit(_: Values, weights: Weights) -> None:
        del weights[name]

    return edit


def replace(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Values, Weights], None]:
    return lambda _, weights: weights.update({name: make(weights[name])})


CORRUPTIONS: dict[str, tuple[Callable[[Values, Weights], None], str]] = {
    "missing weight": (
        discard("layers.1.mlp.up_proj.weight"),
        "layers.1.mlp.up_proj.weight is missing",
    ),
    "prefixed weight": (rename("fc.weight", "model.fc.weight"), "model.fc.weight in model.safetensors is unknown"),
    "unknown weight": (
        lambda _, weights: weights.update(lm_head=torch.ones(1, dtype=torch.bfloat16)),
        "lm_head in model.safetensors",
    ),
    "rotary buffer": (lambda _, weights: weights.update({"rotary.inv_freq": torch.ones(8).bfloat16()}), "rotary.inv_freq"),
    "transposed weight": (replace("fc.weight", lambda w: w.T.contiguous()), "fc.weight has shape (96, 32), expected (32, 96)"),
    "fp32 weight": (replace("norm.weight", lambda w: w.float()), "norm.weight is torch.float32"),
    "nan": (replace("norm.weight", lambda w: w * torch.nan), "norm.weight holds NaN"),
    "block size only inside": (drop("block_size"), "block_size is missing at the top"),
    "block size only on top": (drop("dflash_config", "block_size"), "block_size is missing in dflash_config"),
    "two block sizes": (inner(block_size=8), "block_size is 4 at the top of config.json and 8"),
    "no mask id": (drop("dflash_config", "mask_token_id"), "dflash_config.mask_token_id"),
    "mask id out of range": (inner(mask_token_id=512), "mask token id is 512"),
    "mask id is eos": (inner(mask_token_id=7), "mask token id 7 is also"),
    "mask id is pad": (inner(mask_token_id=8), "mask token id 8 is also"),
    "last layer": (inner(target_layer_ids=[1, 3, 7]), "last layer"),
    "layer out of range": (inner(target_layer_ids=[1, 3, 8]), "expected numbers from 0 to 6"),
    "layers not ascending": (inner(target_layer_ids=[3, 1, 5]), "ascending"),
    "one feature less": (inner(target_layer_ids=[1, 3]), "fc.weight has shape (32, 96), expected (32, 64)"),
    "no layers": (drop("dflash_config", "target_layer_ids"), "dflash_config.target_layer_ids"),
    "two target depths": (inner(num_target_layers=9), "num_target_layers is 8"),
    "no dflash_config": (drop("dflash_config"), "dflash_config.mask_token_id"),
    "no theta on top": (drop("rope_theta"), "rope_theta must stand"),
    "no theta inside": (drop("rope_parameters", "rope_theta"), "rope_theta must stand"),
    "two thetas": (change_config(rope_theta=5e5), "rope_theta is 500000.0 at the top of config.json and 10000.0"),
    "scaling in the old place only": (
        change_config(rope_scaling={"rope_type": "linear", "factor": 2.0}),
        "expected the same in both",
    ),
    "scaling of no kind": (change_config(rope_scaling="linear"), "expected null or an object"),
    "unknown rope": (
        change_config(
            rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            rope_scaling={"rope_type": "dynamic", "factor": 2.0},
        ),
        "rope_type is 'dynamic'",
    ),
    "partial rotation": (change_config(partial_rotary_factor=0.25), "partial_rotary_factor is 0.25"),
    "partial rotation inside": (
        change_config(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}),
        "partial_rotary_factor is 0.25",
    ),
    "neighbours rotated": (change_config(is_neox_style=False), "is_neox_style"),
    "sliding layer": (change_config(layer_types=["full_attention", "sliding_attention"]), "layer_types"),
    "layer types of another depth": (change_config(layer_types=["full_attention"]), "layer_types"),
    "another depth": (change_config(num_hidden_layers=3), "layers.2.input_layernorm.weight is missing"),
    "depth is no number": (change_config(num_hidden_layers="two"), "something else than numbers in num_hidden_layers"),
    "layer ids are no numbers": (inner(target_layer_ids=["1", "3", "5"]), "something else than numbers in dflash_config"),
    "no heads": (change_config(num_key_value_heads=0), "num_key_value_heads is 0"),
    "another architecture": (change_config(architectures=["Qwen3DSparkModel"]), "architectures is ['Qwen3DSparkModel']"),
    "another activation": (change_config(hidden_act="gelu"), "hidden_act is 'gelu'"),
    "bias": (change_config(attention_bias=True), "attention_bias is True"),
    "another dtype": (change_config(dtype="float32"), "dtype is 'float32'"),
    "no width": (drop("hidden_size"), "lacks hidden_size"),
    "another width": (change_config(hidden_size=48), "hidden_norm.weight has shape (32,), expected (48,)"),
    "heads that do not divide": (change_config(num_attention_heads=3), "3 attention heads"),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_check_reports_every_kind_of_corruption(export: Path, kind: str) -> None:
    edit, expected = CORRUPTIONS[kind]
    values, weights = json.loads((export / "config.json").read_text(encoding="utf-8")), load_file(export / "model.safetensors")
    edit(values, weights)
    (export / "config.json").write_text(json.dumps(values), encoding="utf-8")
    save_file(weights, export / "model.safetensors")
    assert any(expected in problem for problem in check_export(export)), check_export(export)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("config.json", None, "config.json cannot be read (FileNotFoundError"),
        ("config.json", b"{", "config.json cannot be read (JSONDecodeError"),
        ("config.json", b"[]", "config.json holds a list"),
        ("model.safetensors", None, "model.safetensors cannot be read (FileNotFoundError"),
        ("model.safetensors", b"half a file", "model.safetensors cannot be read (SafetensorError"),
    ],
)
def test_check_reports_files_that_cannot_be_read(export: Path, name: str, content: bytes | None, expected: str) -> None:
    if content is None:
        (export / name).unlink()
    else:
        (export / name).write_bytes(content)
    assert any(problem.startswith(expected) for problem in check_export(export)), check_export(export)


def test_a_bad_export_leaves_nothing_behind(tmp_path: Path) -> None:
    shape = tiny_shape()
    weights = lively_drafter(shape).state_dict()
    del weights["fc.weight"]
    with pytest.raises(ContractError, match=r"fc\.weight is missing"):
        write_export(tmp_path / "export", weights, shape, "target")
    assert list(tmp_path.iterdir()) == []


def test_an_export_never_overwrites(tmp_path: Path, export: Path) -> None:
    shape = tiny_shape()
    before = (export / "config.json").read_bytes()
    with pytest.raises(ConfigError, match="not an empty directory"):
        write_export(export, lively_drafter(shape, seed=1).state_dict(), shape, "target")
    assert (export / "config.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
