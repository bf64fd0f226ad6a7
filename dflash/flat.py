"""All parameters of a drafter in one tensor, and AdamW on it.

One flat fp32 tensor of weights and one of gradients make summing over drafters, clipping, the optimizer and copying weights
back a handful of calls each, independent of the number of layers. Matrices come first, so that weight decay is one slice.

With copies (`--optim.bf16-copies`, on GPUs) the module multiplies by bf16 copies of its matrices, which `refresh` makes once a
step, and their gradients are bf16, as under autocast, which would cast both in every micro-batch; `collect_gradients` adds them
up in fp32.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from dflash.config import OptimConfig

ALIGNMENT = 64  # elements; keeps every parameter aligned for vector loads


class Optimizer(Protocol):
    """What the trainer needs of an optimizer: `FlatAdamW`, `dflash.sharded.ShardedAdamW`."""

    def norm(self) -> Tensor:
        """Norm [] of the summed gradients."""

    def step(self, step: int, *, total_weight: Tensor, norm: Tensor) -> float:
        """Update; returns the learning rate."""

    def moments(self) -> dict[str, Tensor]:
        """First and second moments as flat tensors, and `step`."""

    def load_moments(self, moments: dict[str, Tensor]) -> None:
        """Set what `moments` returned."""


class Parameters(Protocol):
    """What trainer and worker need of a drafter's parameters: `FlatParameters`, `dflash.sharded.ShardedParameters`."""

    together: bool  # whether all drafters must call the methods at one time
    gradients: Tensor

    def load(self, weights: dict[str, Tensor]) -> None:
        """Take the weights of a state dict."""

    def state(self) -> dict[str, Tensor]:
        """The weights as a state dict."""

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """A block in which the drafter works on one rank alone, without gradients."""

    def optimizer(self, config: OptimConfig) -> Optimizer:
        """AdamW on these parameters."""

    def collect_gradients(self) -> None:
        """After every backward."""

    def clear_gradients(self) -> None:
        """Start a new sum of gradients."""

    def non_finite_weight(self) -> str | None:
        """Name of the first parameter that is not finite."""

    def non_finite_gradient(self) -> str | None:
        """Name of the first parameter whose summed gradient is not finite."""


@dataclass(frozen=True)
class FlatLayout:
    """Where the parameters of a module lie in a flat tensor: matrices first."""

    offsets: dict[str, int]
    shapes: dict[str, torch.Size]
    num_matrix_elements: int
    total: int

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """The layout of a module whose parameters are whole."""
        shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        offsets: dict[str, int] = {}
        total = matrices = 0
        for name in sorted(shapes, key=lambda name: (len(shapes[name]) < 2, name)):
            offsets[name] = total
            total += math.ceil(shapes[name].numel() / ALIGNMENT) * ALIGNMENT
            if len(shapes[name]) >= 2:
                matrices = total
        return cls(offsets, shapes, matrices, total)

    def view(self, flat: Tensor, name: str) -> Tensor:
        """The part of a flat tensor that belongs to one parameter, in its shape."""
        shape = self.shapes[name]
        return flat.narrow(0, self.offsets[name], shape.numel()).view(shape)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Any flat tensor (weights, gradients, moments) as a state dict."""
        return {name: self.view(flat, name) for name in self.offsets}


class FlatParameters:
    """Moves a module's parameters and gradients into two flat fp32 tensors of which they become views.

    With a `compute_dtype` that is true of vectors only: matrices become views of copies in that dtype.
    """

    together = False

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None = None) -> None:
        named = list(module.named_parameters())
        layout = self.layout = FlatLayout.of(module)
        self.num_matrix_elements = layout.num_matrix_elements
        device = named[0][1].device
        self.weights = torch.zeros(layout.total, dtype=torch.float32, device=device)
        self.gradients = torch.zeros(layout.total, dtype=torch.float32, device=device)
        matrices = None if compute_dtype is None else torch.empty(self.num_matrix_elements, dtype=compute_dtype, device=device)
        self._matrices = matrices
        self._computing = [(p, self.view(self.gradients, name)) for name, p in named if matrices is not None and p.dim() >= 2]
        self._collected = False  # whether the gradients of matrices hold a sum, and not what was left of the last step
        for name, parameter in named:
            self.view(self.weights, name).copy_(parameter.detach())
            computes = matrices is not None and parameter.dim() >= 2
            parameter.data = self.view(matrices if computes else self.weights, name)  # type: ignore[arg-type]  # not None then
            parameter.grad = None if computes else self.view(self.gradients, name)
        self.refresh()

    def refresh(self) -> None:
        """Let the module compute with the flat weights as they are now. Call it after every change of them."""
        if self._matrices is not None:
            self._matrices.copy_(self.weights[: self.num_matrix_elements])

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Add what backward left in the parameters of another dtype to the flat gradients. Call it after every backward."""
        for parameter, total in self._computing:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self._collected:
                total.add_(parameter.grad)
            else:
                total.copy_(parameter.grad)
            parameter.grad = None
        self._collected = True

    def clear_gradients(self) -> None:
        """Start a new sum of gradients."""
        self.gradients[0 if self._matrices is None else self.num_matrix_elements :].zero_()
        self._collected = False  # the next gradients of matrices are written over the old ones

    def load(self, weights: dict[str, Tensor]) -> None:
        """Take the weights of a state dict."""
        for name, view in self.named(self.weights).items():
            view.copy_(weights[name])
        self.refresh()

    def state(self) -> dict[str, Tensor]:
        """The weights as a state dict of views."""
        return self.named(self.weights)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """They always are."""
        yield

    def optimizer(self, config: OptimConfig) -> FlatAdamW:
        """AdamW on these parameters."""
        return FlatAdamW(self, config)

    def non_finite_weight(self) -> str | None:
        """Name of the first parameter that is not finite."""
        return self.first_non_finite(self.weights)

    def non_finite_gradient(self) -> str | None:
        """Name of the first parameter whose gradient is not finite."""
        return self.first_non_finite(self.gradients)

    def view(self, flat: Tensor, name: str) -> Tensor:
        """The part of a flat tensor that belongs to one parameter, in its shape."""
        return self.layout.view(flat, name)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Any flat tensor (weights, gradients, moments) as a state dict."""
        return self.layout.named(flat)

    def first_non_finite(self, flat: Tensor) -> str | None:
        """Name of the first parameter whose part of `flat` is not finite."""
        for name, part in self.named(flat).items():
            if not bool(torch.isfinite(part).all()):
                return name
        return None


def learning_rate(config: OptimConfig, step: int) -> float:
    """Learning rate of 0-based `step`: linear warm-up, then cosine, or constant and a linear end (WSD)."""
    warmup_steps = max(1, round(config.warmup_fraction * config.steps))
    if step < warmup_steps:
        return config.learning_rate * (step + 1) / warmup_steps
    if config.schedule == "cosine":
        progress = (step - warmup_steps) / max(1, config.steps - warmup_steps)
        shape = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        decay_steps = max(1, round(config.decay_fraction * config.steps))
        shape = min(1.0, (config.steps - step) / decay_steps)
    return config.learning_rate * (config.final_fraction + (1 - config.final_fraction) * shape)


def update(optimizer: torch.optim.AdamW, config: OptimConfig, step: int, *, total_weight: Tensor, norm: Tensor) -> float:
    """Step a fused AdamW whose kernel divides the gradients and clips them, without waiting for the device; the learning rate.

    `total_weight` [] divides them, `norm` [] is theirs before that. Without weight, and with a norm that is not finite, the
    kernel changes nothing.
    """
    rate = learning_rate(config, step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    total_weight = total_weight.to(norm)
    usable = norm.isfinite() & (total_weight > 0)
    optimizer.grad_scale = torch.maximum(total_weight, norm / config.clip)  # type: ignore[attr-defined]  # AMP's way
    optimizer.found_inf = 1.0 - usable.float()  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.grad_scale = optimizer.found_inf = None  # type: ignore[attr-defined]  # of this step only
    return rate


class FlatAdamW:
    """AdamW on the flat weights; decays matrices only."""

    def __init__(self, flat: FlatParameters, config: OptimConfig) -> None:
        self._flat = flat
        self._config = config
        split = flat.num_matrix_elements
        self._parts = [part for part in (slice(0, split), slice(split, None)) if flat.weights[part].numel()]
        parameters = [nn.Parameter(flat.weights[part]) for part in self._parts]
        for parameter, part in zip(parameters, self._parts, strict=True):
            parameter.grad = flat.gradients[part]
        groups = [
            {"params": [parameter], "weight_decay": config.weight_decay if part.start == 0 and split else 0.0}
            for parameter, part in zip(parameters, self._parts, strict=True)
        ]
        betas = (config.beta1, config.beta2)
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=True)

    def norm(self) -> Tensor:
        """Norm [] of the summed gradients, on their device; not finite where one of them is not."""
        norm: Tensor = torch.linalg.vector_norm(self._flat.gradients)
        return norm

    def step(self, step: int, *, total_weight: Tensor, norm: Tensor) -> float:
        """Update by the summed gradients, whose norm is `norm`, divided by `total_weight` and clipped. Returns the learning rate.

        The gradients are used up: the kernel that updates divides them, because two passes over them would take as long as it.
        """
        rate = update(self.optimizer, self._config, step, total_weight=total_weight, norm=norm)
        self._flat.refresh()
        return rate

    def moments(self) -> dict[str, Tensor]:
        """First and second moments as flat tensors `exp_avg` and `exp_avg_sq` (zeros before the first step), and `step`."""
        result = {key: torch.zeros_like(self._flat.weights) for key in ("exp_avg", "exp_avg_sq")}
        result["step"] = torch.zeros(())
        for parameter, part in zip(self._parameters(), self._parts, strict=True):
            state = self.optimizer.state.get(parameter)
            if state:
                result["exp_avg"][part] = state["exp_avg"]
                result["exp_avg_sq"][part] = state["exp_avg_sq"]
                result["step"] = state["step"].detach().cpu().clone()
        return result

    def load_moments(self, moments: dict[str, Tensor]) -> None:
        """Set what `moments` returned."""
        device = self._flat.weights.device
        for parameter, part in zip(self._parameters(), self._parts, strict=True):
            self.optimizer.state[parameter] = {
                "step": moments["step"].clone().to(device),
                "exp_avg": moments["exp_avg"][part].to(device).clone(),
                "exp_avg_sq": moments["exp_avg_sq"][part].to(device).clone(),
            }

    def _parameters(self) -> list[Tensor]:
        return [group["params"][0] for group in self.optimizer.param_groups]
