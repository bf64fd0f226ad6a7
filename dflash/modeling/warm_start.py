"""Starting a drafter from its target's first layers instead of from random weights (`--drafter.init target`).

The first layers of a target read raw token embeddings, as a drafter's block does, and already know what follows a few known
tokens; a small drafter with little data learns that last. The fusion starts as the first feature plus a little of the
others, so that the copied layers meet keys and values of the kind they were trained on. The architecture stays as it is.

Only for targets whose layers have the drafter's parameters in its sizes, such as Qwen3 with sizes left at the target's.
"""

from __future__ import annotations

from typing import Any

import torch

from dflash.config import ConfigError
from dflash.modeling.anatomy import text_decoder
from dflash.modeling.drafter import Drafter

OTHER_FEATURES = 0.1  # how much of the random fusion stays beside the first feature


@torch.no_grad()
def start_from_target(drafter: Drafter, model: Any) -> None:
    """Copy the target's first L layers, its final norm, and let the fusion pass the first feature on.

    Raises ConfigError, changing nothing, when a layer of the target has no parameter of a drafter's name and shape.
    """
    decoder = text_decoder(model)
    pairs = []
    for number, layer in enumerate(drafter.layers):
        source = dict(decoder.layers[number].named_parameters()) if number < len(decoder.layers) else {}
        for name, parameter in layer.named_parameters():
            if name not in source or source[name].shape != parameter.shape:
                found = tuple(source[name].shape) if name in source else "nothing"
                raise ConfigError(
                    f"drafter.init is target, but layer {number} of the target has {found} for {name}, the drafter "
                    f"{tuple(parameter.shape)}: leave the drafter's sizes at the target's, or use --drafter.init random"
                )
            pairs.append((parameter, source[name]))
    for parameter, value in pairs:
        parameter.copy_(value)
    drafter.norm.weight.copy_(decoder.norm.weight)
    drafter.hidden_norm.weight.copy_(decoder.layers[0].input_layernorm.weight)
    size = drafter.shape.hidden_size
    drafter.fc.weight.mul_(OTHER_FEATURES)
    drafter.fc.weight[:, :size] += torch.eye(size, device=drafter.fc.weight.device)
