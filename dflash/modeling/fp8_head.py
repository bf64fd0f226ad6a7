"""Both products with the frozen head in fp8, at twice bf16's rate: logits forward, and the gradient by hidden states.

The head never changes, so it is rounded once, in the layout that each product reads. For the logits every hidden state and every
token of the head has a scale of its own. Probabilities are rounded relative to the likeliest of their row and those below 2e-6 of
it vanish; the label's is left out, because `p - 1` would cancel: its term is added in bf16.

Rounding is of about 4 % a product of two numbers, with random signs, so a logit is off by about 4 % of what logits spread over.
Known limits: GPUs of compute capability 8.9 and more; sizes are multiples of 16. Elsewhere it is computed slowly, for tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash.config import ConfigError

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
_MULTIPLE = 16
_CAPABILITY = (8, 9)


class Fp8Head:
    """A head [V, H] in fp8, once for each product."""

    def __init__(self, weight: Tensor) -> None:
        """Raises ConfigError for a size that fp8 products cannot have."""
        if any(size % _MULTIPLE for size in weight.shape):
            sizes = " x ".join(map(str, weight.shape))
            raise ConfigError(
                f"loss.fp8-head: the head is {sizes}, fp8 products need multiples of {_MULTIPLE}: leave the flag out"
            )
        self._by_token, scales = rounded(weight, weight.abs().amax(1, keepdim=True))  # [V, H], [V, 1]
        self._token_scales = scales.t().contiguous()  # [1, V]
        values, self._scale = rounded(weight, weight.abs().amax())
        self._by_feature = values.view(torch.uint8).t().contiguous().view(FP8)  # [H, V]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [C, V] bf16 of hidden states [C, H], without a cap."""
        values, scales = rounded(hidden, hidden.abs().amax(1, keepdim=True))
        return _product(values, scales, self._by_token, self._token_scales, fast=True)

    def by_hidden(self, by_logits: Tensor, row_scale: Tensor) -> Tensor:
        """Gradient by hidden states [C, H] bf16 from fp8 `by_logits` [C, V], which count `row_scale` [C, 1] each."""
        one = torch.ones((), device=by_logits.device)
        return (_product(by_logits, one, self._by_feature, self._scale, fast=False) * row_scale).to(torch.bfloat16)


def rounded(values: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 values and the fp32 scales that they count, in the shape of `largest`: no value is larger than it."""
    scale = largest.float().clamp_min(1e-12) / LARGEST
    return (values.float() / scale).to(FP8), scale


def check_device(device: torch.device) -> None:
    """Raise ConfigError where no fp8 products exist."""
    if device.type != "cuda":
        raise ConfigError(f"loss.fp8-head is for GPUs, the drafter is on {device}: leave it out")
    found = torch.cuda.get_device_capability(device)
    if found < _CAPABILITY:
        raise ConfigError(f"loss.fp8-head needs compute capability {_CAPABILITY}, {device} has {found}: leave it out")


def _product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, fast: bool) -> Tensor:
    """`a` [M, K] times `b` [N, K] transposed, bf16. `fast` adds up in fewer bits, where rounding is the larger error."""
    if a.device.type == "cuda":
        return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return ((a.float() @ b.float().t()) * (a_scale * b_scale)).to(torch.bfloat16)
