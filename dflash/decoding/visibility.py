"""Who sees whom when the target verifies trees of several requests in one forward.

Every request has a row of one padded cache. Its own tokens stand in the first columns, what stands behind them up to the
length of the longest row is garbage; then come the nodes that are verified. A node sees its row's own tokens, its ancestors
and itself. In a layer with a sliding window it sees those of them that are less than a window away, by position: siblings
share a position.

The mask is additive, as transformers' own for eager attention and SDPA; FlashAttention takes none of this shape, and targets
that run it are refused. The same rule for flex_attention is in `flex_trees`.

Legend: N requests, C columns of the cache, Q nodes of a tree (root included), T = C + Q keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash.config import ConfigError
from dflash.modeling.anatomy import text_config

_MASKED_ATTENTION = ("sdpa", "eager")


def visible(lengths: Tensor, columns: int, positions: Tensor, ancestors: Tensor, window: int | None) -> Tensor:
    """The rule, [N, Q, T] bool: True where the query (node) sees the key.

    lengths [N] int64 own tokens of each row, in a cache of `columns`; positions [N, Q] int64 of the nodes; ancestors
    [N, Q, Q] bool, a node itself included; window: tokens that a layer sees, None for all.
    """
    index = torch.arange(columns, device=lengths.device)
    own = (index < lengths[:, None])[:, None].expand(-1, positions.shape[1], -1)
    seen = torch.cat((own, ancestors), dim=2)
    if window is None:
        return seen
    keys = torch.cat((index.expand(len(lengths), -1), positions), dim=1)
    return seen & (positions[:, :, None] - keys[:, None] < window)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """`seen` [N, Q, T] as a mask [N, 1, Q, T] in `dtype` that is added to attention scores: 0, or the least finite number."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def layer_windows(model: Any) -> list[int | None]:
    """The sliding window of each layer of the target, None for full attention.

    Raises ConfigError for a target whose attention cannot be given a mask.
    """
    config = text_config(model)
    kernel = getattr(config, "_attn_implementation", None)
    if kernel not in _MASKED_ATTENTION:
        raise ConfigError(
            f"the target's attention is {kernel!r}, which takes no mask of a tree or of several requests: load the target with "
            f"attn_implementation='sdpa', or decode chains of one request"
        )
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    other = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if other:
        raise ConfigError(
            f"the target has layers of type {', '.join(other)}: trees and several requests at once need full or sliding "
            f"attention, use chains of one request"
        )
    return [window if kind == "sliding_attention" else None for kind in kinds]
