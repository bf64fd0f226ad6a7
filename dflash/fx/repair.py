"""Undo what traces that overlapped have left behind (F5, F6 of the failure catalogue), without a restart.

Call it when no thread traces: `from dflash.fx.repair import repair; print(repair())`. What was compiled while the patches were
left behind stays as it is: modules that silently compiled nothing have to be compiled again.
"""

from __future__ import annotations

import torch
import torch.fx._symbolic_trace as symbolic_trace

from dflash.fx import seams


def repair() -> list[str]:
    """Restore torch.nn.Module's methods, wrapped functions, the patcher and the flag; says what it did.

    Raises RuntimeError, having changed nothing, on a torch whose state `dflash.fx.seams` does not know.
    """
    state = seams.tracing_state()
    unknown = seams.unknown(state)
    if unknown:
        raise RuntimeError(f"nothing was repaired: {unknown[0]}")
    done = []
    for method in state.patched_methods or ():
        setattr(torch.nn.Module, method, getattr(symbolic_trace, seams.ORIGINALS[method]))
        done.append(f"restored torch.nn.Module.{method}")
    if state.patcher:
        symbolic_trace.CURRENT_PATCHER = None
        done.append("cleared torch.fx._symbolic_trace.CURRENT_PATCHER")
    if state.flag and state.flag_scope == "process":
        setattr(symbolic_trace, "_is_fx_tracing_flag", False)  # noqa: B010 - the name is not on every torch
        done.append("cleared the FX tracing flag")
    for scope, name in seams.wrapped_places():
        while seams.is_wrapped(scope[name]):
            scope[name] = scope[name].__wrapped__
        done.append(f"restored {scope['__name__']}.{name}")
    return done
