"""The target during one request: a KV cache that can be rolled back, and the features of the last forward.

The cache keeps every token in every layer, also where attention is a sliding window: a window's mask decides what is
seen, and a cache that drops old tokens could not be rolled back. Layers that fold their past into a running state
(linear attention, Mamba) cannot be rolled back at all: such targets are refused.

Legend: Q tokens of a forward, K features, H hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache

from dflash.config import ConfigError
from dflash.modeling.target import text_config, text_decoder

CROPPABLE_LAYERS = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention"}
)  # layer_types that cache keys and values


def check_croppable(model: Any) -> None:
    """Raise ConfigError if drafts cannot be taken back from the target's cache."""
    kinds = sorted(set(getattr(text_config(model), "layer_types", None) or ()) - CROPPABLE_LAYERS)
    if kinds or getattr(model, "_is_stateful", False):
        reason = f"layers of type {', '.join(kinds)}" if kinds else "a running state"
        raise ConfigError(
            f"{type(model).__name__} has {reason}, whose cache holds a summary of the past instead of its tokens: rejected "
            f"drafts cannot be cropped from it. Speculative decoding needs a target whose layers are all of the types "
            f"{', '.join(sorted(CROPPABLE_LAYERS))}."
        )


class TargetSession:
    """The target of one request; a context manager, because the hooks that collect features come off at its end."""

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        check_croppable(model)
        self._model = model
        self._layer_ids = tuple(layer_ids)  # 0-based, ascending; empty: no features are collected
        self._handles: list[RemovableHandle] = []
        self._outputs: dict[int, Tensor] = {}  # layer id -> output of the last forward [1, Q, H]
        self._cache = DynamicCache()
        parameters = inspect.signature(model.forward).parameters
        # transformers 5.24 renamed the argument and deprecates the old name.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._can_limit_logits = "logits_to_keep" in parameters
        self.forwards = 0
        self.cached_tokens = 0

    def __enter__(self) -> Self:
        layers = text_decoder(self._model).layers if self._layer_ids else ()
        for layer_id in self._layer_ids:
            if not 0 <= layer_id < len(layers):
                self.__exit__(None, None, None)
                raise ConfigError(
                    f"the drafter reads layer {layer_id} of a target with {len(layers)} layers: it belongs to another target"
                )
            self._handles.append(layers[layer_id].register_forward_hook(self._keep_output(layer_id)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _keep_output(self, layer_id: int) -> Any:
        def hook(_module: Any, _arguments: Any, output: Any) -> None:
            self._outputs[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook

    def forward(self, ids: Tensor, *, last_only: bool = False) -> Tensor:
        """Logits [Q, V] (or [1, V] of the last token) of `ids` [Q] int64, which follow the cached tokens."""
        arguments: dict[str, Any] = {self._cache_argument: self._cache, "use_cache": True}
        if last_only and self._can_limit_logits:
            arguments["logits_to_keep"] = 1
        logits: Tensor = self._model(input_ids=ids[None], **arguments).logits[0]
        self.forwards += 1
        self.cached_tokens += len(ids)
        return logits[-1:] if last_only else logits

    def features(self, count: int) -> Tensor:
        """Features [1, count, K*H] of the first `count` tokens of the last forward, ascending layer id."""
        return torch.cat([self._outputs[layer_id][:, :count] for layer_id in self._layer_ids], dim=-1)

    def keep(self, length: int) -> None:
        """Take back all cached tokens after the first `length`."""
        surplus = self.cached_tokens - length
        if surplus:
            self._cache.crop(-surplus)  # negative: tokens to remove, in every supported version
            self.cached_tokens = length
