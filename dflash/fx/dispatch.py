"""`nn.Module.__call__` and `__getattr__` while threads trace: each thread meets the wrappers of its own traces only.

torch.fx puts wrappers on `nn.Module` when a trace begins and puts back what it found when it ends, for all threads. Here each
thread has a stack of wrappers, and `nn.Module` has a dispatcher while any stack has something in it; no thread waits for another.

- `__call__` is another function meanwhile: Dynamo's cache belongs to the code of the original, which must not change under
  compiled modules. It is the original with a look at the thread's stack in front, made from its source, which spares every
  call of every thread a second function. Dynamo, which may inline it, sees a thread that does not trace.
- `__getattr__` stays the same function and has other code meanwhile: Dynamo knows it by identity. The wrappers call the original
  through `torch.fx._symbolic_trace._orig_module_getattr`, which is a copy of it meanwhile.
"""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
import threading
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.fx._symbolic_trace as symbolic_trace
from torch.compiler import is_dynamo_compiling

from dflash.fx.code_swap import UnknownInternals, with_constants

METHODS = ("__call__", "__getattr__")
Wrapper = Callable[..., Any]


class _Stacks(threading.local):
    def __init__(self) -> None:
        self.call: list[Wrapper] = []
        self.getattr: list[Wrapper] = []

    def of(self, method: str) -> list[Wrapper]:
        return self.call if method == "__call__" else self.getattr


_stacks = _Stacks()
_lock = threading.RLock()
_depths: dict[int, int] = {}  # wrappers by thread, of threads that have some
_call_before: Wrapper = symbolic_trace._orig_module_call
_call_now: Wrapper = _call_before  # what was put in its place
_LOOK = """
if not is_dynamo_compiling() and _stacks.call:
    return _stacks.call[-1](self, *args, **kwargs)
"""


def _call_and_look(self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Stands for an `nn.Module.__call__` whose source says nothing, such as somebody's wrapper of it."""
    if not is_dynamo_compiling() and _stacks.call:
        return _stacks.call[-1](self, *args, **kwargs)
    return _call_before(self, *args, **kwargs)


def _looking(function: Any) -> Wrapper:
    """`function`, an `nn.Module.__call__`, with a look at the thread's stack in front."""
    code = _code_of(function)
    if code is None:
        return _call_and_look
    found = FunctionType(code, globals(), function.__name__)
    found.__module__, found.__qualname__, found.__doc__ = function.__module__, function.__qualname__, function.__doc__
    return found


def _code_of(function: Any) -> CodeType | None:
    """Its source with _LOOK in front, compiled; None unless it takes self, *args, **kwargs and uses no globals."""
    if type(function) is not FunctionType or function.__closure__ or _uses_globals(function.__code__):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return None
    (definition,) = tree.body
    if not isinstance(definition, ast.FunctionDef) or ast.unparse(definition.args) != "self, *args, **kwargs":
        return None
    old = function.__code__
    ast.increment_lineno(tree, old.co_firstlineno - 1)
    look = ast.parse(_LOOK).body
    for node in (node for statement in look for node in ast.walk(statement)):
        ast.copy_location(node, definition.body[0])
    definition.body[:0] = look
    whole = compile(tree, old.co_filename, "exec", dont_inherit=True)
    (code,) = (part for part in whole.co_consts if isinstance(part, CodeType))
    return code.replace(co_qualname=old.co_qualname)


def _uses_globals(code: CodeType) -> bool:
    return any(instruction.opname in {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"} for instruction in dis.get_instructions(code))


def _dispatch_getattr(self: Any, name: str) -> Any:
    # The strings are exchanged for objects: the code runs with the globals of torch.nn.modules.module.
    stacks: Any = "stacks of wrappers"
    original: Any = "the original __getattr__"
    wrappers = stacks.getattr
    return wrappers[-1](self, name) if wrappers else original(self, name)


class _Getattr:
    """The original `nn.Module.__getattr__` and its two codes."""

    def __init__(self) -> None:
        function = torch.nn.Module.__getattr__
        if type(function) is not FunctionType or function.__closure__ or symbolic_trace._orig_module_getattr is not function:
            raise UnknownInternals("torch.nn.Module.__getattr__ is not the plain function that torch.fx knows")
        self.function, self.code = function, function.__code__
        self.copy = FunctionType(self.code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
        self.dispatching = with_constants(
            _dispatch_getattr.__code__, {"stacks of wrappers": _stacks, "the original __getattr__": self.copy}
        ).replace(co_name=self.code.co_name, co_qualname=self.code.co_qualname)

    def lead_to_stacks(self) -> None:
        symbolic_trace._orig_module_getattr = self.copy
        self.function.__code__ = self.dispatching

    def lead_back(self) -> None:
        self.function.__code__ = self.code
        symbolic_trace._orig_module_getattr = self.function


_getattr: _Getattr | None = None
_look_original: Wrapper = _call_and_look


def prepare() -> None:
    """Look at `nn.Module` as it is; changes nothing. Raises UnknownInternals."""
    global _getattr, _look_original
    if torch.nn.Module.__call__ is not symbolic_trace._orig_module_call:
        raise UnknownInternals("torch.nn.Module.__call__ is not the function that torch.fx knows")
    _getattr = _Getattr()
    _look_original = _looking(symbolic_trace._orig_module_call)


def push(method: str, wrapper: Wrapper) -> None:
    """The calling thread traces: its calls of `method` go to `wrapper`."""
    with _lock:
        _stacks.of(method).append(wrapper)
        if not _depths:
            _begin()
        thread = threading.get_ident()
        _depths[thread] = _depths.get(thread, 0) + 1


def drop(method: str, wrapper: Wrapper) -> None:
    """The calling thread takes `wrapper` away, wherever it is in its stack."""
    with _lock:
        stack = _stacks.of(method)
        positions = [position for position, entry in enumerate(stack) if entry is wrapper]
        if not positions:
            return  # reverted before: torch does so when it compiles in the middle of a trace
        del stack[positions[-1]]
        thread = threading.get_ident()
        _depths[thread] -= 1
        if not _depths[thread]:
            del _depths[thread]
        if not _depths:
            _end()


def this_thread_traces() -> bool:
    """Whether the calling thread has wrappers."""
    return bool(_stacks.call)


def after_fork() -> None:
    """In the child only the thread that forked lives."""
    _lock._at_fork_reinit()  # type: ignore[attr-defined]  # as the standard library does with its own locks
    others = [thread for thread in _depths if thread != threading.get_ident()]
    for thread in others:
        del _depths[thread]
    if others and not _depths:
        _end()


def _begin() -> None:
    global _call_before, _call_now
    assert _getattr is not None
    _call_before = torch.nn.Module.__call__
    _call_now = _look_original if _call_before is symbolic_trace._orig_module_call else _call_and_look
    _getattr.lead_to_stacks()
    torch.nn.Module.__call__ = _call_now  # type: ignore[method-assign]


def _end() -> None:
    assert _getattr is not None
    if torch.nn.Module.__call__ is _call_now:  # somebody else may have patched it meanwhile
        torch.nn.Module.__call__ = _call_before  # type: ignore[method-assign]
    _getattr.lead_back()
