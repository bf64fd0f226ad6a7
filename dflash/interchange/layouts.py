"""Configurations of drafters of other programs, read as z-lab's.

What is the same in other words is rewritten, and said. What would be another model under z-lab's conventions is refused:
no renaming turns it into a drafter that predicts what servers expect (reference 1.8, 1.9).

Rewritten: block size, layer count and rope into both places; layer ids by z-lab's rule where none are written (SpecForge);
speculators' layer ids minus 1, because its 0 is the embedding's output, and its inner transformer configuration.
Refused: labels that begin at index 0 of a block (`sample_from_anchor`, DeepSpec and DSpark), other heads (Domino, reduced
vocabularies), DFlash 2, sliding or causal layers, and TorchSpec's own names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash.config import ConfigError
from dflash.modeling.feature_layers import target_layer_ids

_OTHER_LABELS = "its labels begin at index 0 of a block, z-lab's at index 1: as a z-lab drafter every token would be one late"
# Settings that change what a drafter computes, and the only value under which it computes what z-lab's format says.
_NEUTRAL: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "is_causal": False,
    "causal": False,
    "use_swa": False,
    "is_neox_style": True,
    "partial_rotary_factor": 1.0,
    "output_multiplier": 1.0,
    "shift_label": False,
    "sample_from_anchor": False,
}


@dataclass(frozen=True)
class Read:
    """A configuration in z-lab's words."""

    layout: str
    values: dict[str, Any]  # for DrafterShape.from_zlab_config
    rewritten: tuple[str, ...]


def read_config(values: dict[str, Any], target: Any) -> Read:
    """Tell the layout of a config.json and rewrite it for the target of text configuration `target`.

    Raises ConfigError on an unknown layout, and on a drafter that is another model under z-lab's conventions.
    """
    names = set(values.get("architectures") or ())
    if "speculators_model_type" in values:
        read = _speculators(values, target)
    elif "DFlashDraftModel" in names or "dflash_config" in values:
        read = _zlab(values, target)
    elif any("DSpark" in name or "Domino" in name for name in names):
        raise ConfigError(f"architectures is {sorted(names)}: {_OTHER_LABELS}. Train a DFlash drafter instead")
    else:
        raise ConfigError(
            f"config.json names {sorted(names) or 'no architecture'} and has neither dflash_config nor speculators_model_type: "
            f"expected a DFlash drafter of z-lab, SpecForge or speculators (export TorchSpec's to z-lab's format first)"
        )
    return read


def _speculators(values: dict[str, Any], target: Any) -> Read:
    kind = values["speculators_model_type"]
    if kind != "dflash":
        raise ConfigError(f"speculators_model_type is {kind!r}: only 'dflash' is the architecture of a DFlash drafter")
    inner = values.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise ConfigError("config.json of speculators has no transformer_layer_config: convert the checkpoint again")
    vocabulary = values.get("draft_vocab_size", inner.get("vocab_size"))
    if vocabulary != inner.get("vocab_size"):
        raise ConfigError(
            f"draft_vocab_size is {vocabulary}, the target's vocabulary {inner.get('vocab_size')}: the drafter has a head of its "
            f"own over part of the vocabulary, z-lab's format has none. Train without a reduced vocabulary"
        )
    if values.get("target_hidden_size") not in (None, inner.get("hidden_size")):
        raise ConfigError(
            f"target_hidden_size is {values['target_hidden_size']}, the drafter's {inner.get('hidden_size')}: use equal"
        )
    ids = values.get("aux_hidden_state_layer_ids")
    if not ids:
        raise ConfigError("aux_hidden_state_layer_ids is missing: which target layers were read is unknown")
    both = {"block_size": values.get("block_size"), "num_target_layers": target.num_hidden_layers}
    plain = {
        **inner,
        **both,
        "sample_from_anchor": values.get("sample_from_anchor", False),
        "dflash_config": {
            **both,
            "mask_token_id": values.get("mask_token_id"),
            "target_layer_ids": [number - 1 for number in ids],
        },
    }
    read = _zlab(plain, target)
    note = f"layer ids {list(ids)} count the embedding as 0: {[number - 1 for number in ids]} in z-lab's counting"
    return Read("speculators", read.values, (note, *read.rewritten))


def _zlab(values: dict[str, Any], target: Any) -> Read:
    inner = dict(values.get("dflash_config") or {})
    if "DFlash2DraftModel" in (values.get("architectures") or ()) or "selector_rank" in {**values, **inner}:
        raise ConfigError("it is a DFlash 2 drafter, which has convolutions and a selector: this program reads DFlash only")
    _refuse_other_arithmetic(values, inner)
    notes: list[str] = []
    given = {key: inner.get(key, values.get(key)) for key in ("block_size", "mask_token_id", "target_layer_ids")}
    ends = {key: inner[key] for key in ("input_embedding_scale", "final_logit_softcapping") if inner.get(key) is not None}
    if given["target_layer_ids"] is None:
        layers = (int(values.get("num_target_layers", target.num_hidden_layers)), int(values["num_hidden_layers"]))
        given["target_layer_ids"] = list(target_layer_ids(*layers))
        notes.append(f"no target_layer_ids: z-lab's rule gives {given['target_layer_ids']}")
    missing = [key for key, value in given.items() if value is None]
    if missing:
        raise ConfigError(f"config.json has no {', '.join(missing)}: expected in dflash_config")
    for key in ("block_size", "num_target_layers"):
        if key in inner and key in values and inner[key] != values[key]:
            raise ConfigError(
                f"{key} is {values[key]} at the top of config.json and {inner[key]} in dflash_config: which is right?"
            )
        if (key in inner) != (key in values):
            notes.append(f"{key} stands in one place only: written to both")
    depth = inner.get("num_target_layers", values.get("num_target_layers", target.num_hidden_layers))
    size = {"block_size": given["block_size"], "num_target_layers": depth}
    result = {**values, **size, "dflash_config": {**given, **size, **ends}}
    result.setdefault("head_dim", values.get("hidden_size", 0) // max(1, values.get("num_attention_heads", 1)))
    if "rope_theta" not in {**values, **(values.get("rope_parameters") or {})}:
        raise ConfigError("config.json has no rope_theta: which frequencies were trained is unknown")
    if "rope_theta" not in values or not values.get("rope_parameters"):
        notes.append("rope_theta stands in one place only: written to both")
    if not values.get("rope_parameters"):
        result.pop("rope_parameters", None)
    result["rope_theta"] = values.get("rope_theta", (values.get("rope_parameters") or {}).get("rope_theta"))
    return Read("z-lab" if "auto_map" in values else "z-lab without auto_map (SpecForge)", result, tuple(notes))


def _refuse_other_arithmetic(values: dict[str, Any], inner: dict[str, Any]) -> None:
    """Raise ConfigError on settings under which the weights compute something else."""
    for key, neutral in _NEUTRAL.items():
        found = inner.get(key, values.get(key, (values.get("rope_parameters") or {}).get(key, neutral)))
        if found not in (neutral, None):
            why = _OTHER_LABELS if key in ("sample_from_anchor", "shift_label") else "in z-lab's format it is another model"
            raise ConfigError(f"{key} is {found!r}, expected {neutral!r} or nothing: {why}")
    projector = inner.get("projector_type")
    if projector not in (None, "dflash"):
        raise ConfigError(f"projector_type is {projector!r}: it has another head (Domino, DSpark) than z-lab's format")
    kinds = values.get("layer_types") or []
    if set(kinds) - {"full_attention"}:
        raise ConfigError(f"layer_types is {kinds}: this program reads drafters whose layers are all full_attention")
