"""Switches that an export throws for the whole process (F15): the first to enter throws it, the last to leave puts it back.

An export switches cuDNN, oneDNN and NNPACK off, replaces `max`, `min` and `math.pow`, and puts back what it found when it ends.
Exports that overlap find them changed already, and the last to end leaves them so for the life of the process. Here they are
counted: torch's own code runs once when the first export enters and once when the last one leaves. The same for the flags of
torch.compiler, where this torch does not let them be per thread.

Known limits: the switches are process-wide as ever, so that other threads run without these backends while any thread exports,
and what another thread sets meanwhile is undone when the last export ends.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

from dflash.fx import per_thread, wrapped
from dflash.fx.code_swap import Swapped, UnknownInternals, with_constants
from dflash.fx.overlaps import BACKENDS, backend_flags, note

_EXPORT = ("torch.export._trace", "_ignore_backend_decomps")
_BUILTINS = ("torch._export.non_strict_utils", "_override_builtin_ops")
_FLAGS = (("torch._export.utils", "_compiling_state_context"), ("torch.compiler", "_non_strict_tracing_context"))


class Switch(Swapped):
    """One context manager of torch, made of a generator function without arguments."""

    def __init__(self, module_name: str, name: str) -> None:
        """Raises UnknownInternals; changes nothing."""
        manager = getattr(importlib.import_module(module_name), name, None)
        function = getattr(manager, "__wrapped__", None)
        if type(function) is not FunctionType or function.__closure__ or function.__code__.co_argcount:
            raise UnknownInternals(f"{module_name}.{name} is not a context manager without arguments")
        self._is_of_backends = (module_name, name) == _EXPORT
        self._is_of_builtins = (module_name, name) == _BUILTINS
        super().__init__(function)
        self._original: Callable[[], AbstractContextManager[None]] = contextlib.contextmanager(
            FunctionType(self._code, function.__globals__, function.__name__)
        )
        self._new_code = with_constants(_switch.__code__, {"shared": self._shared})
        self._lock = threading.Lock()  # held for a few flags of torch, never while an export runs
        self._users: dict[int, int] = {}  # entries by thread
        self._thrown: AbstractContextManager[None] | None = None
        self._backends: tuple[bool, ...] = ()  # as the switch has set them

    def after_fork(self) -> None:
        """In the child only the thread that forked lives."""
        self._lock = threading.Lock()
        self._users = {thread: count for thread, count in self._users.items() if thread == threading.get_ident()}
        self._put_back_unless_used()

    @contextlib.contextmanager
    def _shared(self) -> Iterator[None]:
        thread = threading.get_ident()
        with self._lock:
            if not self._users:
                self._thrown = self._original()
                self._thrown.__enter__()
                self._backends = backend_flags()
            self._users[thread] = self._users.get(thread, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                self._users[thread] -= 1
                if not self._users[thread]:
                    del self._users[thread]
                self._put_back_unless_used()

    def _put_back_unless_used(self) -> None:
        if self._thrown is not None and not self._users:
            if self._is_of_backends and backend_flags() != self._backends:
                note(BACKENDS, "exported")
            self._thrown.__exit__(None, None, None)
            self._thrown = None
            if self._is_of_builtins:
                wrapped.settle(vars(math), "pow")  # a trace that has ended meanwhile may have wrapped what was found


class Switches:
    """All that this torch has."""

    def __init__(self) -> None:
        """Raises UnknownInternals; changes nothing."""
        flags = [place for place in _FLAGS if per_thread.left_alone("torch.compiler") and _exists(*place)]
        self._switches = [Switch(*place) for place in (_EXPORT, _BUILTINS, *flags)]

    def install(self) -> None:
        """Install all; `remove` undoes a part of it too."""
        for switch in self._switches:
            switch.install()

    def remove(self) -> None:
        """Undo `install`."""
        for switch in self._switches:
            switch.remove()

    def after_fork(self) -> None:
        """See isolation.py."""
        for switch in self._switches:
            switch.after_fork()


def _exists(module_name: str, name: str) -> bool:
    return hasattr(importlib.import_module(module_name), name)


def _switch() -> Any:
    shared: Any = "shared"  # exchanged for a function: the code runs with the globals of torch
    with shared():
        yield
