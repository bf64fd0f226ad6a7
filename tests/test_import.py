"""Laws of `import`: what is the same in other words comes back bit for bit, what is another model is refused and told why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_checking import TARGET, cached_load, failed
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash import __main__ as command
from dflash.checking import subject
from dflash.interchange import convert

Values = dict[str, Any]
Weights = dict[str, Tensor]


@pytest.fixture(autouse=True)
def one_load_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(config: Any, *, device: Any) -> Any:
        return cached_load(TARGET if config.path == TARGET.path else config, device=torch.device(device))

    monkeypatch.setattr(convert, "load_target", load)
    monkeypatch.setattr(subject, "load_target", load)


@pytest.fixture
def export(trained_run: Path) -> Path:
    return trained_run.parent / "export"


def read(export: Path) -> tuple[Values, Weights]:
    return json.loads((export / "config.json").read_text()), load_file(export / "model.safetensors")


def write(directory: Path, values: Values, weights: Weights) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(values))
    save_file(weights, directory / "model.safetensors")
    return directory


def as_zlab(values: Values, weights: Weights) -> tuple[Values, Weights]:
    """As z-lab's first checkpoints: everything in its old place only."""
    del values["rope_parameters"], values["dflash_config"]["block_size"], values["dflash_config"]["num_target_layers"]
    return values, weights


def as_specforge(values: Values, weights: Weights) -> tuple[Values, Weights]:
    """As SpecForge's export: transformers 5 writes rope in its new place, and nobody the layer ids that follow from a rule."""
    del values["auto_map"], values["rope_theta"], values["rope_scaling"]
    del values["dflash_config"]["block_size"], values["dflash_config"]["num_target_layers"]
    return values, weights


def as_speculators(values: Values, weights: Weights) -> tuple[Values, Weights]:
    """As speculators: an inner configuration, layers counted from the embedding, copies of the target's ends."""
    inner = values.pop("dflash_config")
    block = values.pop("block_size")
    for key in ("auto_map", "architectures", "num_target_layers"):
        del values[key]
    model, _ = cached_load(TARGET, device=torch.device("cpu"))
    embedding = model.get_input_embeddings().weight.bfloat16()
    ends = {"embed_tokens.weight": embedding, "lm_head.weight": embedding.clone(), "verifier_norm.weight": torch.ones(192)}
    outer = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_config": {"algorithm": "dflash"},
        "transformer_layer_config": values,
        "draft_vocab_size": values["vocab_size"],
        "block_size": block,
        "mask_token_id": inner["mask_token_id"],
        "aux_hidden_state_layer_ids": [number + 1 for number in inner["target_layer_ids"]],
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
    }
    return outer, weights | ends


LAYOUTS = {"z-lab": as_zlab, "SpecForge": as_specforge, "speculators": as_speculators}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_drafter_comes_back_from_every_layout_bit_for_bit(
    export: Path, tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "source", *LAYOUTS[layout](*read(export)))
    assert command.main(["import", str(source), str(tmp_path / "out"), "--target", TARGET.path, "--dtype", "float32"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert layout in result["layout"]
    assert result["rewritten"]
    (values, weights), (before, expected) = read(tmp_path / "out"), read(export)
    assert values == before
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert failed(tmp_path / "out", probes=("contract",)) == {}


def test_prefixes_shards_and_frequencies_are_read_and_told(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values, weights = read(export)
    source = write(tmp_path / "source", values, {"unused": torch.ones(1)})
    (source / "model.safetensors").unlink()
    frequencies = 1.0 / 10_000.0 ** (torch.arange(0, 32, 2) / 32)
    named = {f"model.{name}": weight.float() for name, weight in weights.items()} | {"model.rotary_emb.inv_freq": frequencies}
    listed = {}
    for number, name in enumerate(named):
        listed[name] = f"model-{number:05d}.safetensors"
        save_file({name: named[name]}, source / listed[name])
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    assert command.main(["import", str(source), str(tmp_path / "out"), "--target", TARGET.path]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert any("float32: rounded to bf16" in note for note in result["rewritten"])
    assert result["left_out"] == ["prefix 'model.' of names", "rotary_emb.inv_freq (equals the declared rotary frequencies)"]
    assert all(torch.equal(weight, weights[name]) for name, weight in read(tmp_path / "out")[1].items())


def top(**changes: Any) -> Callable[[Values, Weights], None]:
    return lambda values, _: values.update(changes)


def inner(**changes: Any) -> Callable[[Values, Weights], None]:
    return lambda values, _: values["dflash_config"].update(changes)


def more(**tensors: Tensor) -> Callable[[Values, Weights], None]:
    return lambda _, weights: weights.update({name.replace("__", "."): tensor for name, tensor in tensors.items()})


def drop(name: str) -> Callable[[Values, Weights], None]:
    return lambda values, _: values.pop(name)


REFUSED: dict[str, tuple[str, Callable[[Values, Weights], None], str]] = {
    "labels from the anchor": ("speculators", top(sample_from_anchor=True), "every token would be one late"),
    "reduced vocabulary": ("speculators", top(draft_vocab_size=100), "head of its own over part of the vocabulary"),
    "unknown layers": ("speculators", top(aux_hidden_state_layer_ids=None), "which target layers were read is unknown"),
    "embedding as a feature": ("speculators", top(aux_hidden_state_layer_ids=[0, 4, 6]), "target layer ids are (-1, 3, 5)"),
    "last layer": ("speculators", top(aux_hidden_state_layer_ids=[2, 4, 8]), "last layer"),
    "another speculator": ("speculators", top(speculators_model_type="eagle3"), "only 'dflash'"),
    "another head": ("speculators", more(lm_head__weight=torch.zeros(260, 192)), "differs by up to"),
    "a mapping": ("speculators", more(d2t=torch.ones(260, dtype=torch.int64)), "maps a reduced vocabulary"),
    "DSpark": ("z-lab", lambda v, _: (v.update(architectures=["Qwen3DSparkModel"]), v.pop("dflash_config")), "begin at index 0"),
    "Domino": ("SpecForge", inner(projector_type="domino"), "has another head"),
    "shifted labels": ("SpecForge", inner(shift_label=True), "every token would be one late"),
    "DFlash 2": ("z-lab", top(architectures=["DFlash2DraftModel"]), "DFlash 2 drafter"),
    "sliding layers": ("z-lab", top(layer_types=["sliding_attention"]), "all full_attention"),
    "causal": ("z-lab", inner(causal=True), "causal is True"),
    "partial rotation": ("z-lab", top(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    "neighbours rotated": ("z-lab", top(is_neox_style=False), "is_neox_style is False"),
    "no theta": ("z-lab", drop("rope_theta"), "no rope_theta"),
    "no mask token": ("z-lab", lambda values, _: values["dflash_config"].pop("mask_token_id"), "no mask_token_id"),
    "two block sizes": ("z-lab", inner(block_size=9), "block_size is 4 at the top of config.json and 9"),
    "softcap of its own": ("z-lab", top(final_logit_softcapping=30.0), "trained with other embeddings or logits"),
    "unknown weight": ("z-lab", more(markov_head=torch.ones(2)), "markov_head is not part of a DFlash drafter"),
    "missing weight": ("z-lab", lambda _, weights: weights.pop("fc.weight"), "lack fc.weight"),
    "other frequencies": ("z-lab", more(rotary_emb__inv_freq=torch.ones(16)), "the declared rotary frequencies"),
    "another width": ("z-lab", top(hidden_size=96), "a hidden size of 96"),
    "another depth": ("z-lab", top(num_target_layers=12), "a number of target layers of 12"),
    "another format": (
        "z-lab",
        lambda v, _: (v.update(architectures=["Llama"]), v.pop("dflash_config")),
        "neither dflash_config",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_another_model_is_refused_and_nothing_is_written(
    export: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    layout, change, message = REFUSED[kind]
    values, weights = LAYOUTS[layout](*read(export))
    change(values, weights)
    source = write(tmp_path / "source", values, weights)
    assert command.main(["import", str(source), str(tmp_path / "out"), "--target", TARGET.path]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_source_that_cannot_be_read_is_bad_input(export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "source", *read(export))
    for spoil, message in (
        (lambda: (source / "model.safetensors").write_bytes(b"half"), "cannot be read (SafetensorError"),
        (lambda: (source / "model.safetensors").rename(source / "pytorch_model.bin"), "no .safetensors file"),
        (lambda: (source / "config.json").write_text("{"), "no readable config.json (JSONDecodeError"),
        (lambda: (source / "config.json").write_text("[]"), "holds a list"),
        ((source / "config.json").unlink, "no readable config.json (FileNotFoundError"),
    ):
        spoil()
        assert command.main(["import", str(source), str(tmp_path / "out"), "--target", TARGET.path]) == 2
        assert message in capsys.readouterr().err
