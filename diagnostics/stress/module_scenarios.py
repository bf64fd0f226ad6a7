"""F3, F4, F5, F14: torch.fx patches nn.Module and functions such as math.sqrt for the whole process while it traces."""

from __future__ import annotations

import math
import sys
from types import FrameType

import torch
from torch import Tensor, nn

from diagnostics.stress.cures import Stage
from diagnostics.stress.evidence import Evidence, ParksInForward, X, beside, finish, left_behind, trace_and_park, verdict
from diagnostics.stress.workers import park


class _Looks(nn.Module):
    """Says whether its call came through a trace."""

    def forward(self, x: Tensor) -> bool:
        """Look at the stack."""
        del x
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name == "module_call_wrapper":
                return True
            frame = frame.f_back
        return False


def hijacked_call(stage: Stage) -> Evidence:
    """F3: a module that the tracer does not know: the caller gets an error."""
    module = nn.Linear(2, 2)

    def trace() -> None:
        with stage.turn():
            torch.fx.symbolic_trace(ParksInForward())

    _, innocent = beside(stage, trace, lambda: module(X).shape)
    return verdict("not installed as a submodule" in str(innocent.error), "", "the call was right", innocent)


def shared_leaf(stage: Stage) -> Evidence:
    """F3: a module that is part of what is traced: the caller gets a Proxy, the graph gains foreign nodes, silently."""
    shared = nn.Linear(2, 2)

    def trace() -> int:
        with stage.turn():
            graph = torch.fx.symbolic_trace(ParksInForward(shared)).graph
        return len([node for node in graph.nodes if node.op == "call_module"]) - 1

    tracing, innocent = beside(stage, trace, lambda: type(shared(X)).__name__)
    happened = innocent.result == "Proxy" and bool(tracing.result)
    what = f"thread innocent got a {innocent.result}; the graph of thread tracing gained {tracing.result} foreign nodes"
    return verdict(happened, what, what, tracing, innocent)


def passed_through(stage: Stage) -> Evidence:
    """F4: make_fx lets the call of another thread through."""
    module = _Looks()
    _, innocent = beside(stage, lambda: trace_and_park(stage), lambda: module(X))
    through = "the call of thread innocent went through module_call_wrapper of thread tracing"
    return verdict(innocent.result is True, through, "the call went its own way", innocent)


def leaked_patch(stage: Stage) -> Evidence:
    """F5: two symbolic traces end in the order in which they began."""

    def trace() -> None:
        with stage.turn():
            torch.fx.symbolic_trace(ParksInForward())

    tracing, innocent = beside(stage, trace, trace)
    left = left_behind()
    return verdict(bool(left), left, "nothing is left behind", tracing, innocent)


def unknown_function(stage: Stage) -> Evidence:
    """F14: a tracer made while another thread traces notes the wrapper of math.sqrt, and does not know math.sqrt later."""

    def trace() -> None:
        with stage.turn():
            torch.fx.symbolic_trace(ParksInForward())

    def made_meanwhile() -> str:
        with stage.turn():
            tracer = torch.fx.Tracer()
        park()
        with stage.turn():
            return str(tracer.trace(_root))

    tracing = stage.start("tracing", trace)
    tracing.settle()
    innocent = stage.start("innocent", made_meanwhile)
    innocent.settle()
    finish(tracing, innocent)
    return verdict("Proxy" in str(innocent.error), "", "math.sqrt was traced", innocent)


def _root(x: Tensor) -> float:
    return math.sqrt(x)  # a Proxy when it is traced
