"""What this torch looks like inside: the shared state of FX tracing, read without changing it.

Everything is found by looking for it, never by a version number: the tracing flag is a module global up to torch 2.13
and a thread-local value from 2.14, and the next release may move it again. What is not found is `None` in the state and
listed by `unknown`, so that a caller can say "not observed" instead of "clean".

A state means something at quiet moments only, when no thread traces or compiles: then anything but the initial values is
left behind by traces that overlapped, and stays for the life of the process. From torch 2.14 the flag of one thread says
nothing about another's; `tracing_state` reads the calling thread's.
"""

from __future__ import annotations

import math
import sys
import threading
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.fx._symbolic_trace as symbolic_trace

ORIGINALS = {"__call__": "_orig_module_call", "__getattr__": "_orig_module_getattr"}
_FLEX_MODULE = "torch.nn.attention.flex_attention"
_FLEX_FALLBACK = "flex_attention_performance"
WRAPPED_MARKS = ("_Patcher__fx_already_patched", "__fx_already_patched")  # torch sets it in a class, where the name is mangled
_ABSENT = object()


@dataclass(frozen=True, kw_only=True)
class TracingState:
    """One reading. `None` means that this torch keeps the value elsewhere: unknown, not clean."""

    flag: bool | None  # some thread is inside `Tracer.trace` (or this one, where the flag is thread-local)
    flag_scope: Literal["process", "thread"] | None
    patched_methods: tuple[str, ...] | None  # methods of torch.nn.Module that are not the originals
    patcher: bool | None  # torch.fx has an active patcher of module globals
    wrapped_functions: tuple[str, ...] | None  # functions of math and of torch.fx.wrap that are replaced in their modules
    compiling: bool | None  # torch.compiler's process-wide flag: an export, and from torch 2.13 any compile


def tracing_state() -> TracingState:
    """Read the shared state of tracing, as the calling thread sees it."""
    flag, scope = _flag()
    patcher = getattr(symbolic_trace, "CURRENT_PATCHER", _ABSENT)
    compiling = getattr(torch.compiler, "_is_compiling_flag", None)
    return TracingState(
        flag=flag,
        flag_scope=scope,
        patched_methods=_patched_methods(),
        patcher=None if patcher is _ABSENT else patcher is not None,
        wrapped_functions=_wrapped_functions(),
        compiling=None if compiling is None else bool(compiling),
    )


def unknown(state: TracingState) -> list[str]:
    """One sentence for each value that this torch does not show; such a run is "not observed", never "clean"."""
    values = {
        "the FX tracing flag": state.flag,
        "the original methods of torch.nn.Module": state.patched_methods,
        "the patcher of torch.fx": state.patcher,
        "the functions of torch.fx.wrap": state.wrapped_functions,
        "the compiling flag of torch.compiler": state.compiling,
    }
    missing = [name for name, value in values.items() if value is None]
    if _flex_warnings() is None:
        missing.append("the fallback warnings of flex_attention")
    return [
        f"torch {torch.__version__} does not show {name} where dflash.fx.seams looks for it: not observed" for name in missing
    ]


def leaks(state: TracingState) -> list[str]:
    """Say what `state`, read at a quiet moment, shows to be left behind, and what to do about it. Empty: nothing seen."""
    found = []
    if state.flag:
        found.append(
            "the FX tracing flag is set although nothing traces (F6): calls of compiled functions raise, or run uncompiled. "
            "Restart the process, or set torch.fx._symbolic_trace._is_fx_tracing_flag to False; let no two threads trace at once"
        )
    found += [
        f"torch.nn.Module.{method} is still patched although nothing traces (F5): every module call pays for it, and modules "
        "compiled from now on may silently stay uncompiled. Restart the process, or restore it from "
        f"torch.fx._symbolic_trace.{ORIGINALS[method]}; let no two threads trace at once"
        for method in state.patched_methods or ()
    ]
    if state.patcher:
        found.append(
            "torch.fx._symbolic_trace.CURRENT_PATCHER is set although nothing traces (F5): functions of other modules may "
            "still be wrapped. Restart the process, or set it to None; let no two threads trace at once"
        )
    if state.wrapped_functions:
        names = ", ".join(state.wrapped_functions[:5])
        found.append(
            f"{names} are still wrapped although nothing traces (F14): they are slower, cannot be pickled, and wrappers grow "
            "with each further overlap. Restart the process; let no two threads trace at once"
        )
    if state.compiling:
        found.append(
            "torch.compiler._is_compiling_flag is set although nothing compiles: code that asks torch.compiler.is_compiling() "
            "takes the wrong branch. Restart the process; let no two threads compile or export at once"
        )
    return found


def fallback_warnings() -> tuple[str, ...]:
    """The silent fallbacks that this process has taken so far: flex_attention warns once a process when it runs unfused."""
    shown = _flex_warnings()
    if shown is None or _FLEX_FALLBACK not in shown:
        return ()
    return (
        "flex_attention ran unfused (uncompiled), which materialises all attention scores: compile the function that calls it",
    )


def wrapped_places() -> list[tuple[dict[str, Any], str]]:
    """Where a function of math or of torch.fx.wrap stands wrapped now: the globals of its module, and its name there."""
    patched: dict[tuple[int, str], dict[str, Any]] = getattr(symbolic_trace, "_wrapped_fns_to_patch", {})
    places = [(vars(math), name) for name in list(vars(math))] + [(scope, name) for (_, name), scope in list(patched.items())]
    return [(scope, name) for scope, name in places if is_wrapped(scope.get(name))]


def is_wrapped(function: Any) -> bool:
    """Whether `function` is a wrapper that torch.fx puts in the place of another while it traces."""
    return any(hasattr(function, mark) for mark in WRAPPED_MARKS)


def _flag() -> tuple[bool | None, Literal["process", "thread"] | None]:
    local = getattr(symbolic_trace, "_is_fx_tracing_tls", _ABSENT)
    if isinstance(local, threading.local):
        reader: Any = getattr(symbolic_trace, "_get_is_fx_tracing", None)
        return (bool(reader()), "thread") if callable(reader) else (None, "thread")
    flag = getattr(symbolic_trace, "_is_fx_tracing_flag", None)
    return (None, None) if flag is None else (bool(flag), "process")


def _patched_methods() -> tuple[str, ...] | None:
    originals = {method: getattr(symbolic_trace, name, _ABSENT) for method, name in ORIGINALS.items()}
    if _ABSENT in originals.values():
        return None
    return tuple(method for method, original in originals.items() if getattr(torch.nn.Module, method) is not original)


def _wrapped_functions() -> tuple[str, ...] | None:
    if not isinstance(getattr(symbolic_trace, "_wrapped_fns_to_patch", None), dict):
        return None
    return tuple(f"{scope['__name__']}.{name}" for scope, name in wrapped_places())


def _flex_warnings() -> frozenset[str] | None:
    module = sys.modules.get(_FLEX_MODULE)
    if module is None:  # never imported: it cannot have warned
        return frozenset()
    shown = getattr(module, "_WARNINGS_SHOWN", None)
    return None if shown is None else frozenset(shown)
