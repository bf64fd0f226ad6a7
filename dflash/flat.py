"""All parameters of a drafter in one tensor, and AdamW on it.

One flat fp32 tensor of weights and one of gradients make summing over drafters, clipping, the optimizer and copying weights
back a handful of calls each, independent of the number of layers. Matrices come first, so that weight decay is one slice.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dflash.config import OptimConfig

ALIGNMENT = 64  # elements; keeps every parameter aligned for vector loads


class FlatParameters:
    """Moves a module's parameters and gradients into two flat fp32 tensors of which they become views."""

    def __init__(self, module: nn.Module) -> None:
        named = sorted(module.named_parameters(), key=lambda item: (item[1].dim() < 2, item[0]))
        self.offsets: dict[str, int] = {}
        total = 0
        self.num_matrix_elements = 0
        for name, parameter in named:
            self.offsets[name] = total
            total += math.ceil(parameter.numel() / ALIGNMENT) * ALIGNMENT
            if parameter.dim() >= 2:
                self.num_matrix_elements = total
        device = named[0][1].device
        self.shapes = {name: parameter.shape for name, parameter in named}
        self.weights = torch.zeros(total, dtype=torch.float32, device=device)
        self.gradients = torch.zeros(total, dtype=torch.float32, device=device)
        for name, parameter in named:
            view = self.view(self.weights, name)
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.grad = self.view(self.gradients, name)

    def view(self, flat: Tensor, name: str) -> Tensor:
        """The part of a flat tensor that belongs to one parameter, in its shape."""
        shape = self.shapes[name]
        return flat.narrow(0, self.offsets[name], shape.numel()).view(shape)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Any flat tensor (weights, gradients, moments) as a state dict."""
        return {name: self.view(flat, name) for name in self.offsets}

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

    def step(self, step: int, *, total_weight: float) -> tuple[float, float]:
        """Divide the summed gradients by `total_weight`, clip, update. Returns (gradient norm before clipping, learning rate)."""
        gradients = self._flat.gradients
        gradients.div_(total_weight)
        norm = float(torch.linalg.vector_norm(gradients))
        if norm > self._config.clip:
            gradients.mul_(self._config.clip / norm)
        rate = learning_rate(self._config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return norm, rate

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
