"""`python -m dflash import SOURCE OUT --target T`: a drafter of another program, written as this program exports its own.

The configuration is rewritten by `layouts`. Weights keep their names but for a prefix that all share; copies of the target's
embedding and head, and rotary buffers, are left out after they were compared with the target's and with the declared ones.
Everything rewritten or left out is in the result. Values are stored in bf16.

Reads a local directory with config.json and safetensors, in one file or several. Not read: pickled weights, because loading
them runs code, so a SpecForge training state has to be exported first (`specforge export --to hf`).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from dflash.config import ConfigError, TargetConfig
from dflash.decoding.evaluate import check_fit
from dflash.interchange.layouts import read_config
from dflash.modeling import contract
from dflash.modeling.drafter import Drafter, DrafterShape
from dflash.modeling.target import embedding_scale, load_target, text_config

_PREFIXES = ("model.", "module.", "draft_model.", "dflash_module.")
_TARGETS_OWN = {"embed_tokens.weight": "embedding", "lm_head.weight": "head", "verifier_lm_head.weight": "head"}
_CLOSE = 1e-2  # relative: both sides may have been rounded to bf16


def convert(source: Path, out: Path, target: TargetConfig) -> dict[str, Any]:
    """Write the drafter in `source` as an export to the new directory `out`; returns what was read, rewritten and left out.

    Raises ConfigError where the drafter cannot be read as one of z-lab's format, CheckpointError where it is another
    target's, ContractError where the result would be misread.
    """
    values, weights = _config(source), _weights(source)
    model, _ = load_target(target, device="cpu")
    text = text_config(model)
    read = read_config(values, text)
    shape = DrafterShape.from_zlab_config(read.values)
    check_fit(shape, text, str(source), target.path)
    _same_ends(shape, model)
    own, left_out = _own_weights(weights, shape, model)
    rounded = sorted({str(weight.dtype).removeprefix("torch.") for weight in own.values()} - {"bfloat16"})
    notes = [*read.rewritten, *([f"weights in {', '.join(rounded)}: rounded to bf16"] if rounded else [])]
    record = {"source": str(source.absolute()), "layout": read.layout, "target": dataclasses.asdict(target)}
    contract.write_export(out, own, shape, target.path, record)
    return {"source": str(source), "layout": read.layout, "export": str(out), "rewritten": notes, "left_out": left_out}


def _same_ends(shape: DrafterShape, model: Any) -> None:
    """Raise ConfigError where the drafter was trained between another embedding and head than the target's."""
    own = (shape.input_embedding_scale, shape.final_logit_softcapping)
    targets = (embedding_scale(model), getattr(text_config(model), "final_logit_softcapping", None))
    if abs(own[0] - targets[0]) > _CLOSE * targets[0] or own[1] != targets[1]:
        raise ConfigError(
            f"input_embedding_scale and final_logit_softcapping are {own}, the target's {targets}: the drafter was trained "
            f"with other embeddings or logits; if it was trained with the target's, write them into dflash_config"
        )


def _config(source: Path) -> dict[str, Any]:
    try:
        values = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{source} holds no readable config.json ({type(error).__name__}: {error}): name a local directory with a drafter"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{source / 'config.json'} holds a {type(values).__name__}, expected an object")
    return values


def _weights(source: Path) -> dict[str, Tensor]:
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{source} holds no .safetensors file: pickled weights are not read, convert them first")
    index = source / "model.safetensors.index.json"
    weights: dict[str, Tensor] = {}
    try:
        listed = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())) if index.is_file() else None
        for file in files if listed is None else [source / name for name in listed]:
            weights |= contract.read_weights(file)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(
            f"the weights in {source} cannot be read ({type(error).__name__}: {error}): download them again"
        ) from error
    return weights


def _own_weights(weights: dict[str, Tensor], shape: DrafterShape, model: Any) -> tuple[dict[str, Tensor], list[str]]:
    """The drafter's weights under z-lab's names, and what was left out. Raises ConfigError on anything that is neither."""
    left_out: list[str] = []
    prefix = next((prefix for prefix in _PREFIXES if f"{prefix}fc.weight" in weights), "")
    if prefix:
        left_out.append(f"prefix {prefix!r} of names")
    plain = {name.removeprefix(prefix): weight for name, weight in weights.items()}
    expected = Drafter(shape).state_dict()
    missing = [name for name in expected if name not in plain]
    if missing:
        raise ConfigError(
            f"the weights lack {', '.join(missing[:3])} ({len(missing)} in all): not a DFlash drafter of z-lab's names"
        )
    for name, weight in plain.items():
        if name not in expected:
            left_out.append(_droppable(name, weight, shape, model))
    return {name: plain[name] for name in expected}, left_out


def _droppable(name: str, weight: Tensor, shape: DrafterShape, model: Any) -> str:
    """Why a weight can be left out. Raises ConfigError when it cannot."""
    if name in _TARGETS_OWN:
        role = _TARGETS_OWN[name]
        module = model.get_input_embeddings() if role == "embedding" else model.get_output_embeddings()
        return _same(name, weight, module.weight, f"the target's {role}, which servers use instead")
    if name == "verifier_norm.weight":
        return f"{name} (the target's final norm, used in training only)"
    if name.endswith("inv_freq"):
        return _same(name, weight, Drafter(shape).rotary.inv_freq, "the declared rotary frequencies")
    if name in ("d2t", "t2d"):
        whole = not bool(weight.any()) if name == "d2t" else bool(weight.all())
        if whole and len(weight) == shape.vocab_size:
            return f"{name} (maps the whole vocabulary to itself)"
        raise ConfigError(f"{name} maps a reduced vocabulary: z-lab's format has none")
    raise ConfigError(f"{name} is not part of a DFlash drafter, and servers would drop it silently: is it another architecture?")


def _same(name: str, weight: Tensor, expected: Tensor, what: str) -> str:
    if weight.shape != expected.shape:
        raise ConfigError(f"{name} has shape {tuple(weight.shape)}, {what} {tuple(expected.shape)}: they must be equal")
    scale = expected.detach().float().abs().clamp_min(1e-3)
    off = ((weight.float() - expected.detach().float()).abs() / scale).max().item()
    if not off <= (_CLOSE if weight.dtype != torch.float32 or name in _TARGETS_OWN else 1e-5):
        raise ConfigError(f"{name} differs by up to {off:.1e} from {what}: they must be equal")
    return f"{name} (equals {what})"
