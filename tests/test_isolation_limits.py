"""Laws of what isolation does not isolate: harm that can be seen is warned of once and counted; a quiet program hears nothing."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers_isolation import Parked, X
from torch import nn

import dflash.fx
from dflash.fx import overlaps
from dflash.fx.gpu_guard import without_gpu_guard


@pytest.fixture(autouse=True)
def isolation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(overlaps, "_observed", type(overlaps._observed)())
    with without_gpu_guard(), dflash.fx.isolated():
        yield


def compiled(park: Callable[[], None]) -> torch.Tensor:
    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        park()
        return graph.forward

    found: torch.Tensor = torch.compile(lambda x: x + 1, backend=backend)(X)
    return found


def exported(park: Callable[[], None]) -> torch.export.ExportedProgram:
    class ParksInExport(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.compiler.is_exporting():
                park()
            return x + 1

    return torch.export.export(ParksInExport(), (X,), strict=False)


def quietly(act: Callable[[Callable[[], None]], object]) -> Callable[[Callable[[], None]], list[warnings.WarningMessage]]:
    """Warnings of a thread, as its result; the filters are the process's."""

    def run(park: Callable[[], None]) -> list[warnings.WarningMessage]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            act(park)
        return [one for one in seen if issubclass(one.category, dflash.fx.IsolationWarning)]

    return run


def sets_dtype() -> None:
    torch.set_default_dtype(torch.float64)


def draws() -> None:
    torch.rand(1)


def sets_flag() -> None:
    torch._C._set_cudnn_enabled(True)


@pytest.mark.parametrize(
    ("act", "harm", "kind", "what"),
    [
        (compiled, sets_dtype, "default dtype", "parked compiled"),
        (compiled, draws, "random state", "parked compiled"),
        (exported, sets_flag, "backend flags", "parked exported"),
    ],
)
def test_harm_is_warned_of_once_and_counted(
    act: Callable[[Callable[[], None]], object], harm: Callable[[], None], kind: str, what: str
) -> None:
    said = []
    for _ in range(2):
        with Parked(quietly(act)) as thread:
            harm()
        said += [str(one.message) for one in thread.result]
    assert torch.get_default_dtype() is torch.float32
    (sentence,) = said
    assert kind in sentence
    assert what in sentence
    assert [limit for limit in dflash.fx.limits() if limit.startswith(f"{kind} (undone 2 times")] != []
    assert sum("undone 0 times" in limit for limit in dflash.fx.limits()) == 2


def test_an_overlap_without_harm_is_silent() -> None:
    with Parked(quietly(compiled)) as first, Parked(quietly(exported)) as second:
        nn.ReLU()(X)
    assert (first.result, second.result) == ([], [])
    assert sum("undone 0 times" in limit for limit in dflash.fx.limits()) == 3


def test_what_the_only_thread_does_itself_is_no_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # a runner of tests may have threads of its own
    compiled(sets_dtype)  # warnings are errors here
    assert torch.get_default_dtype() is torch.float32
    assert sum("undone 0 times" in limit for limit in dflash.fx.limits()) == 3


def test_a_compiled_function_that_asks_for_gradients_computes_them() -> None:
    x = torch.ones(2, requires_grad=True)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        y = x.cos()
        return torch.autograd.grad(y, (x,), torch.ones_like(y))[0]

    torch._dynamo.reset()
    assert torch.equal(torch.compile(gradient, backend="eager")(x), gradient(x))
