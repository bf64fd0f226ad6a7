"""The released form of a drafter: config.json, model.safetensors and README.md as z-lab's runtime and servers read them.

Servers load what they recognise and say nothing about the rest: a wrong name is a random drafter, a wrong number a slow
one (reference 1.6 to 1.8). So the export is checked by reading it back, and a bad one is never left in place.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash.config import ConfigError
from dflash.errors import ContractError
from dflash.files import sync
from dflash.modeling.drafter import Drafter
from dflash.modeling.shape import DrafterShape

_FIXED_VALUES: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "dtype": "bfloat16",
}


RECORD = "training.json"
RECORD_FORMAT = "dflash-harness export 1"
ALIGNMENT = "index k of a block predicts the token at anchor + k, k = 1 to B-1"

Problem = tuple[str, str]  # topic, sentence
_TOPICS = (
    ("block_size", "block-size"),
    ("num_target_layers", "layers"),
    ("target layer id", "layers"),
    ("mask token id", "mask-token"),
    ("rope_", "rope"),
    ("partial_rotary_factor", "rope"),
)


def write_export(
    directory: Path,
    weights: Mapping[str, Tensor],
    shape: DrafterShape,
    target_name: str,
    record: Mapping[str, Any] | None = None,
) -> None:
    """Write the drafter to the new directory `directory`, weights in bf16.

    `weights` is the state dict of a `Drafter` of `shape`, any dtype and device; `target_name` is what users load the target
    by; `record` is what training knows (target, data, step), kept in training.json, which servers do not read. Raises
    ConfigError when the directory exists and is not empty, ContractError when the check finds problems; then nothing is
    left behind.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} exists and is not an empty directory: export to a new one")
    aside = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    aside.mkdir(parents=True)
    try:
        tensors = {name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in weights.items()}
        save_file(tensors, aside / "model.safetensors", metadata={"format": "pt"})
        _write_json(aside / "config.json", shape.to_zlab_config())
        (aside / "README.md").write_text(_model_card(shape, target_name, tensors), encoding="utf-8")
        if record is not None:
            _write_json(
                aside / RECORD, {"format": RECORD_FORMAT, "alignment": ALIGNMENT, **record, "shape": shape.to_zlab_config()}
            )
        (aside / "model.safetensors").chmod((aside / "config.json").stat().st_mode)  # safetensors makes it private
        problems = check_export(aside)
        if problems:
            raise ContractError("the export would be misread:\n" + "\n".join(f"- {problem}" for problem in problems))
        for file in aside.iterdir():
            sync(file)
        aside.replace(directory)
        sync(directory.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # gone already when it was renamed


def check_export(directory: Path) -> list[str]:
    """What is wrong with an exported drafter, one sentence a problem; an empty list means that servers read it as trained."""
    try:
        values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [f"config.json cannot be read ({type(error).__name__}: {error})"]
    if not isinstance(values, dict):
        return [f"config.json holds a {type(values).__name__}, expected an object"]
    file = directory / "model.safetensors"
    try:
        tensors = read_weights(file)
    except (OSError, SafetensorError) as error:
        return [text for _, text in config_problems(values)] + [f"{file.name} cannot be read ({type(error).__name__}: {error})"]
    return [text for _, text in (*config_problems(values), *weight_problems(values, tensors))]


def read_weights(file: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU. Raises OSError or SafetensorError."""
    with safe_open(file, framework="pt") as stored:
        return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - a file, not a dictionary


def config_problems(values: dict[str, Any]) -> list[Problem]:
    """What is wrong with the contents of a config.json."""
    problems = list(_value_problems(values))
    _, error = _shape_of(values)
    return [*problems, (_topic(error), error)] if error else problems


def weight_problems(values: dict[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> list[Problem]:
    """What is wrong with the weights that stand beside a config.json of `values`; released ones are bf16."""
    shape, _ = _shape_of(values)
    return list(_weight_problems(tensors, shape, dtype))


def _shape_of(values: dict[str, Any]) -> tuple[DrafterShape | None, str]:
    try:
        return DrafterShape.from_zlab_config(values), ""
    except (ConfigError, TypeError, ValueError, AttributeError) as error:
        return None, str(error)


def _topic(error: str) -> str:
    """Messages about a configuration begin with the field that they are about."""
    return next((topic for start, topic in _TOPICS if error.startswith(start)), "config")


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _value_problems(values: dict[str, Any]) -> Iterator[Problem]:
    for key, expected in _FIXED_VALUES.items():
        if values.get(key) != expected:
            yield "config", f"{key} is {values.get(key)!r}, expected {expected!r}"
    inner = values.get("dflash_config")
    inner = inner if isinstance(inner, dict) else {}
    for place, holder in (("at the top", values), ("in dflash_config", inner)):
        if "block_size" not in holder:
            yield "block-size", f"block_size is missing {place} of config.json: servers read one place or the other"
        if holder.get("sample_from_anchor"):
            yield "alignment", f"sample_from_anchor is set {place}: index 0 predicts there, {ALIGNMENT} here"
    kinds, layers = values.get("layer_types"), values.get("num_hidden_layers")
    if not isinstance(layers, int) or kinds != ["full_attention"] * layers:
        text = f"layer_types is {kinds}, expected full_attention for each of {layers} layers: others are served differently"
        yield "layer-types", text
    yield from (("rope", text) for text in _rope_problems(values))


def _rope_problems(values: dict[str, Any]) -> Iterator[str]:
    parameters, scaling = values.get("rope_parameters"), values.get("rope_scaling")
    if "rope_theta" not in values or not isinstance(parameters, dict) or "rope_theta" not in parameters:
        yield "rope_theta must stand at the top and in rope_parameters: servers read one place or the other"
        return
    if not isinstance(scaling, dict | None):
        yield f"rope_scaling is {scaling!r}, expected null or an object"
        return
    old = {"rope_type" if key == "type" else key: value for key, value in (scaling or {"rope_type": "default"}).items()}
    if any(parameters.get(key) != value for key, value in old.items()):
        yield f"rope_scaling is {scaling}, but rope_parameters are {parameters}: expected the same in both"
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        yield f"partial_rotary_factor is {values['partial_rotary_factor']}: the drafter rotates whole heads, expected 1.0 or none"
    if values.get("is_neox_style", True) is not True:
        yield "is_neox_style is not true: the drafter rotates halves, not neighbours"


def _weight_problems(tensors: Mapping[str, Tensor], shape: DrafterShape | None, dtype: torch.dtype) -> Iterator[Problem]:
    for name, tensor in tensors.items():
        if tensor.dtype != dtype:
            yield "dtypes", f"{name} is {tensor.dtype}, expected {dtype}"
        if not torch.isfinite(tensor).all():
            yield "finite", f"{name} holds NaN or infinity"
    if shape is None:
        return
    expected = _expected_shapes(shape)
    file = "model.safetensors"
    yield from (("names", f"{name} is missing in {file}") for name in expected if name not in tensors)
    unknown = (name for name in tensors if name not in expected)
    yield from (("names", f"{name} in {file} is unknown: servers would drop it silently") for name in unknown)
    for name in expected.keys() & tensors.keys():
        if tuple(tensors[name].shape) != expected[name]:
            yield "shapes", f"{name} has shape {tuple(tensors[name].shape)}, expected {expected[name]} from config.json"


def _expected_shapes(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(weight.shape) for name, weight in Drafter(shape).state_dict().items()}


def _model_card(shape: DrafterShape, target_name: str, tensors: dict[str, Tensor]) -> str:
    parameters = sum(tensor.numel() for tensor in tensors.values())
    base = f"base_model: {target_name}\n" if target_name.count("/") == 1 and not target_name.startswith((".", "/", "~")) else ""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
{base}tags:
- speculative-decoding
- dflash
---

# DFlash drafter for {target_name}

A block-diffusion drafter in z-lab's DFlash format. It proposes {shape.block_size - 1} tokens at once from hidden states of its
target; the target verifies them, so the text is the target's own. Token embedding and head are the target's and not
in this repository.

| | |
|---|---|
| target | {target_name} ({shape.num_target_layers} layers, hidden size {shape.hidden_size}) |
| target layers read | {", ".join(map(str, shape.target_layer_ids))} (0-based, output of the layer) |
| block size | {shape.block_size}, the known token included |
| mask token id | {shape.mask_token_id} |
| draft layers | {shape.num_layers}, full attention |
| parameters | {parameters / 1e6:.1f} M, bf16 |

Serve it with SGLang:

    --speculative-algorithm DFLASH --speculative-draft-model-path THIS --speculative-num-draft-tokens {shape.block_size}

or with vLLM:

    --speculative-config '{{"method": "dflash", "model": "THIS", "num_speculative_tokens": {shape.block_size - 1}}}'

Loading it with `AutoModel` needs z-lab's `dflash.py` beside the weights.
"""
