"""A target whose layers lie on several devices: transformers' own plan, carried out by torch's `parallelize_module`.

The plan (`base_model_tp_plan` of the configuration) names the matrices that are cut by columns and by rows; what it does not
name, embedding and norms, is whole on every device. Each rank loads the whole target on its CPU and keeps its part.

Known limits: mixtures of experts are refused, because torch has no style for theirs. Every process of a machine holds the whole
target in host memory for a while. Not run on GPUs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from dflash.config import ConfigError
from dflash.modeling.anatomy import text_config

_STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_WHOLE = "replicated"  # what names of styles begin with that leave a parameter whole; those differ by release of transformers
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def plan_of(model: Any, ways: int) -> dict[str, str]:
    """Style of each matrix that is cut, by its name in the decoder. Raises ConfigError where it cannot be cut `ways` ways."""
    settings, name = text_config(model), type(model).__name__
    plan = dict(getattr(settings, "base_model_tp_plan", None) or {})
    cut = {module: style for module, style in plan.items() if not style.startswith(_WHOLE)}
    if not cut:
        raise ConfigError(f"transformers has no tensor-parallel plan for {name}: use --target.tensor-parallel 1")
    unknown = {module: style for module, style in cut.items() if style not in _STYLES}
    if unknown:
        module, style = next(iter(unknown.items()))
        raise ConfigError(
            f"the plan of {name} cuts {module} by {style!r}, which is not known here: use --target.tensor-parallel 1"
        )
    for field in _DIVIDED:
        count = getattr(settings, field, None)
        if count is not None and count % ways:
            raise ConfigError(f"target.tensor-parallel {ways} does not divide the target's {field} {count}: use a divisor of it")
    return cut


def split(decoder: Any, plan: dict[str, str], group: ProcessGroup, device: torch.device) -> None:
    """Keep this rank's part of a decoder on the CPU, and move it to `device`. All ranks of the group call it."""
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=("tp",))
    decoder.to(device)
    parallelize_module(decoder, mesh, {name: _STYLES[style]() for name, style in plan.items()}, src_data_rank=None)
