"""The parameters of a drafter in parts, one part of each on every drafter (FSDP2), and AdamW on the parts: `--fully-shard`.

What `dflash.flat` is for drafters that hold everything. Weights, gradients and moments lie in fp32 parts of the first dimension
(`torch.distributed.fsdp.fully_shard`). A layer's weights are gathered for its forward, dropped, gathered again for its backward,
and its gradients go to their owners as a reduce-scatter, in every micro-batch; on GPUs bf16 travels and computes, as autocast
has it, and sums are fp32. So all drafters work on their micro-batches at one time, and a step has as many for each.

The layers compile, each by itself, with the context's keys computed inside it; one graph of the whole drafter would need all
weights at one time. Checkpoints hold whole tensors: the leader collects them on the CPU, and the files are those of other runs.

Known limits: sums are in the order of the collective, not of the micro-batches, so runs of other numbers of drafters agree up to
rounding. Every drafter holds the whole fp32 weights once, at the start, and in validation all weights in the computing dtype.
Not run on GPUs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from dflash.config import OptimConfig
from dflash.flat import FlatLayout, update
from dflash.modeling.drafter import Drafter, Layer

Compiled = Callable[[Callable[..., Any]], Callable[..., Any]]


class ShardedParameters:
    """Takes a drafter over, which must be equal on all drafters; all of them call every method but `clear_gradients`."""

    together = True

    def __init__(
        self, drafter: Drafter, group: dist.ProcessGroup, device: torch.device, *, compiled: Compiled, leads: bool
    ) -> None:
        """`group` holds all drafters; `leads` says which of them gets whole tensors."""
        self.layout = FlatLayout.of(drafter)
        self.gradients = torch.zeros(0, device=device)  # none in one tensor: each parameter has its own
        self._drafter, self.leads, self._device = drafter, leads, device
        mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=("drafters",))
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if device.type == "cuda" else {}
        policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)  # angles stay fp32
        for layer in cast("list[Layer]", list(drafter.layers)):
            layer.with_context = compiled(layer.with_context)  # type: ignore[method-assign]
            fully_shard(layer, mesh=mesh, mp_policy=policy)
            register_fsdp_forward_method(layer, "with_context")
        fully_shard(drafter, mesh=mesh, mp_policy=policy)
        drafter.forward = drafter.forward_by_layers  # type: ignore[method-assign]
        self._units = [module for module in drafter.modules() if isinstance(module, FSDPModule)]
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)  # sums, as the loss is
            unit.set_force_sum_reduction_for_comms(enable=True)  # Gloo has no other

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Take whole weights, the same on all drafters."""
        for name, parameter in self.parameters():
            parameter.to_local().copy_(self.part(weights[name], parameter))

    def state(self) -> dict[str, Tensor]:
        """Whole weights on the CPU, on the leader; nothing on the others."""
        return {name: whole for name, parameter in self.parameters() if (whole := self.whole_tensor(parameter)) is not None}

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Inside the block the drafter works on each rank alone, without gradients."""
        for unit in self._units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        try:
            yield
        finally:
            for unit in self._units:
                unit.reshard()
                unit.set_reshard_after_forward(isinstance(unit, Layer), recurse=False)

    def optimizer(self, config: OptimConfig) -> ShardedAdamW:
        """AdamW on the parts."""
        return ShardedAdamW(self, config)

    def collect_gradients(self) -> None:
        """They are where they belong."""

    def clear_gradients(self) -> None:
        """Start a new sum of gradients."""
        for _, parameter in self.parameters():
            parameter.grad = None

    def non_finite_weight(self) -> str | None:
        """Name of a parameter of which this drafter's part is not finite. Not together with the others."""
        return next((name for name, p in self.parameters() if not bool(torch.isfinite(p.to_local()).all())), None)

    @torch.no_grad()
    def non_finite_gradient(self) -> str | None:
        """Name of the first parameter whose summed gradient is not finite, the same on all drafters."""
        named = self.parameters()
        bad = torch.tensor([float(not torch.isfinite(_local_gradient(p)).all()) for _, p in named], device=self._device)
        dist.all_reduce(bad, group=named[0][1].device_mesh.get_group())
        return next((name for (name, _), count in zip(named, bad.tolist(), strict=True) if count), None)

    def parameters(self) -> list[tuple[str, DTensor]]:
        """By the names of the whole drafter."""
        return [(name, cast("DTensor", parameter)) for name, parameter in self._drafter.named_parameters()]

    def part(self, whole: Tensor, like: DTensor) -> Tensor:
        """What this drafter holds of a whole tensor."""
        moved = whole.view(like.shape).to(self._device)
        return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None).to_local()

    def whole_tensor(self, part: DTensor) -> Tensor | None:
        """A tensor from all its parts, on the CPU; only on the leader."""
        whole = cast("DTensor", part.detach()).full_tensor()
        return whole.cpu() if self.leads else None


class ShardedAdamW:
    """AdamW on the parts that each drafter holds; decays matrices only. All drafters call every method."""

    def __init__(self, owner: ShardedParameters, config: OptimConfig) -> None:
        self._owner, self._config = owner, config
        named = owner.parameters()
        groups = [
            {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)

    def norm(self) -> Tensor:
        """See `dflash.flat.FlatAdamW`."""
        total = nn.utils.get_total_norm([p.grad for _, p in self._owner.parameters() if p.grad is not None])
        return cast("DTensor", total).full_tensor()

    def step(self, step: int, *, total_weight: Tensor, norm: Tensor) -> float:
        """See `dflash.flat.FlatAdamW`."""
        return update(self.optimizer, self._config, step, total_weight=total_weight, norm=norm)

    def moments(self) -> dict[str, Tensor]:
        """As those of `dflash.flat.FlatAdamW`, on the CPU of the leader; nothing on the others."""
        layout = self._owner.layout
        size = layout.total if self._owner.leads else 0
        result = {key: torch.zeros(size) for key in ("exp_avg", "exp_avg_sq")} | {"step": torch.zeros(())}
        for name, parameter in self._owner.parameters():
            state = self.optimizer.state.get(parameter)
            if not state:
                continue
            for key in ("exp_avg", "exp_avg_sq"):
                whole = self._owner.whole_tensor(state[key])
                if whole is not None:
                    layout.view(result[key], name).copy_(whole)
            result["step"] = state["step"].detach().cpu().clone()
        return result

    def load_moments(self, moments: dict[str, Tensor]) -> None:
        """Set what `moments`, of any drafter with all parameters, returned."""
        layout = self._owner.layout
        for name, parameter in self._owner.parameters():
            state: dict[str, Tensor] = {"step": moments["step"].clone().to(parameter.device)}
            for key in ("exp_avg", "exp_avg_sq"):
                local = self._owner.part(layout.view(moments[key], name), parameter)
                state[key] = DTensor.from_local(
                    local.clone(), parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
                )
            self.optimizer.state[parameter] = state


def _local_gradient(parameter: DTensor) -> Tensor:
    return torch.zeros(0) if parameter.grad is None else cast("DTensor", parameter.grad).to_local()
