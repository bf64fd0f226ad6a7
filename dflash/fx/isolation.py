"""Tracing state of its own for each thread: `dflash.fx.isolate()`, or `with dflash.fx.isolated(): ...`.

torch.fx traces as if a process had one thread: a flag, a patcher, wrappers on `nn.Module` and on functions such as `math.sqrt`
are the process's, and threads that trace, compile or only call modules hurt each other (the failures F1 to F6, F11, F14 of
`python -m diagnostics.selftest`). With isolation each thread has its own, and threads may trace and compile at once. No lock is
held while a thread traces. Compiled functions made before it was installed are covered.

| what | how | file |
|---|---|---|
| flags, patcher, tracer, modes behind module globals | thread-local values, functions of torch compiled anew | per_thread.py |
| `nn.Module.__call__`, `__getattr__` | a dispatcher while any thread traces, nothing otherwise | dispatch.py |
| `math.*`, functions of `torch.fx.wrap` | one shared wrapper while any thread traces | wrapped.py |
| backward of a thread that traces or holds the compile lock | runs in this thread, not in the device's | backward.py |
| backend flags that exports switch off | counted: the last export to end restores them | switches.py |

A part that a release of torch isolates itself is left alone. Where torch is not as expected, where a trace or compile runs, or
where an earlier overlap has left its state behind, nothing is installed and the error says what to do.

What stays process-wide is what `dflash.fx.limits()` lists; what of it is seen to do harm is warned of once (overlaps.py).
In a sub-interpreter isolation is refused. The cost: `python -m dflash.fx.cost`; figures are in dflash/README.md.
Installing takes about a quarter of a second, and about a second the first time in a process, after Dynamo is imported.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import torch.export._trace as export_trace
import torch.fx._symbolic_trace as symbolic_trace
from torch._dynamo import convert_frame  # Dynamo remembers nn.Module's methods as it finds them when it is imported
from torch.export import exported_program

from dflash.fx import seams
from dflash.fx.backward import Backward
from dflash.fx.code_swap import UnknownInternals
from dflash.fx.interpreters import IsolationError, refuse_sub_interpreter
from dflash.fx.overlaps import Overlaps
from dflash.fx.patches import Patches
from dflash.fx.per_thread import PerThread
from dflash.fx.switches import Switches

__all__ = ["IsolationError", "is_isolated", "isolate", "isolated", "refuse_unless_quiet"]

_EXPORTS = (export_trace.__file__, exported_program.__file__)
_LONG_SECONDS = 1.0  # a switch interval longer than an installation; a thread that gets its turn all the same keeps it so long


class _Installed:
    """Everything that is changed, and how often it was asked for."""

    def __init__(self) -> None:
        self.parts: tuple[Any, ...] = (PerThread(), Patches(), Backward(), Switches(), Overlaps())
        self.users = 0
        self.for_life = False

    def install(self) -> None:
        """Install all parts or, after an error, none."""
        with contextlib.ExitStack() as undo:
            for part in self.parts:
                undo.callback(part.remove)
                part.install()
            busy = _busy()
            if busy:
                raise IsolationError(f"{busy}: isolate before any thread traces or compiles")
            undo.pop_all()

    def remove(self) -> None:
        """Remove all parts."""
        for part in reversed(self.parts):
            part.remove()


_lock = threading.RLock()
_installed: _Installed | None = None
_fork_is_watched = False


def isolate() -> None:
    """Isolate the threads of this process for the rest of its life. Calling it again changes nothing.

    Raises IsolationError, having changed nothing: while a trace or compile runs, where traces that overlapped have left their
    state behind, in a sub-interpreter, and on a torch whose insides are unknown.
    """
    with _lock:
        _enter().for_life = True


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Isolate inside the block. Nested and overlapping blocks share one isolation; the last to end takes it off.

    Raises IsolationError as `isolate` does, and at the end when a thread traces or compiles; the isolation stays on then, until
    the next block ends.
    """
    with _lock:
        _enter().users += 1
    try:
        yield
    finally:
        with _lock:
            _leave()


def is_isolated() -> bool:
    """Whether isolation is on."""
    return _installed is not None


def _enter() -> _Installed:
    global _installed
    if _installed is None:
        refuse_unless_quiet()
        try:
            new = _Installed()  # imports, and so may take long and let other threads run
            with _alone():
                refuse_unless_quiet()
                new.install()
        except UnknownInternals as error:
            raise IsolationError(f"{error} (torch {torch.__version__}): thread isolation does not know this torch") from error
        _installed = new
        _watch_forks()
    return _installed


def _leave() -> None:
    global _installed
    assert _installed is not None
    _installed.users -= 1
    if _installed.users or _installed.for_life:
        return
    with _alone():
        busy = _busy()
        if busy:
            raise IsolationError(f"{busy}: the isolation stays on. Let threads end before the block of isolated() does")
        _installed.remove()
    _installed = None


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """No other thread gets its turn by force inside the block, and none compiles; `install` looks once more when it is done."""
    compile_lock = convert_frame.compile_lock
    if compile_lock._is_owned() or not compile_lock.acquire(blocking=False):  # type: ignore[attr-defined]
        raise IsolationError("a thread compiles: isolate before any thread traces or compiles, and leave it when none does")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_LONG_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        compile_lock.release()


def refuse_unless_quiet() -> None:
    """Raises IsolationError while a thread traces or exports, and where overlapping traces have left something behind."""
    refuse_sub_interpreter()
    busy = _busy()
    if busy:
        raise IsolationError(f"{busy}: isolate before any thread traces or compiles")
    state = seams.tracing_state()
    missing = [sentence for sentence in seams.unknown(state) if "flex_attention" not in sentence]
    if missing:
        raise IsolationError(f"{missing[0]}; nothing was changed")
    left = seams.leaks(state)
    if left:
        raise IsolationError(f"{left[0]}. Call dflash.fx.repair.repair() first; nothing was changed")


def _busy() -> str | None:
    """Which thread is inside a trace or an export, or None. Code of a probe has the name of what it observes."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, top in sys._current_frames().items():
        frame: FrameType | None = top
        while frame is not None:
            code = frame.f_code
            if code.co_filename == symbolic_trace.__file__ and code.co_qualname == "Tracer.trace":
                return f"thread {names.get(ident, ident)} traces"
            if code.co_filename in _EXPORTS and code.co_qualname != "<module>":
                return f"thread {names.get(ident, ident)} exports"
            frame = frame.f_back
    return None


def _watch_forks() -> None:
    global _fork_is_watched
    if not _fork_is_watched and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork)
        _fork_is_watched = True


def _after_fork() -> None:
    """In the child only the thread that forked lives: what others had patched goes, and locks that they held are free."""
    global _lock
    _lock = threading.RLock()
    if _installed is not None:
        for part in _installed.parts:
            part.after_fork()
