"""A value of its own for each thread behind a global of a module.

The module's functions get code that reads an attribute of a thread-local object (code_swap.py); everybody else who says
`module.name` reaches the same value through a property of the module's class. What stands in the module's dictionary stays
untouched, so that taking it off again leaves the module as it was.

The thread that installs keeps its values; every other one starts quiet: flags False, dictionaries and mode stacks empty.
What a release has made a ContextVar or a thread-local object already is left alone.
"""

from __future__ import annotations

import contextvars
import gc
import importlib
import threading
from collections.abc import Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

from dflash.fx import code_swap
from dflash.fx.code_swap import UnknownInternals

STATE = {
    "torch.fx._symbolic_trace": ("_is_fx_tracing_flag", "CURRENT_PATCHER"),
    "torch.fx.experimental.proxy_tensor": (
        "_CURRENT_MAKE_FX_TRACER",
        "ORIGINAL_ATEN",
        "CURRENT_DECOMPOSITION_TABLE",
        "_FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT",
    ),
    "torch.fx.traceback": ("current_meta", "current_replay_node", "should_preserve_node_meta", "_should_preserve_node_meta"),
    "torch.fx.graph_module": ("_forward_from_src",),
    "torch.fx._lazy_graph_module": ("_use_lazy_graph_module_flag", "_force_skip_lazy_graph_module_flag"),
    "torch.compiler": ("_is_compiling_flag", "_is_exporting_flag", "_is_non_strict_tracing_flag"),
    "torch.utils._python_dispatch": (
        "_is_in_torch_dispatch_mode",
        "_is_in_non_infra_torch_dispatch_mode",
        "_is_in_any_mode_without_ignore_compile_internals",
    ),
    "torch._ops": ("_mode_stack_state_for_pre_dispatch",),
    "torch.export._trace": ("_EXPORT_FLAGS", "_EXPORT_MODULE_HIERARCHY"),
    "torch._higher_order_ops.local_map": ("_DEFER_INLINING",),
}


def is_shared(module: ModuleType, name: str) -> bool:
    """Whether torch keeps one value of `name` for the process."""
    absent = object()
    value = vars(module).get(name, absent)
    return value is not absent and not isinstance(value, contextvars.ContextVar | threading.local)


def left_alone(module_name: str) -> bool:
    """Whether a module's class must stay as it is, and its values shared with it.

    Up to torch 2.12 Dynamo cannot import from a module of another class, and code that it traces imports from torch.compiler
    (vmap does, and flex_attention by it). Only exports set the flags there on these releases, so F11 is not lost.
    """
    return module_name == "torch.compiler" and not hasattr(importlib.import_module(module_name), "_compile_session_context")


class ModuleState:
    """The per-thread values of one module, not yet installed."""

    def __init__(self, name: str, names: Sequence[str]) -> None:
        """Raises UnknownInternals on a module that is not as expected; changes nothing."""
        self.module: ModuleType = importlib.import_module(name)
        self.names = () if left_alone(name) else tuple(entry for entry in names if is_shared(self.module, entry))
        self._class = type(self.module)
        self.values = _thread_values({entry: vars(self.module)[entry] for entry in self.names})
        self.code = code_swap.compiled_with(self.module, self.names, self.values) if self.names else {}

    def show(self) -> None:
        """Lead readers and writers outside the module to the values."""
        properties = {name: _property(self.values, name) for name in self.names}
        self.module.__class__ = type(self._class.__name__, (self._class,), {**properties, "__module__": self._class.__module__})

    def hide(self) -> None:
        """Undo `show`."""
        self.module.__class__ = self._class


class PerThread:
    """All of STATE that is shared on this torch."""

    def __init__(self) -> None:
        """Import the modules and compile their functions anew; raises UnknownInternals, and changes nothing."""
        states = [ModuleState(name, names) for name, names in STATE.items()]
        self.states = [state for state in states if state.names]
        self._pairs: list[tuple[CodeType, CodeType]] = []

    def install(self) -> None:
        """Raises UnknownInternals, with nothing changed."""
        functions = code_swap.functions_of([state.module for state in self.states])
        self._pairs, foreign = self._matched(functions)
        code_swap.swap(functions, self._pairs)
        if foreign:
            code_swap.swap_kept([pair for pair in self._pairs if _key(pair[0]) in foreign])
        for state in self.states:
            state.show()

    def remove(self) -> None:
        """Undo `install`; also after only a part of it was done."""
        for state in self.states:
            state.hide()
        back = [(new, old) for old, new in self._pairs]
        functions = code_swap.functions_of([state.module for state in self.states])
        code_swap.swap(functions, back)
        keys = {_key(old) for old, _ in self._pairs}
        foreign = {_key(f.__code__) for f in functions if _key(f.__code__) in keys and not _is_one_of(f.__code__, back)}
        if foreign:
            code_swap.swap_kept([pair for pair in back if _key(pair[0]) in foreign])

    def after_fork(self) -> None:
        """The values of the thread that forked are still its own."""

    def _matched(self, functions: Sequence[FunctionType]) -> tuple[list[tuple[CodeType, CodeType]], set[code_swap.Key]]:
        """Old and new code; and the keys of functions that somebody gave code of his own."""
        by_scope = {id(vars(state.module)): state for state in self.states}
        pairs: dict[int, tuple[CodeType, CodeType]] = {}
        matched: set[tuple[str, code_swap.Key]] = set()
        foreign: dict[tuple[str, code_swap.Key], FunctionType] = {}
        for function in functions:
            state, old = by_scope[id(function.__globals__)], function.__code__
            new = state.code.get(_key(old))
            if new is None:
                if old.co_filename == state.module.__file__ and code_swap.global_names(old) & set(state.names):
                    raise UnknownInternals(f"{old.co_qualname} of {state.module.__name__} is not as its source says")
                continue
            place = (state.module.__name__, _key(old))
            if not code_swap.global_names(old) & set(state.names):
                foreign[place] = function
                continue
            if new.co_freevars != old.co_freevars:
                raise UnknownInternals(f"{old.co_qualname} of {state.module.__name__} is not as its source says")
            pairs[id(old)] = (old, new)
            matched.add(place)
        for place, function in foreign.items():
            if place not in matched:
                raise UnknownInternals(
                    f"somebody gave {function.__module__}.{function.__qualname__} other code and keeps no copy of the function: "
                    "isolate before that is done"
                )
        self._refuse_hidden(matched)
        for state in self.states:
            used = {name for old, _ in pairs.values() for name in code_swap.global_names(old)}
            unused = [name for name in state.names if name not in used]
            if unused:
                raise UnknownInternals(f"no function of {state.module.__name__} uses {', '.join(unused)}")
        return list(pairs.values()), {key for _, key in foreign}

    def _refuse_hidden(self, matched: set[tuple[str, code_swap.Key]]) -> None:
        """Python itself freezes a few objects when it starts; functions of torch must not be among them."""
        if not gc.get_freeze_count():
            return
        for state in self.states:
            for key in state.code:
                if "<locals>" not in key[0] and (state.module.__name__, key) not in matched:
                    raise UnknownInternals(
                        f"{key[0]} of {state.module.__name__} was not found: gc.freeze() hides it. "
                        "Isolate before gc.freeze(), or call gc.unfreeze() first"
                    )


def _key(code: CodeType) -> code_swap.Key:
    return code.co_qualname, code.co_firstlineno


def _is_one_of(code: CodeType, pairs: Sequence[tuple[CodeType, CodeType]]) -> bool:
    return any(code is new for _, new in pairs)


def _quiet(value: Any) -> Any:
    """What a thread starts with, which neither traces nor compiles."""
    if isinstance(value, bool):
        return False
    if isinstance(value, FunctionType):
        return value
    return None if value is None or value.__class__.__module__ not in {"builtins", "torch._ops"} else type(value)()


def _thread_values(now: dict[str, Any]) -> threading.local:
    """The calling thread keeps the values `now`."""

    class Values(threading.local):
        def __init__(self) -> None:
            for name, value in now.items():
                setattr(self, name, _quiet(value))

    values = Values()
    for name, value in now.items():
        setattr(values, name, value)
    return values


def _property(values: threading.local, name: str) -> property:
    return property(lambda _module: getattr(values, name), lambda _module, value: setattr(values, name, value))
