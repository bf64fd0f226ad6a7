"""A KV cache for many answers at once: written in place, room for more tokens is made by the piece.

transformers' DynamicCache concatenates all keys and values anew for every token. Here a layer has a table with room to spare;
a token is written behind the others, and attention gets a view of what is filled. The room grows by a quarter, so over an
answer of any length every token is copied a few times, not once for each token after it; at most a quarter of it is spare.

Known limits: only layers that transformers keeps in a plain DynamicLayer are made so. Sliding windows, linear attention, layers
with both, shared and indexed keys keep the layer that DynamicCache has for them, with its own costs. What `answer` uses is
supported: appending, `reorder_cache`, `crop`; rows cannot be multiplied.

Legend: R rows, g key/value heads, T tokens filled, C tokens that there is room for, d size of a head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_SPARE_SHARE = 4  # one part in four is added
_LEAST_SPARE = 16  # tokens


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """Keys and values [R, g, T, d] of one layer, views of tables [R, g, C, d]; C is at most `max_tokens` while T is."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self._max_tokens = max_tokens
        self._tables: list[Tensor] = []  # of keys and of values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Begin with no room: the first `update` makes it."""
        self.device = key_states.device
        self._tables = [states[:, :, :0] for states in (key_states, value_states)]
        self.keys, self.values = self._tables
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append states [R, g, new, d]; returns all keys and all values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        filled = self.keys.shape[2]
        end = filled + key_states.shape[2]
        if end > self._tables[0].shape[2]:
            spare = min(max(end // _SPARE_SHARE, _LEAST_SPARE), max(self._max_tokens - end, 0))
            self._tables = [_with_room(view, end + spare) for view in (self.keys, self.values)]
        for table, states in zip(self._tables, (key_states, value_states), strict=True):
            table[:, :, filled:end] = states
        self._show(end)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on with the rows `beam_idx` [rows] int64, in this order."""
        if self.is_initialized:
            filled = self.keys.shape[2]
            index = beam_idx.to(self.device)
            self._tables = [table.index_select(0, index) for table in self._tables]
            self._show(filled)

    def _show(self, filled: int) -> None:
        self.keys, self.values = (table[:, :, :filled] for table in self._tables)


def growing_cache(config: Any, max_tokens: int) -> DynamicCache:
    """The cache of a model with this `config`, its plain layers written in place; `max_tokens` bounds the spare room."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer(max_tokens) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _with_room(view: Tensor, capacity: int) -> Tensor:
    """A table [R, g, capacity, d] that begins with `view`; the rest is not set."""
    table = view.new_empty(view.shape[0], view.shape[1], capacity, view.shape[3])
    table[:, :, : view.shape[2]] = view
    return table
