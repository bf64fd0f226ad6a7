"""Where a transformers model keeps its decoder: works for text models and for composite (vision and text) ones."""

from __future__ import annotations

from typing import Any

from dflash.config import ConfigError


def text_config(model: Any) -> Any:
    """The configuration of the model's text decoder."""
    return model.config.get_text_config(decoder=True)


def text_decoder(model: Any) -> Any:
    """The module that owns `embed_tokens`, `layers` and `norm`. Raises ConfigError when the model has no such module."""
    decoder = model.get_decoder()
    while hasattr(decoder, "language_model"):
        decoder = decoder.language_model
    missing = [name for name in ("embed_tokens", "layers", "norm") if not hasattr(decoder, name)]
    if missing:
        raise ConfigError(
            f"the target {type(model).__name__} keeps its layers where this program does not look "
            f"({type(decoder).__name__} has no {', '.join(missing)}): use a decoder-only model such as Qwen3 or Llama"
        )
    return decoder
