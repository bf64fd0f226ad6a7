"""F13, F15: exports, and flex_attention without torch.compile, beside others like them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention as flex

from diagnostics.stress.cures import Stage
from diagnostics.stress.evidence import Evidence, X, beside, finish, left_behind, verdict
from diagnostics.stress.workers import park


class _ParksOnce(nn.Module):
    """A module whose export stops in the middle, once; exports run a module several times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.parked = False

    def forward(self, x: Tensor) -> Tensor:
        """Park once."""
        if torch.compiler.is_compiling() and not self.parked:
            self.parked = True
            park()
        return self.linear(x)  # type: ignore[no-any-return]


def two_exports(stage: Stage) -> Evidence:
    """F15: two exports end in the order in which they began."""

    def export() -> None:
        with stage.turn():
            torch.export.export(_ParksOnce(), (X,), strict=False)

    tracing, innocent = beside(stage, export, export)
    stuck = [name for name in ("is_compiling", "is_exporting") if getattr(torch.compiler, name)()]
    left = "; ".join(filter(None, [left_behind(), *(f"{name}() stays True" for name in stuck)]))
    return verdict(bool(left), left, "nothing is left behind", tracing, innocent)


def export_of_module_in_use(stage: Stage) -> Evidence:
    """F15: a module is called while another thread exports it: its parameters are FakeTensors meanwhile."""
    module = _ParksOnce()

    def export() -> None:
        with stage.turn():
            torch.export.export(module, (X,), strict=False)

    _, innocent = beside(stage, export, lambda: type(module.linear(X)).__name__)
    what = f"thread innocent got a {innocent.result}"
    return verdict(innocent.result == "FakeTensor", what, what, innocent)


def two_uncompiled_flex_calls(stage: Stage) -> Evidence:
    """F13: flex_attention with gradients and without torch.compile traces on every call."""
    query = torch.ones(1, 1, 4, 16, requires_grad=True)

    def attend() -> None:
        with stage.turn():
            flex.flex_attention(query, query, query, score_mod=_double)

    def parking_make_fx(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Callable[..., Any]:
        def parks(*inputs: Any) -> Any:
            park()
            return function(*inputs)

        return make_fx(parks, *arguments, **keywords)

    operator = importlib.import_module("torch._higher_order_ops.flex_attention")  # its package has the operator by this name
    # On a CPU flex_attention refuses gradients; without this check its forward takes the same way as on a GPU.
    without_check = mock.patch.object(flex, "_validate_device", return_value=None)
    with without_check, mock.patch.object(operator, "make_fx", parking_make_fx):
        finish(stage.start("warm", attend))  # what it compiles, it compiles under Dynamo's lock; later calls only trace
        tracing, innocent = beside(stage, attend, attend)
    left = left_behind()
    return verdict(bool(left), left, "both calls were right", tracing, innocent)


def _double(score: Tensor, *_index: Tensor) -> Tensor:
    return score * 2
