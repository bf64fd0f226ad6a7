"""Does the checkpoint say what was trained, in the places and words that servers read?

Everything here is read, nothing is run. Three sources are compared: config.json and the weights, what training wrote down
(a run's state, an export's training.json), and the target with its tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dflash.checking.settings import Check, judged, unobserved
from dflash.checking.subject import Subject
from dflash.config import ConfigError
from dflash.data import chat
from dflash.data.meta import DataError
from dflash.modeling import contract
from dflash.modeling.rope import rope_of_target
from dflash.modeling.shape import DrafterShape
from dflash.modeling.target import embedding_scale, text_config

_FIXES = {
    "names": "write z-lab's names: no prefix, fc, hidden_norm, norm, layers.N.*; servers drop unknown names in silence",
    "shapes": "make config.json and weights come from the same training",
    "dtypes": "store all weights in the expected dtype: export again",
    "finite": "go back to a checkpoint from before the weights became NaN",
    "config": "export again with `python -m dflash export`, or correct config.json",
    "layers": "write 0-based ids of layers whose output the drafter was trained on, below the last layer",
    "block-size": "write the trained block size at the top of config.json and in dflash_config",
    "layer-types": "declare the mask that was trained: full_attention for every layer",
    "mask-token": "write the mask token id that was trained, an id that no text contains",
    "rope": "write the target's rope_theta and scaling, at the top and in rope_parameters, and no partial_rotary_factor",
    "ends": "write input_embedding_scale and final_logit_softcapping of the target into dflash_config",
    "alignment": "convert the checkpoint with `python -m dflash import`, which refuses what it cannot convert",
}
# Where a difference between config.json and what was trained belongs.
_FIELDS = {
    "block_size": "block-size",
    "layer_types": "layer-types",
    "rope_theta": "rope",
    "rope_parameters": "rope",
    "rope_scaling": "rope",
    "num_target_layers": "layers",
}
_INNER_FIELDS = {
    "mask_token_id": "mask-token",
    "target_layer_ids": "layers",
    "block_size": "block-size",
    "input_embedding_scale": "ends",
    "final_logit_softcapping": "ends",
}


def probe(subject: Subject) -> Iterator[Check]:
    """One check a topic."""
    problems: dict[str, list[str]] = {topic: [] for topic in _FIXES}
    for topic, text in subject.problems:
        problems[topic].append(text)
    for topic, text in (*_differences(subject), *_against_target(subject)):
        problems[topic].append(text)
    for topic, texts in problems.items():
        good = _summary(subject, topic)
        yield judged(f"contract.{topic}", not texts, "; ".join(texts[:3]) + _more(texts) if texts else good, _FIXES[topic])
    yield from _unobserved(subject)


def _more(texts: list[str]) -> str:
    return f"; and {len(texts) - 3} more" if len(texts) > 3 else ""


def _summary(subject: Subject, topic: str) -> str:
    shape = subject.shape
    if shape is None:
        return "nothing found"
    return {
        "names": f"{len(subject.stored.weights)} tensors, none missing, none unknown",
        "shapes": "those of config.json",
        "dtypes": str(subject.stored.dtype),
        "finite": "all weights",
        "config": "z-lab's fixed fields",
        "layers": f"{', '.join(map(str, shape.target_layer_ids))} of {shape.num_target_layers}",
        "block-size": str(shape.block_size),
        "layer-types": f"full_attention in {shape.num_layers} layers",
        "mask-token": str(shape.mask_token_id),
        "rope": ", ".join(f"{key} {value}" for key, value in shape.rope_parameters.items()),
        "ends": f"embeddings times {shape.input_embedding_scale:g}, logits capped at {shape.final_logit_softcapping}",
        "alignment": subject.stored.alignment or f"not stated; z-lab's format means: {contract.ALIGNMENT}",
    }[topic]


def _differences(subject: Subject) -> Iterator[contract.Problem]:
    """Where config.json says something else than what training wrote down."""
    values, trained = subject.stored.values, subject.stored.trained
    if trained is not None:
        for key in sorted(values.keys() | trained.keys() - {"dflash_config"}):
            if key != "dflash_config" and values.get(key) != trained.get(key):
                yield _FIELDS.get(key, "config"), f"{key} is {values.get(key)!r}, trained was {trained.get(key)!r}"
        inner, was = values.get("dflash_config") or {}, trained.get("dflash_config") or {}
        for key in sorted(inner.keys() | was.keys()):
            if inner.get(key) != was.get(key):
                yield _INNER_FIELDS.get(key, "config"), f"dflash_config.{key} is {inner.get(key)!r}, trained was {was.get(key)!r}"
    if subject.stored.alignment not in (None, contract.ALIGNMENT):
        yield "alignment", f"{contract.RECORD} states {subject.stored.alignment!r}, expected {contract.ALIGNMENT!r}"


def _against_target(subject: Subject) -> Iterator[contract.Problem]:
    shape = subject.shape
    if shape is None:
        return
    if subject.meta is not None and subject.meta.mask_token_id != shape.mask_token_id:
        yield "mask-token", f"it is {shape.mask_token_id}, the data was prepared with {subject.meta.mask_token_id}"
    if subject.model is None:
        return
    yield from (("rope", text) for text in _rope_differences(shape.rope_parameters, text_config(subject.model)))
    yield from (("ends", text) for text in _ends_differences(shape, subject.model))
    use = _meaning_of(subject.tokenizer, shape.mask_token_id) if subject.tokenizer is not None else ""
    if use:
        yield "mask-token", use


def _rope_differences(own: dict[str, Any], text: Any) -> Iterator[str]:
    try:
        targets = rope_of_target(text)
    except ConfigError as error:
        yield str(error)
        return
    defaults = {"rope_type": "default", "partial_rotary_factor": 1.0}
    for key in sorted(own.keys() | targets.keys()):
        here, there = own.get(key, defaults.get(key)), targets.get(key, defaults.get(key))
        if here != there:
            yield f"{key} is {here}, the target has {there}"


def _ends_differences(shape: DrafterShape, model: Any) -> Iterator[str]:
    """Servers borrow the target's embedding and head as plain matrices, and learn the rest from config.json."""
    scale, cap = embedding_scale(model), getattr(text_config(model), "final_logit_softcapping", None)
    if abs(shape.input_embedding_scale - scale) > 0.01 * scale:  # targets in bf16 round it
        yield f"input_embedding_scale is {shape.input_embedding_scale:g}, the target multiplies by {scale:g}"
    if shape.final_logit_softcapping != cap:
        yield f"final_logit_softcapping is {shape.final_logit_softcapping}, the target's {cap}"


def _meaning_of(tokenizer: Any, token: int) -> str:
    """What the tokenizer uses a token for; empty when a text cannot contain it."""
    if token == tokenizer.mask_token_id or token >= len(tokenizer):
        return ""
    name = tokenizer.convert_ids_to_tokens(token)
    for role in ("eos", "bos", "pad", "unk"):
        if token == getattr(tokenizer, f"{role}_token_id", None):
            return f"{token} is the tokenizer's {role} token {name!r}"
    added = getattr(tokenizer, "added_tokens_decoder", {})
    if token not in added or not added[token].special:
        return f"{token} is the token {name!r}, which texts contain"
    try:
        rendered = chat.render_prompt(tokenizer, [{"role": "user", "content": "x"}])
    except DataError:
        return ""
    return f"{token} is {name!r}, which the chat template writes" if token in rendered else ""


def _unobserved(subject: Subject) -> Iterator[Check]:
    if subject.model is None:
        yield unobserved("contract.target", "no target to compare rope and mask token with", "give --target")
    elif subject.tokenizer is None:
        yield unobserved("contract.tokenizer", "the target has no tokenizer: what it uses the mask token for is unknown")
    if subject.stored.trained is None:
        yield unobserved("contract.record", f"no {contract.RECORD}: what was trained is not written down")
