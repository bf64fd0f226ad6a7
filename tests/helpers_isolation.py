"""What the tests of isolation share: threads that stop at park points, and a look at everything that isolation changes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any, Self

import torch
import torch._export.utils
import torch.fx._symbolic_trace as symbolic_trace
from torch import Tensor, nn
from torch._dynamo import convert_frame
from torch._export import non_strict_utils
from torch.fx.experimental.proxy_tensor import make_fx

from dflash.fx import code_swap, per_thread

WAIT_SECONDS = 60
X = torch.ones(2)


class Parked:
    """A thread that runs `act(park)` and stops in it once, until the block ends."""

    def __init__(self, act: Callable[[Callable[[], None]], object]) -> None:
        self._here, self._go, self._act = threading.Event(), threading.Event(), act
        self._thread = threading.Thread(target=self._run, name="parked")
        self.result: Any = None
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._here.wait(WAIT_SECONDS)
        assert self.error is None, self.error
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        self._go.set()
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()
        assert self.error is None, self.error

    def _park(self) -> None:
        self._here.set()
        assert self._go.wait(WAIT_SECONDS)

    def _run(self) -> None:
        try:
            self.result = self._act(self._park)
        except BaseException as error:  # noqa: BLE001 - raised in the test's own thread by `finish`
            self.error = error
        finally:
            self._here.set()


class Parks(nn.Module):
    """A module whose trace stops in the middle."""

    def __init__(self, park: Callable[[], None], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.park, self.inner = park, inner
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.park()
        return x * self.weight if self.inner is None else self.inner(x) * self.weight


def traced(park: Callable[[], None], inner: nn.Module | None = None) -> torch.fx.Graph:
    return torch.fx.Tracer().trace(Parks(park, inner))


def made(park: Callable[[], None]) -> torch.fx.GraphModule:
    def function(x: Tensor) -> Tensor:
        park()
        return x + 1

    return make_fx(function)(X)


def targets(graph: torch.fx.Graph) -> list[str]:
    return [f"{node.op} {node.name}" for node in graph.nodes]


def snapshot() -> dict[str, Any]:
    """Everything that isolation changes, as it is now."""
    modules = [__import__(name, fromlist=["_"]) for name in per_thread.STATE]
    functions = code_swap.functions_of(
        [*modules, torch.autograd.graph, nn.modules.module, torch._export.utils, non_strict_utils, convert_frame]
    )
    found: dict[str, Any] = {
        f"code of {function.__qualname__} {id(function)}": function.__code__
        for function in functions
        if function.__module__ != __name__
    }
    found |= {f"class {module.__name__}": type(module) for module in modules}
    found |= {f"{module.__name__} names": set(vars(module)) for module in modules}
    owners = [symbolic_trace._Patcher, symbolic_trace._PatchedFnSetItem, symbolic_trace._PatchedFnSetAttr, symbolic_trace.Tracer]
    for owner in [*owners, nn.Module, symbolic_trace, math]:
        found |= {f"{owner.__name__}.{name}": value for name, value in vars(owner).items() if callable(value)}
    return found


class _Kept(list[object]):
    """Equal to any other."""

    def __eq__(self, _other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    changed = [key for key in before if before[key] is not after.get(key, before[key]) and before[key] != after[key]]
    assert changed == []
    return all(type(before[key]) is not FunctionType or before[key] is after[key] for key in before if key in after)
