"""Two threads for the scheduler: programs that are right one after the other, and fail in some orders.

Each is built, and what it needs compiled, by one thread beforehand. Unlike the recipes of scenarios.py they wait for
nobody: which order fails is what the scheduler finds. The park points are described in parkpoints.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx


@dataclass(frozen=True, kw_only=True)
class Race:
    """What the threads do, and what one thread does when they have ended."""

    bodies: tuple[Callable[[], Any], ...]
    afterwards: Callable[[], Any] | None = None


def make_fx_beside_call() -> Race:
    """A trace beside a compiled call (F1 where the tracing flag is one for the process)."""
    compiled = _compiled()
    return Race(bodies=(_trace, lambda: compiled(torch.ones(2))))


def trace_beside_module_call() -> Race:
    """A symbolic trace beside the call of a module that it does not know (F3)."""
    module = nn.Linear(2, 2)
    return Race(bodies=(lambda: torch.fx.symbolic_trace(_wave), lambda: _called(module)))


def two_symbolic_traces() -> Race:
    """Two symbolic traces (F5)."""
    return Race(bodies=(lambda: torch.fx.symbolic_trace(_wave), lambda: torch.fx.symbolic_trace(_wave)))


def two_make_fx_then_call() -> Race:
    """Two traces, and a compiled call when both have ended (F6 where the tracing flag is one for the process)."""
    compiled = _compiled()
    return Race(bodies=(_trace, _trace), afterwards=lambda: compiled(torch.ones(2)))


def two_first_calls() -> Race:
    """Two threads call one function that nobody has compiled, forward and backward: one waits for the compile lock."""
    compiled = torch.compile(_wave, backend="eager")

    def train() -> Tensor | None:
        x = torch.ones(2, requires_grad=True)
        torch.autograd.backward(compiled(x).sum())
        return x.grad

    return Race(bodies=(train, train))


def two_calls() -> Race:
    """Two calls of what is compiled: right in every order."""
    compiled = _compiled()
    return Race(bodies=(lambda: compiled(torch.ones(2)), lambda: compiled(torch.ones(2))))


RACES: dict[str, Callable[[], Race]] = {
    "F1": make_fx_beside_call,
    "F3": trace_beside_module_call,
    "F5": two_symbolic_traces,
    "F6": two_make_fx_then_call,
    "first-calls": two_first_calls,
    "clean": two_calls,
}


def _wave(x: Tensor) -> Tensor:
    return torch.sin(x) + 1


def _trace() -> list[str]:
    return [node.op for node in make_fx(_wave)(torch.ones(2)).graph.nodes]


def _called(module: nn.Module) -> Any:
    with torch.no_grad():
        return module(torch.ones(2))


def _compiled() -> Callable[[Tensor], Tensor]:
    compiled: Callable[[Tensor], Tensor] = torch.compile(_wave, backend="eager")
    compiled(torch.ones(2))
    return compiled
