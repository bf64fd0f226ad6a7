"""transformers' SDPA for padded rows, with the mask made once a forward, and without waiting for the GPU.

Left to itself, a forward with padding costs more than its attention: transformers looks whether the mask hides anything, which
waits for the GPU at every token, and hands on a bool mask, which SDPA turns into numbers anew in every layer, and copies into
aligned lines. Here the mask is made of numbers in the model's dtype (0 visible, -inf hidden) in lines of a multiple of
16 bytes, once for all layers with the same window. What is computed is the same.

A forward without mask (no row is padded) is left to transformers: then SDPA can take its flash kernel, with grouped heads.

Limits: a model that attends in another way than by transformers' "sdpa" is left as it is. The name in the model's
configuration changes for the time of the block: one thread runs the model.

Legend: R rows, Q queries, T keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from dflash.modeling.anatomy import text_config

NAME = "dflash_padded_sdpa"  # among transformers' attention and mask functions
_OWN = "sdpa"
_ALIGNED = 16  # elements; the efficient kernel wants lines of a multiple of 8


@contextmanager
def padded_attention(model: Any) -> Iterator[None]:
    """The model attends by this module's functions until the block ends, if it does so by transformers' SDPA."""
    text = text_config(model)
    before = text._attn_implementation
    if before == _OWN:
        text._attn_implementation = NAME
    try:
        yield
    finally:
        text._attn_implementation = before


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask [..., T] (True: visible) as numbers to add to scores, in aligned lines."""
    columns = visible.shape[-1]
    lines = torch.zeros(*visible.shape[:-1], -(-columns // _ALIGNED) * _ALIGNED, dtype=dtype, device=visible.device)
    return lines[..., :columns].masked_fill_(~visible, -torch.inf)


def _mask(*args: Any, attention_mask: Tensor | None = None, dtype: torch.dtype = torch.float32, **others: Any) -> Tensor | None:
    """A mask by transformers' convention: [R, 1, Q, T], or None when there is none to make."""
    if attention_mask is not None:
        others["allow_is_causal_skip"] = False
    visible = AttentionMaskInterface()[_OWN](*args, attention_mask=attention_mask, dtype=dtype, **others)
    return None if visible is None else additive(visible, dtype)


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any) -> Any:
    if attention_mask is not None and attention_mask.dtype not in (torch.bool, query.dtype):
        attention_mask = attention_mask.to(query.dtype)
    return AttentionInterface()[_OWN](module, query, key, value, attention_mask, **others)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
