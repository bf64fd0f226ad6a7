"""What the threads do: small pieces of work whose results are known from running them alone.

An action is a function of a case number and returns the same result every time, so that what it returned in one thread,
before the others started, is the reference for all of them, and for the process as the threads leave it.
First compiles compile a function with code of its own: Dynamo keeps compiled versions by code object, at most 8.

Known limits: results are compared with a tolerance, and a fallback to uncompiled code gives right results: only the probes
see it. One network is shared by its calls, its traces and its compiled forms; export gets a module of its own, because
whoever calls a module while it is exported gets fake tensors on any torch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

CASES = 2
_TOLERANCE = 1e-4
_WIDTH = 8
_numbers = itertools.count()

Guard = contextlib.AbstractContextManager[Any]  # entered around what traces or calls compiled code, never around backward


@dataclass(frozen=True, kw_only=True)
class Action:
    """One piece of work."""

    name: str
    run: Callable[[int], Any]  # the case; the result is made of tensors, strings, tuples and lists
    only_calls: bool  # once every case has run, it traces and compiles nothing


class Workload:
    """All actions for some backends on one device. Build it in one thread."""

    def __init__(self, *, backends: Sequence[str], device: str, guard: Guard) -> None:
        self._device, self._guard = device, guard
        self._inputs = [torch.linspace(-1.0, 1.0 + case, 4 * _WIDTH, device=device).view(4, _WIDTH) for case in range(CASES)]
        self._network = network().to(device)
        self._pickled = pickle.dumps(torch.fx.symbolic_trace(self._network))
        self._functions = {name: torch.compile(fresh(_wave), backend=name, dynamic=False) for name in backends}
        self._networks = {name: torch.compile(self._network, backend=name, dynamic=False, fullgraph=True) for name in backends}
        self._flex = torch.compile(fresh(_attention), dynamic=False, fullgraph=True)

    def actions(self) -> list[Action]:
        """Everything that this machine can do."""
        found = [
            Action(name="module call", run=self._call_module, only_calls=True),
            Action(name="block mask", run=self._block_mask, only_calls=True),
            Action(name="make_fx", run=self._make_fx, only_calls=False),
            Action(name="symbolic_trace", run=self._symbolic_trace, only_calls=False),
            Action(name="export", run=self._export, only_calls=False),
            Action(name="unpickle", run=self._unpickle, only_calls=False),
        ]
        for backend in self._functions:
            for name, run, only_calls in (
                ("call", self._call, True),
                ("train", self._train, True),
                ("first compile", self._first_compile, False),
                ("recompile", self._recompile, False),
            ):
                found.append(Action(name=f"{name} {backend}", run=functools.partial(run, backend), only_calls=only_calls))
        if self._device == "cuda" and "inductor" in self._functions:
            found.append(Action(name="flex call", run=self._call_flex, only_calls=True))
            found.append(Action(name="flex first compile", run=self._first_compile_flex, only_calls=False))
        return found

    def _call_module(self, case: int) -> Tensor:
        with torch.no_grad():
            result: Tensor = self._network(self._inputs[case])
        return result

    def _block_mask(self, case: int) -> Tensor:
        length = 32 * (case + 1)
        with self._guard:
            mask = create_block_mask(_causal, None, None, length, length, device=self._device, BLOCK_SIZE=16)
        return mask.to_dense()

    def _make_fx(self, case: int) -> list[str]:
        with self._guard:
            return _nodes(make_fx(_wave)(self._inputs[case]))

    def _symbolic_trace(self, case: int) -> list[Any]:
        with self._guard:
            graph = torch.fx.symbolic_trace(self._network)
        return [*_nodes(graph), graph(self._inputs[case]).detach()]

    def _export(self, case: int) -> list[Any]:
        own = network().to(self._device)
        with self._guard:
            program = torch.export.export(own, (self._inputs[case],))
            module = program.module()
        return [*_nodes(program.graph_module), module(self._inputs[case]).detach()]

    def _unpickle(self, case: int) -> list[Any]:
        with self._guard:
            graph = pickle.loads(self._pickled)  # noqa: S301 - written by this object
        return [*_nodes(graph), graph(self._inputs[case]).detach()]

    def _call(self, backend: str, case: int) -> Tensor:
        with self._guard, torch.no_grad():
            return self._functions[backend](self._inputs[case])

    def _train(self, backend: str, case: int) -> list[Tensor]:
        with self._guard:
            output = self._networks[backend](self._inputs[case])
        # Not backward(): threads share the parameters, and would add to each other's gradients.
        return [output.detach(), *torch.autograd.grad(output.sum(), list(self._network.parameters()))]

    def _first_compile(self, backend: str, case: int) -> list[Tensor]:
        compiled = torch.compile(fresh(_wave), backend=backend, dynamic=False)
        return self._forward_and_backward(compiled, self._inputs[case])

    def _recompile(self, backend: str, case: int) -> list[Tensor]:
        compiled = torch.compile(fresh(_wave), backend=backend, dynamic=False)
        x = self._inputs[case]
        with self._guard, torch.no_grad():
            return [compiled(shape) for shape in (x, x[:2], x.double())]

    def _call_flex(self, case: int) -> list[Tensor]:
        return self._forward_and_backward(self._flex, *self._heads(case))

    def _first_compile_flex(self, case: int) -> list[Tensor]:
        return self._forward_and_backward(torch.compile(fresh(_attention), dynamic=False, fullgraph=True), *self._heads(case))

    def _forward_and_backward(self, function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        with self._guard:
            output = function(*leaves)
        return [output.detach(), *torch.autograd.grad(output.sum(), leaves)]

    def _heads(self, case: int) -> list[Tensor]:
        """Query, key and value: [1, 2, tokens, 64] float32."""
        shape = (1, 2, 128 * (case + 1), 64)
        numbers = torch.arange(2 * shape[2] * 64, device=self._device).view(shape)
        return [torch.sin(numbers * factor) for factor in (0.3, 0.5, 0.7)]


def network() -> nn.Sequential:
    """A small network with the same weights in every copy; [rows, 8] float32 to [rows, 2]."""
    # torch's own class: a traced module whose forward has annotations as strings cannot be pickled.
    made = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 2))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.linspace(-1.0, 1.0, parameter.numel()).view_as(parameter))
    return made


def fresh(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function with code of its own: Dynamo has never seen it."""
    assert isinstance(function, types.FunctionType)
    name = f"{function.__name__}_{next(_numbers)}"
    code = function.__code__.replace(co_name=name, co_qualname=name)
    return types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def same(found: Any, expected: Any) -> bool:
    """Two results are equal, tensors within a tolerance. A Proxy is no tensor."""
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(same, found, expected))
    if not isinstance(expected, Tensor):
        return bool(found == expected)
    if type(found) is not Tensor or found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE)


def _nodes(graph: torch.fx.GraphModule) -> list[str]:
    return [f"{node.op} {node.name}" for node in graph.graph.nodes]


def _wave(x: Tensor) -> Tensor:
    return torch.sin(x) * 3 + torch.cos(x * 2)


def _causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    result: Tensor = flex_attention(query, key, value)
    return result
