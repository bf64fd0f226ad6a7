"""What a drafter is made of, and the config.json that says so in z-lab's format (reference 1.6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from dflash.config import ConfigError, DrafterConfig
from dflash.modeling.feature_layers import check_layer_ids, target_layer_ids
from dflash.modeling.rope import check_rope, rope_of_target

_NEEDED_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "num_target_layers", "vocab_size", "max_position_embeddings",
)  # fmt: skip

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """Every number that decides the drafter's weights and its arithmetic. Checked when it is built."""

    hidden_size: int  # H, the target's
    intermediate_size: int
    num_layers: int  # L
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_features: int  # K
    block_size: int  # B, the anchor included
    rms_norm_eps: float
    rope_parameters: dict[str, Any]  # rope_theta, rope_type and what the type needs
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int  # T
    vocab_size: int  # V, the target's
    max_position_embeddings: int
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: expected at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"{self.num_attention_heads} attention heads do not divide by {self.num_key_value_heads} key/value heads: "
                f"set --drafter.num-attention-heads to a multiple"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}: rotary embedding needs an even number, set --drafter.head-dim")
        if self.block_size < 2:
            raise ConfigError(f"block_size is {self.block_size}: a block needs an anchor and a mask, use at least 2")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(
                f"mask token id is {self.mask_token_id}: expected 0 to {self.vocab_size - 1}, set --target.mask-token-id"
            )
        ends = self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)
        if self.mask_token_id in (*ends, self.bos_token_id, self.pad_token_id):
            raise ConfigError(
                f"mask token id {self.mask_token_id} is also the target's bos, eos or pad token: "
                f"set --target.mask-token-id to an unused id"
            )
        if len(self.target_layer_ids) != self.num_features:
            raise ConfigError(f"{len(self.target_layer_ids)} target layer ids for {self.num_features} features: make them equal")
        check_layer_ids(self.target_layer_ids, self.num_target_layers)
        check_rope(self.rope_parameters)

    @classmethod
    def from_target(cls, text_config: Any, drafter: DrafterConfig, mask_token_id: int) -> Self:
        """The shape of a drafter for a target: sizes that `drafter` leaves None are the target's.

        `text_config` is the decoder's configuration (`dflash.modeling.target.text_config`). Raises ConfigError on sizes
        that the target does not have or that do not fit.
        """
        heads = _size(drafter.num_attention_heads, text_config, "num_attention_heads")
        head_dim = (
            drafter.head_dim
            or getattr(text_config, "head_dim", None)
            or text_config.hidden_size // text_config.num_attention_heads
        )
        layers = text_config.num_hidden_layers
        ids = drafter.target_layer_ids
        ids = target_layer_ids(layers, drafter.num_features) if ids is None else check_layer_ids(tuple(ids), layers)
        return cls(
            hidden_size=text_config.hidden_size,
            intermediate_size=_size(drafter.intermediate_size, text_config, "intermediate_size"),
            num_layers=drafter.num_layers,
            num_attention_heads=heads,
            num_key_value_heads=_size(drafter.num_key_value_heads, text_config, "num_key_value_heads"),
            head_dim=head_dim,
            num_features=len(ids),
            block_size=drafter.block_size,
            rms_norm_eps=text_config.rms_norm_eps,
            rope_parameters=rope_of_target(text_config),
            mask_token_id=mask_token_id,
            target_layer_ids=ids,
            num_target_layers=layers,
            vocab_size=text_config.vocab_size,
            max_position_embeddings=text_config.max_position_embeddings,
            bos_token_id=getattr(text_config, "bos_token_id", None),
            eos_token_id=_tuple_if_list(getattr(text_config, "eos_token_id", None)),
            pad_token_id=getattr(text_config, "pad_token_id", None),
        )

    def to_zlab_config(self) -> dict[str, Any]:
        """The config.json of a released drafter (reference 1.6), with block size and rope in both places that readers use."""
        scaling = {
            key: value for key, value in self.rope_parameters.items() if key not in {"rope_theta", "partial_rotary_factor"}
        }
        return {
            "architectures": ["DFlashDraftModel"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "block_size": self.block_size,
            "bos_token_id": self.bos_token_id,
            "dflash_config": {
                "block_size": self.block_size,
                "mask_token_id": self.mask_token_id,
                "num_target_layers": self.num_target_layers,
                "target_layer_ids": list(self.target_layer_ids),
            },
            "dtype": "bfloat16",
            "eos_token_id": list(self.eos_token_id) if isinstance(self.eos_token_id, tuple) else self.eos_token_id,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "layer_types": ["full_attention"] * self.num_layers,
            "max_position_embeddings": self.max_position_embeddings,
            "max_window_layers": self.num_layers,
            "model_type": "qwen3",
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "num_target_layers": self.num_target_layers,
            "pad_token_id": self.pad_token_id,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_type": "default", **self.rope_parameters},
            "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
            "rope_theta": self.rope_parameters["rope_theta"],
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
        }

    @classmethod
    def from_zlab_config(cls, values: dict[str, Any]) -> Self:
        """Read a released config.json, ours or z-lab's. Raises ConfigError on missing or contradictory values."""
        missing = [key for key in _NEEDED_KEYS if key not in values]
        inner = values.get("dflash_config") or {}
        missing += [f"dflash_config.{key}" for key in ("mask_token_id", "target_layer_ids") if key not in inner]
        if missing:
            raise ConfigError(f"the drafter's config.json lacks {', '.join(missing)}: expected z-lab's DFlash format")
        ids = tuple(inner["target_layer_ids"])
        strange = [key for key in _NEEDED_KEYS if not isinstance(values[key], int | float)]
        if strange or not all(isinstance(number, int) for number in (*ids, inner["mask_token_id"])):
            raise ConfigError(
                f"the drafter's config.json holds something else than numbers in {', '.join(strange) or 'dflash_config'}"
            )
        return cls(
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_layers=values["num_hidden_layers"],
            num_attention_heads=values["num_attention_heads"],
            num_key_value_heads=values["num_key_value_heads"],
            head_dim=values["head_dim"],
            num_features=len(ids),
            block_size=_agreed("block_size", values.get("block_size"), inner.get("block_size")),
            rms_norm_eps=values["rms_norm_eps"],
            rope_parameters=_rope_of_zlab(values),
            mask_token_id=inner["mask_token_id"],
            target_layer_ids=ids,
            num_target_layers=_agreed("num_target_layers", values["num_target_layers"], inner.get("num_target_layers")),
            vocab_size=values["vocab_size"],
            max_position_embeddings=values["max_position_embeddings"],
            bos_token_id=values.get("bos_token_id"),
            eos_token_id=_tuple_if_list(values.get("eos_token_id")),
            pad_token_id=values.get("pad_token_id"),
        )


def _size(asked: int | None, text_config: Any, name: str) -> int:
    value = getattr(text_config, name, None) if asked is None else asked
    if value is None:
        raise ConfigError(f"the target's configuration has no {name}: set --drafter.{name.replace('_', '-')}")
    return int(value)


def _tuple_if_list(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _agreed(name: str, outer: Any, inner: Any) -> int:
    found = {value for value in (outer, inner) if value is not None}
    if len(found) != 1:
        raise ConfigError(
            f"{name} is {outer} at the top of config.json and {inner} in dflash_config: write the same number in both"
        )
    return int(found.pop())


def _rope_of_zlab(values: dict[str, Any]) -> dict[str, Any]:
    new, scaling, theta = values.get("rope_parameters"), values.get("rope_scaling"), values.get("rope_theta")
    if new is None:
        old_type = {"rope_type": (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))}
        rest = {key: value for key, value in (scaling or {}).items() if key != "type"}
        return {**old_type, **rest, "rope_theta": theta}
    if theta is not None and new.get("rope_theta", theta) != theta:
        raise ConfigError(
            f"rope_theta is {theta} at the top of config.json and {new['rope_theta']} in rope_parameters: write the same number"
        )
    return {"rope_theta": theta, **new}


def misfit(shape: DrafterShape, text: Any) -> str | None:
    """In what a target of this text configuration is not the drafter's ("a vocabulary of 520, the target has 512"), or None."""
    for what, found, expected in (
        ("a hidden size", shape.hidden_size, text.hidden_size),
        ("a vocabulary", shape.vocab_size, text.vocab_size),
        ("a number of target layers", shape.num_target_layers, text.num_hidden_layers),
    ):
        if found != expected:
            return f"{what} of {found}, the target has {expected}"
    return None
