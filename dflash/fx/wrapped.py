"""Functions that torch.fx wraps while it traces (`math.*`, `torch.fx.wrap`): one shared wrapper while any thread traces.

The wrapper acts on proxies, through the tracer that made them, so that one serves all threads; the last trace to end puts the
original back, unless the name was bound to something else meanwhile. What the wrapper hides is known by its original.

Known limits: methods that `FX_PATCH_GETITEM` wraps are shared as ever. Code that uses `math` and is compiled in one thread while
another traces is compiled once more afterwards, because Dynamo guards on the wrapper. A wrapped builtin cannot be pickled.
"""

from __future__ import annotations

import builtins
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch.fx._symbolic_trace as symbolic_trace
from torch.compiler import is_dynamo_compiling

from dflash.fx import seams

_ABSENT = object()
_MARK = seams.WRAPPED_MARKS[0]


@dataclass(kw_only=True)
class _Place:
    """A name in the globals of a module, wrapped."""

    scope: dict[str, Any]
    name: str
    before: Any  # what stood there, or _ABSENT: a builtin
    wrapper: Callable[..., Any]
    users: dict[int, int] = field(default_factory=dict)  # records of traces by thread


lock = threading.RLock()  # held for a few dictionary accesses, never while a trace runs
_places: dict[tuple[int, str], _Place] = {}
_originals: dict[int, Callable[..., Any]] = {}  # by the id of a wrapper, of one in place or of a builtin
_of_builtins: dict[int, Callable[..., Any]] = {}  # wrappers by the id of their builtin: both live as long as the process


def take(scope: dict[str, Any], name: str) -> None:
    """The calling thread needs `scope[name]` wrapped."""
    with lock:
        key = (id(scope), name)
        place = _places.get(key)
        if place is None or scope.get(name) is not place.wrapper:  # or bound anew meanwhile
            users = {} if place is None else place.users
            if place is not None:
                _forget(place)
            place = _places[key] = _wrap(scope, name, users)
        thread = threading.get_ident()
        place.users[thread] = place.users.get(thread, 0) + 1


def drop(scope: dict[str, Any], name: str) -> None:
    """One record of the calling thread needs it no longer."""
    with lock:
        place = _places.get((id(scope), name))
        thread = threading.get_ident()
        if place is None or thread not in place.users:
            return  # reverted before
        place.users[thread] -= 1
        if not place.users[thread]:
            del place.users[thread]
        if not place.users:
            _restore(place)


def settle(scope: dict[str, Any], name: str) -> None:
    """Somebody has put back what he found at `scope[name]`: if that is a wrapper out of place, its original belongs there."""
    with lock:
        place, value = _places.get((id(scope), name)), scope.get(name)
        if bare(value) is not value and (place is None or place.wrapper is not value):
            scope[name] = bare(value)


def bare(function: Any) -> Any:
    """The original of a shared wrapper, in place or taken away meanwhile; anything else as it is."""
    return vars(function)["__wrapped__"] if type(function) is FunctionType and function.__code__ is _CODE else function


def bare_ids(ids: set[int]) -> set[int]:
    """Identities of functions, with those of shared wrappers replaced by their originals'."""
    known = _originals.keys() & ids
    return ids - known | {id(_originals[entry]) for entry in known} if known else ids


def after_fork() -> None:
    """In the child only the thread that forked lives."""
    lock._at_fork_reinit()  # type: ignore[attr-defined]  # as the standard library does with its own locks
    for place in list(_places.values()):
        place.users = {thread: count for thread, count in place.users.items() if thread == threading.get_ident()}
        if not place.users:
            _restore(place)


def _wrap(scope: dict[str, Any], name: str, users: dict[int, int]) -> _Place:
    before = bare(scope.get(name, _ABSENT))  # a module that was imported beside a trace may have a wrapper for its own
    function = getattr(builtins, name) if before is _ABSENT else before
    wrapper = _wrapper_of(function)
    scope[name] = wrapper
    _originals[id(wrapper)] = function
    return _Place(scope=scope, name=name, before=before, wrapper=wrapper, users=users)


def _restore(place: _Place) -> None:
    del _places[id(place.scope), place.name]
    _forget(place)
    if place.scope.get(place.name) is not place.wrapper:
        return
    if place.before is _ABSENT:
        del place.scope[place.name]
    else:
        place.scope[place.name] = place.before


def _forget(place: _Place) -> None:
    """Its wrapper is out of place."""
    if type(_originals.get(id(place.wrapper))) is not BuiltinFunctionType:
        _originals.pop(id(place.wrapper), None)


def _wrapper_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Builtins have one wrapper each, because every trace wraps dozens of them."""
    if type(function) is not BuiltinFunctionType:
        return _shared_wrapper(function)
    if id(function) not in _of_builtins:
        _of_builtins[id(function)] = _shared_wrapper(function)
    return _of_builtins[id(function)]


def _shared_wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
    for_proxies = symbolic_trace._create_wrapped_func(function)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        # Another thread's compile sees the function as if nothing were traced.
        return function(*args, **kwargs) if is_dynamo_compiling() else for_proxies(*args, **kwargs)

    setattr(wrapped, _MARK, True)
    return wrapped


_CODE = _shared_wrapper(len).__code__  # of every shared wrapper, and of nothing else
