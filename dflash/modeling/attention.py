"""One attention call for both kinds of mask.

Legend: R rows, h query heads, g key/value heads (h is a multiple of g), Q queries, T keys, d size of a head.

A BlockMask goes to flex_attention, which skips tiles that nobody sees: the way to train on a GPU. It has to run inside
`torch.compile` (see dflash.compile_policy); called without, torch warns and computes every score. A dense mask, or none,
goes to scaled_dot_product_attention: the way on CPUs and in decoding.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash.config import ConfigError
from dflash.modeling.masks import BlockLayout, dense_mask, flex_mask

Mask = Tensor | BlockMask | None
# From torch 2.13 a BlockMask is made under an annotation that is one for the process: two threads delete it twice, a KeyError.
_one_flex_mask_at_a_time = threading.Lock()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Softmax attention, not causal, scaled by d**-0.5, grouped-query.

    q [R, h, Q, d]; k and v [R, g, T, d]; mask a BlockMask, a bool tensor [R, 1, Q, T] (True: visible) or None (all
    visible). Returns [R, h, Q, d].
    """
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        output = flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped)
        assert isinstance(output, Tensor)  # a tuple only comes back when the log-sum-exp is asked for
        return output
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def build_mask(layout: BlockLayout, backend: Literal["flex", "sdpa"], device: torch.device | str) -> Tensor | BlockMask:
    """The mask of a micro-batch for `backend`, on `device`.

    Raises ConfigError for flex on a CPU while gradients are recorded: torch has no backward for it there.
    """
    device = torch.device(device)
    if backend == "sdpa":
        return dense_mask(layout.to(device))
    if backend != "flex":
        raise ConfigError(f"drafter.attention is {backend!r}: use flex (GPU) or sdpa")
    if device.type == "cpu" and torch.is_grad_enabled():
        raise ConfigError(
            "drafter.attention is flex, but torch cannot train flex_attention on a CPU: use --drafter.attention sdpa"
        )
    with _one_flex_mask_at_a_time:
        return flex_mask(layout.to(device))


def decoding_kernels() -> AbstractContextManager[None]:
    """Kernels of scaled_dot_product_attention for decoding; for the whole process, until the block ends.

    All but cuDNN's, which makes a new plan for every length, and a growing cache has another length at every token.
    """
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
