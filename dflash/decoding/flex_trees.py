"""Verification of draft trees by flex_attention: the rule of `visibility` as a BlockMask, and a target that attends by it.

SDPA takes a mask of all pairs of nodes and keys, and computes all of them. flex_attention gets lists of tiles of 128 x 128
pairs: in tiles of a request's own tokens every node sees every key, so the rule is asked in the last of them and among the
nodes only, and tiles that nobody sees (behind a sliding window, or of a longer request's tokens) are left out.

The target is not rewritten. transformers looks the attention function up by a name at every call; `attending` sets a name
registered here for one forward, and a BlockMask goes through transformers untouched. Prefills, chains and plain decoding keep
the target's own attention.

Compiled for all lengths at once: one graph for one request, one for several, and on GPUs both again for trees of 127 nodes
and more, because the kernel's choice looks at 128 queries. Every list has two lines and two tiles at least, so that short
lengths are no case of their own. `fullgraph` makes more recompiles than Dynamo allows an error, not an uncompiled fallback.

Limits: without a GPU it runs uncompiled, computes all pairs, and torch warns: `evaluate` refuses it. One thread decodes.

Legend: N requests, C columns of the cache, Q nodes of a tree (root included), T = C + Q keys, h heads, g key/value
heads, d head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface

from dflash.config import ConfigError
from dflash.modeling.anatomy import text_config
from dflash.modeling.attention import attend
from dflash.modeling.masks import MaskMod
from dflash.modeling.tiles import TILE

NAME = "dflash_flex_trees"  # among transformers' attention functions
BACKEND = "inductor"
MIN_HEAD_SIZE = 16  # of the compiled kernel
_KERNEL: Any = {"BACKEND": "TRITON"}  # not the one for short queries, which Triton compiles for minutes when lengths are open
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # that would change scores, and are not in the kernel here
_Lists = tuple[Tensor, Tensor, Tensor, Tensor]  # number and indices of partly visible tiles, number and indices of whole ones
_EVERYTHING = torch.iinfo(torch.int32).max  # a window that no text leaves


def check_flex(model: Any) -> None:
    """Raise ConfigError for a target that cannot attend by a function of ours."""
    text = text_config(model)
    if not getattr(model, "_supports_flex_attn", False):
        raise ConfigError(
            f"{type(model).__name__} does not support flex_attention (transformers' _supports_flex_attn): verify trees with "
            f"tree-attention sdpa"
        )
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if size < MIN_HEAD_SIZE:
        raise ConfigError(
            f"the target's heads have {size} dimensions, flex_attention needs at least {MIN_HEAD_SIZE}: verify trees with "
            f"tree-attention sdpa"
        )


def tree_mask_mod(lengths: Tensor, columns: int, positions: Tensor, ancestors: Tensor, window: int | None) -> MaskMod:
    """The rule of `visibility.visible`, with its arguments, as a flex `mask_mod(row, head, query, key)`.

    It holds tensors only: a number would be part of the compiled code, and another one another graph.
    """
    for tensor in (lengths, positions, ancestors):
        _leave_open(tensor, *range(tensor.ndim))
    first_node, reach = (lengths.new_full((), number) for number in (columns, _EVERYTHING if window is None else window))

    def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001 - flex passes the head
        node = (key - first_node).clamp(min=0)
        is_node = key >= first_node
        seen = torch.where(is_node, ancestors[row, query, node], key < lengths[row])
        position = torch.where(is_node, positions[row, node], key)
        return seen & (positions[row, query] - position < reach)

    return mask_mod


def block_mask(lengths: Tensor, columns: int, positions: Tensor, ancestors: Tensor, window: int | None) -> BlockMask:
    """The rule of `visibility.visible`, with its arguments, as a BlockMask [N, 1, Q, T].

    Tiles are listed from what all nodes of a request have in common, without looking at pairs and without waiting for the GPU.
    """
    nodes = positions.shape[1]
    tiles = [max(2, -(-size // TILE)) for size in (nodes, columns + nodes)]
    first = torch.arange(tiles[1], device=lengths.device) * TILE  # key of each tile
    last = first + TILE - 1
    reach = _EVERYTHING if window is None else window
    nearest, farthest = (edge[:, None] - reach + 1 for edge in (positions.amin(1), positions.amax(1)))
    whole = (last < lengths[:, None]) & (first >= farthest)
    some = (first < lengths[:, None]) & (last >= nearest) | (last >= columns) & (first < columns + nodes)
    whole_lists, part_lists = (_lists(kept, tiles[0]) for kept in (whole, some & ~whole))
    rule = tree_mask_mod(lengths, columns, positions, ancestors, window)
    return _mask_of((*part_lists, *whole_lists), rule, (nodes, columns + nodes))


@contextmanager
def attending(model: Any) -> Iterator[None]:
    """The target attends by this module's function until the block ends; every mask that it gets must be a BlockMask."""
    text = text_config(model)
    before = text._attn_implementation
    text._attn_implementation = NAME
    try:
        yield
    finally:
        text._attn_implementation = before


def _attention(
    module: Any,  # noqa: ARG001 - transformers passes it
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention by transformers' convention: query [N, h, Q, d], key and value [N, g, T, d], result [N, Q, h, d]."""
    asked = [name for name in _UNSUPPORTED if others.get(name) is not None]
    if asked:
        raise ConfigError(
            f"the target's attention has {', '.join(asked)}, which is not in the flex kernel of trees: use tree-attention sdpa"
        )
    assert isinstance(attention_mask, BlockMask)
    usual = query.shape[-1] ** -0.5
    if scaling is not None and scaling != usual:
        query = query * (scaling / usual)  # a number as an argument would become an input of the graph
    if not query.is_cuda:
        return attend(query, key, value, attention_mask).transpose(1, 2).contiguous(), None
    return attend_compiled(query, key, value, attention_mask).transpose(1, 2).contiguous(), None


def attend_compiled(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """`attend` under a mask of `block_mask`, compiled, with lengths and the number of requests left open."""
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    for tensor in (q, k, v):
        _leave_open(tensor, 0, 2)
    for tensor in lists:
        _leave_open(tensor, 0, 2, 3)
    return _compiled()(q, k, v, lists, mask.mask_mod)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(_attend, fullgraph=True, backend=BACKEND)
    return compiled


def _attend(q: Tensor, k: Tensor, v: Tensor, lists: _Lists, mask_mod: MaskMod) -> Tensor:
    """A BlockMask as an argument would bring its lengths as numbers, which the first graph would be made for."""
    mask = _mask_of(lists, mask_mod, (q.shape[2], k.shape[2]))
    output = flex_attention(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1], kernel_options=_KERNEL)
    assert isinstance(output, Tensor)  # a tuple only comes back when the log-sum-exp is asked for
    return output


def _mask_of(lists: _Lists, mask_mod: MaskMod, lengths: tuple[int, int]) -> BlockMask:
    part_count, part, whole_count, whole = lists
    return BlockMask.from_kv_blocks(
        part_count,
        part,
        whole_count,
        whole,
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=mask_mod,
        seq_lengths=lengths,
        compute_q_blocks=False,  # for the backward only
    )


def _leave_open(tensor: Tensor, *dimensions: int) -> None:
    """Tell the compiler that these sizes change, and that they are equal to others by chance only."""
    for dimension in dimensions:
        if dimension < tensor.ndim and tensor.shape[dimension] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def _lists(kept: Tensor, lines: int) -> tuple[Tensor, Tensor]:
    """How many tiles of `kept` [N, tiles] bool each line of queries has, [N, 1, lines] int32, and which, [N, 1, lines, tiles]."""
    order = (~kept).to(torch.int8).argsort(dim=1, stable=True)
    count = kept.sum(1, dtype=torch.int32)[:, None, None].expand(-1, 1, lines)
    return count.contiguous(), order.to(torch.int32)[:, None, None].expand(-1, 1, lines, -1).contiguous()


AttentionInterface.register(NAME, _attention)
