"""The target during some requests decoded together: a KV cache that keeps what was accepted, and the last forward's features.

The cache keeps every token in every layer, also where attention is a sliding window: a window's mask decides what is
seen, and a cache that drops old tokens could not be rolled back. Layers that fold their past into a running state
(linear attention, Mamba) cannot be rolled back at all: such targets are refused.

All requests share one padded cache, a row each. A forward appends a tree of nodes to every row behind the longest one;
`keep` moves the accepted nodes of a row to the end of its own tokens and cuts the rest off. Who sees whom is `visibility`'s
rule; trees can be verified by flex_attention (`flex_trees`). One request with a chain has neither padding nor branches: there
the target makes its own causal mask.

Legend: N requests, P tokens of the longest prompt, Q tokens of a forward, K features, H hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache

from dflash.config import ConfigError
from dflash.decoding.flex_trees import attending, block_mask
from dflash.decoding.visibility import additive, layer_windows, visible
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
    """The target of some requests; a context manager, because the hooks in its layers come off at its end."""

    def __init__(self, model: Any, layer_ids: Sequence[int], tree_attention: Literal["sdpa", "flex"] = "sdpa") -> None:
        check_croppable(model)
        self._model = model
        self._tree_attention = tree_attention  # by which trees are verified; nothing else is
        self._layer_ids = tuple(layer_ids)  # 0-based, ascending; empty: no features are collected
        self._handles: list[RemovableHandle] = []
        self._outputs: dict[int, Tensor] = {}  # layer id -> output of the last forward [N, Q, H]
        self._window_masks: dict[
            int, Tensor | BlockMask
        ] = {}  # layer id -> mask of the forward in progress, layers with a window only
        self._windows: list[int | None] | None = None  # of each layer, once a mask was needed
        self._cache = DynamicCache()
        parameters = inspect.signature(model.forward).parameters
        # transformers 5.24 renamed the argument and deprecates the old name.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._can_limit_logits = "logits_to_keep" in parameters
        self._columns = 0  # of the cache
        self.lengths: list[int] = []  # tokens of each request that are cached and kept
        self.forwards = 0

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

    def prefill(self, prompts: Sequence[Tensor]) -> Tensor:
        """Read the prompts, [tokens] int64 each; returns the logits [N, 1, V] after the last token of each.

        Shorter prompts are padded at the right, where the causal mask hides it.
        """
        ids = torch.nn.utils.rnn.pad_sequence(list(prompts), batch_first=True)
        self.lengths = [len(prompt) for prompt in prompts]
        self._columns = max(self.lengths)
        wanted = sorted({length - 1 for length in self.lengths}) if self._can_limit_logits else list(range(self._columns))
        limit = {"logits_to_keep": torch.tensor(wanted, device=ids.device)} if self._can_limit_logits else {}
        logits = self._run(ids, **limit)
        places = [wanted.index(length - 1) for length in self.lengths]
        return torch.stack([logits[row, place] for row, place in enumerate(places)])[:, None]

    def verify(self, ids: Tensor, positions: Tensor, ancestors: Tensor | None) -> Tensor:
        """Logits [N, Q, V] after nodes `ids` [N, Q] int64 at `positions` [N, Q] int64.

        ancestors [N, Q, Q] bool, a node itself included; None says that the nodes of each row are a chain.
        """
        alone = len(self.lengths) == 1
        if ancestors is None and alone:
            return self._run(ids, position_ids=positions)
        by_flex = ancestors is not None and self._tree_attention == "flex"
        if ancestors is None:
            ancestors = (
                torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril().expand(len(ids), -1, -1)
            )
        if self._windows is None:
            self._windows = self._hook_windows()
        lengths = torch.tensor(self.lengths, device=ids.device)
        rule = (lengths, self._columns, positions, ancestors)
        masks = {
            window: block_mask(*rule, window) if by_flex else additive(visible(*rule, window), self._model.dtype)
            for window in {None, *self._windows}
        }
        self._window_masks = {layer: masks[window] for layer, window in enumerate(self._windows) if window is not None}
        try:
            with attending(self._model) if by_flex else nullcontext():
                return self._run(ids, position_ids=positions, attention_mask=masks[None])
        finally:
            self._window_masks = {}

    def features(self, nodes: Tensor) -> Tensor:
        """Features [N, A, K*H] of the `nodes` [N, A] int64 (places) of the last forward, ascending layer id."""
        rows = torch.arange(len(nodes), device=nodes.device)[:, None]
        return torch.cat([self._outputs[layer_id][rows, nodes] for layer_id in self._layer_ids], dim=-1)

    def keep(self, nodes: Sequence[Sequence[int]]) -> None:
        """Keep some nodes of the last forward in each row (places, ascending), behind the row's own tokens; drop the others."""
        appended = self._columns
        moves = [
            (row, appended + node, self.lengths[row] + k)
            for row, kept in enumerate(nodes)
            for k, node in enumerate(kept)
            if appended + node != self.lengths[row] + k
        ]
        self.lengths = [length + len(kept) for length, kept in zip(self.lengths, nodes, strict=True)]
        if moves:
            rows, sources, places = torch.tensor(moves, device=self._model.device).unbind(1)
            for layer in self._cached_layers():
                for table in (layer.keys, layer.values):
                    table[rows, :, places] = table[rows, :, sources]  # the right side is a copy: moves may overlap
        self._columns = max(self.lengths)
        for layer in self._cached_layers():
            layer.keys, layer.values = layer.keys[:, :, : self._columns], layer.values[:, :, : self._columns]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with some of the requests."""
        self.lengths = [self.lengths[row] for row in rows]
        self._columns = max(self.lengths)
        index = torch.tensor(rows, device=self._model.device)
        for layer in self._cached_layers():
            layer.keys, layer.values = layer.keys[index, :, : self._columns], layer.values[index, :, : self._columns]
        self._outputs = {layer_id: output[index] for layer_id, output in self._outputs.items()}

    def _run(self, ids: Tensor, **arguments: Any) -> Tensor:
        self.forwards += 1
        arguments |= {self._cache_argument: self._cache, "use_cache": True}
        logits: Tensor = self._model(input_ids=ids, **arguments).logits
        return logits

    def _cached_layers(self) -> list[Any]:
        return [layer for layer in self._cache.layers if layer.is_initialized]  # layers may share another's cache

    def _keep_output(self, layer_id: int) -> Any:
        def hook(_module: Any, _arguments: Any, output: Any) -> None:
            self._outputs[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook

    def _hook_windows(self) -> list[int | None]:
        """Give every layer with a window its own mask: transformers hands one mask to all layers."""
        windows = layer_windows(self._model)
        for layer_id, (layer, window) in enumerate(zip(text_decoder(self._model).layers, windows, strict=True)):
            if window is not None:
                self._handles.append(layer.register_forward_pre_hook(self._give_mask(layer_id), with_kwargs=True))
        return windows

    def _give_mask(self, layer_id: int) -> Any:
        def hook(module: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
            if layer_id not in self._window_masks:
                return None
            if "attention_mask" not in keywords:
                raise ConfigError(
                    f"{type(module).__name__} takes its mask in another way than as attention_mask: decode chains of one request"
                )
            return arguments, keywords | {"attention_mask": self._window_masks[layer_id]}

        return hook
