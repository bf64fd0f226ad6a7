"""Rotary position embedding of the drafter: which frequencies, and applying them.

Legend: R rows, Q tokens, d size of a head.

The frequencies decide acceptance: a server that rotates differently from the trainer serves a drafter that is right only
in training. So they are the target's (`rope_theta`, scaling), the layout is rotate-half ("neox") over the whole head, and
they stay fp32 whatever the module is cast to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash import events
from dflash.config import ConfigError

# Kinds whose frequencies do not depend on the length of the text; the others change under a key cache.
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# Axes of images and video. All axes carry the same position in text, where the split changes nothing.
_TEXT_NEUTRAL_KEYS = frozenset({"mrope_section", "mrope_interleaved"})


def rope_of_target(text_config: Any) -> dict[str, Any]:
    """The rope parameters a drafter takes from its target's configuration.

    Targets with different ropes for different kinds of layers (Gemma 3) give those of `full_attention`: all layers of the
    drafter see the whole context. `partial_rotary_factor` is not taken over: the drafter rotates whole heads, says 1.0
    instead, and an event `modeling.rope` tells so (a factor that is written but not applied costs half the acceptance).
    Raises ConfigError when there are no parameters, or of a kind that changes with the length.
    """
    parameters = dict(getattr(text_config, "rope_parameters", None) or {})
    if "full_attention" in parameters:
        parameters = dict(parameters["full_attention"])
    elif parameters and all(isinstance(value, dict) for value in parameters.values()):
        raise ConfigError(
            f"the target has rope parameters for layers {', '.join(parameters)}, none for full_attention: pick another target"
        )
    kept = {key: value for key, value in parameters.items() if key not in _TEXT_NEUTRAL_KEYS}
    factor = kept.get("partial_rotary_factor", getattr(text_config, "partial_rotary_factor", None))
    if factor is not None and factor != 1.0:
        kept["partial_rotary_factor"] = 1.0
        events.record("modeling.rope", target_partial_rotary_factor=factor, drafter_partial_rotary_factor=1.0)
    check_rope(kept)
    return kept


def check_rope(parameters: dict[str, Any]) -> None:
    """Raise ConfigError on rope parameters that the drafter does not compute."""
    kind = parameters.get("rope_type", "default")
    if kind not in SUPPORTED_ROPE_TYPES:
        raise ConfigError(f"rope_type is {kind!r}: the drafter computes {', '.join(SUPPORTED_ROPE_TYPES)}")
    theta = parameters.get("rope_theta")
    if not isinstance(theta, int | float) or theta <= 0:
        raise ConfigError(f"rope_theta is {theta!r}: expected a positive number in the target's rope_parameters")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"partial_rotary_factor is {parameters['partial_rotary_factor']}: the drafter rotates whole heads, expected 1.0"
        )


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions, fp32. Its frequencies are in no state dict and keep fp32 under every cast."""

    inv_freq: Tensor  # [d/2] fp32

    def __init__(self, parameters: dict[str, Any], head_dim: int, max_position_embeddings: int) -> None:
        super().__init__()
        check_rope(parameters)
        self._exact, self.attention_scale = _frequencies(parameters, head_dim, max_position_embeddings)
        self.register_buffer("inv_freq", self._exact.clone(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: FBT002 - torch's signature
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        self.inv_freq = self._exact.to(self.inv_freq.device)  # follow the device, never the dtype
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return, for positions [R, Q] int64, cos and sin, [R, 1, Q, d] fp32 each."""
        angles = positions[:, None, :, None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.attention_scale, angles.sin() * self.attention_scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [R, heads, Q, d] by cos and sin [R, 1, Q, d]; computed in fp32, returned in x's dtype."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def _frequencies(parameters: dict[str, Any], head_dim: int, max_position_embeddings: int) -> tuple[Tensor, float]:
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    config = Qwen3Config(
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        rope_parameters={key: value for key, value in parameters.items() if key != "partial_rotary_factor"},
    )
    with torch.device("cpu"):  # also when the drafter is being built on the meta device
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.float(), float(scale)
