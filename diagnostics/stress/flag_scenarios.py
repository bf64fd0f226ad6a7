"""F1, F2, F6: the tracing flag of one thread meets the compiled calls of another (torch with one flag for the process)."""

from __future__ import annotations

import torch

from dflash.fx import seams
from diagnostics.stress.cures import Stage
from diagnostics.stress.evidence import Evidence, Graphs, UnexpectedError, X, beside, finish, polynomial, trace_and_park, verdict


def clean(stage: Stage) -> Evidence:
    """Trace, compile and call, one after the other: nothing happens."""
    compiled = stage.compile(torch.sin, backend="aot_eager")
    compiled(X)
    torch.fx.symbolic_trace(torch.nn.Identity())
    innocent = stage.start("innocent", lambda: compiled(X).sum().item())
    finish(innocent)
    return verdict(bool(innocent.error), "", "nothing happened", innocent)


def foreign_flag(stage: Stage) -> Evidence:
    """F1: a compiled call meets the trace of another thread and raises."""
    graphs = Graphs()
    compiled = stage.compile(polynomial, backend=graphs)
    compiled(X)

    def call() -> int:
        with stage.turn():
            compiled(X)
        return graphs.runs

    _, innocent = beside(stage, lambda: trace_and_park(stage), call)
    happened = "using FX" in str(innocent.error)
    if not happened and innocent.result != 2:
        raise UnexpectedError(f"{innocent.result} compiled runs in thread innocent, expected 2")
    return verdict(happened, "", "the call ran compiled", innocent)


def silenced_flag(stage: Stage) -> Evidence:
    """F2: the same with error_on_nested_fx_trace=False: the call runs uncompiled."""
    graphs = Graphs()
    compiled = stage.compile(polynomial, backend=graphs)
    compiled(X)

    def call() -> int:
        # In this thread: where config values are per thread, a value set elsewhere is not seen.
        with torch._dynamo.config.patch(error_on_nested_fx_trace=False), stage.turn():
            compiled(X)
        return graphs.runs

    _, innocent = beside(stage, lambda: trace_and_park(stage), call)
    return verdict(innocent.result == 1, "ran uncompiled, silently, in thread innocent", "the call ran compiled", innocent)


def stuck_flag(stage: Stage) -> Evidence:
    """F6: two traces end in the order in which they began; then a compiled call when nothing traces any more."""
    graphs = Graphs()
    compiled = stage.compile(polynomial, backend=graphs)
    compiled(X)
    beside(stage, lambda: trace_and_park(stage), lambda: trace_and_park(stage))

    def call() -> int:
        with stage.turn():
            compiled(X)
        return graphs.runs

    late = stage.start("late", call)
    finish(late)
    flag = seams.tracing_state()
    stuck = "the flag is stuck" if flag.flag and flag.flag_scope == "process" else ""
    return verdict("using FX" in str(late.error), stuck, "; ".join(filter(None, ("the late call ran compiled", stuck))), late)
