"""What tells a loaded model from any other, wherever its files lie."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn

from dflash.modeling.anatomy import text_config

# What decides tokens beside weights and their shapes. Other fields come and go with versions of transformers.
_SETTINGS = ("model_type", "num_attention_heads", "num_key_value_heads", "rope_parameters", "sliding_window", "rms_norm_eps")
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def model_digest(model: nn.Module) -> str:
    """Sixteen hexadecimal digits of a model as it is loaded: some settings, and name, shape, dtype and bits of each parameter.

    Reads every weight once, on its device, and copies none of them. Bits are added up, so a model whose weights have only
    changed places within a matrix would pass for the same. The same files loaded in another dtype are another model.
    """
    config = text_config(model)
    settings = {name: getattr(config, name, None) for name in _SETTINGS}
    named = sorted(model.named_parameters())
    sums = [_sum_of_bits(parameter) for _, parameter in named]
    parameters = [
        [name, list(parameter.shape), str(parameter.dtype), int(total)]
        for (name, parameter), total in zip(named, sums, strict=True)
    ]
    text = json.dumps([settings, parameters], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sum_of_bits(tensor: Tensor) -> Any:
    """A scalar on the tensor's device; integers are added up without rounding, in any order."""
    bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()])
    return bits.sum(dtype=torch.int64)
