"""Hear of each start of chosen functions inside compiled calls, in every thread, while other code runs at its own speed.

Dynamo runs a compiled frame as another code object. So wherever it is switched on, a start of the function's own code is a
call that runs uncompiled; where it is off (`torch.compiler.disable`, a plain call) the start is not told.

From Python 3.12 `sys.monitoring` watches single code objects. Python 3.11 has nothing like it: once something is watched, a
profile function is set for the length of each compiled call, which then costs microseconds. A program with a profiler of its
own keeps it; what is not told because of it is reported. Nothing is set before the first function is watched.
"""

from __future__ import annotations

import abc
import contextlib
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from torch._C._dynamo import eval_frame as switch

from diagnostics import patch

Started = Callable[[CodeType], None]
_TOOL_IDS = (4, 3)  # of sys.monitoring; the others belong to debuggers, coverage, profilers and optimizers
_WRAPPER = ("compile_wrapper", "eval_frame.py")


class CodeStarts(abc.ABC):
    """Calls `started` with the code object, in the thread that starts it, while Dynamo is off in this thread."""

    def __init__(self, started: Started, report: patch.Report) -> None:
        self._started, self._report = started, report
        self._watched: dict[int, CodeType] = {}  # by id: equal code objects of two functions are two
        self._lock = threading.Lock()

    def watch(self, code: CodeType) -> bool:
        """Tell of each start of `code` from now on. False if that is impossible, which has been reported."""
        with self._lock:
            if not self._watched and not self._begin():
                return False
            self._watched[id(code)] = code
            self._add(code)
            return True

    def close(self) -> None:
        """Tell nothing any more, and leave Python as it was."""
        with self._lock:
            if self._watched:
                self._end()
            self._watched = {}

    def _tell(self, code: CodeType) -> None:
        """Called with Dynamo switched on; nothing of ours may run so."""
        before = switch.set_eval_frame(None)
        try:
            if before is not None:
                self._started(code)
        except Exception as error:  # noqa: BLE001 - a probe's defect must not become the program's
            self._report(f"an uncompiled call was not counted: {type(error).__name__}: {error}")
        finally:
            switch.set_eval_frame(before)

    @abc.abstractmethod
    def _begin(self) -> bool:
        """Before the first function."""

    @abc.abstractmethod
    def _add(self, code: CodeType) -> None:
        """Watch one more."""

    @abc.abstractmethod
    def _end(self) -> None:
        """Undo `_begin` and `_add`."""


class _Monitored(CodeStarts):
    """From Python 3.12."""

    def _begin(self) -> bool:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]  # the type checker knows 3.11
        free = [number for number in _TOOL_IDS if monitoring.get_tool(number) is None]
        if not free:
            self._report("other tools use sys.monitoring: calls that run uncompiled are not counted")
            return False
        self._monitoring, self._tool = monitoring, free[0]
        monitoring.use_tool_id(self._tool, "fxprobe")
        monitoring.register_callback(self._tool, monitoring.events.PY_START, self._hear)
        return True

    def _hear(self, code: CodeType, _offset: int) -> None:
        self._tell(code)

    def _add(self, code: CodeType) -> None:
        self._monitoring.set_local_events(self._tool, code, self._monitoring.events.PY_START)

    def _end(self) -> None:
        for code in self._watched.values():
            self._monitoring.set_local_events(self._tool, code, 0)
        self._monitoring.register_callback(self._tool, self._monitoring.events.PY_START, None)
        self._monitoring.free_tool_id(self._tool)


class _Profiled(CodeStarts):
    """On Python 3.11. A call is told while `torch.compile`'s wrapper is on the stack."""

    def _begin(self) -> bool:
        self._hooks = contextlib.ExitStack()
        try:
            self._hooks.enter_context(patch.STANCE_CALLBACK.subscribed(self._called, self._report))
        except patch.NotObservable as reason:
            self._report(f"calls that run uncompiled are not counted: {reason}")
            return False
        return True

    def _called(self, _arguments: tuple[Any, ...], _keywords: dict[str, Any]) -> None:
        self._listen()

    def _add(self, code: CodeType) -> None:  # noqa: ARG002 - all are looked up at each start
        self._listen()  # a compiled call may be in progress: the one that made `code` interesting

    def _listen(self) -> None:
        outermost = _outermost_wrapper()
        if outermost is None or getattr(sys.getprofile(), "__func__", None) is _Profiled._profile:
            return
        if sys.getprofile() is not None:
            self._report("calls that run uncompiled are not counted while a profiler of the program runs (Python 3.11)")
            return
        self._outermost.frame = outermost
        sys.setprofile(self._profile)

    _outermost = threading.local()

    def _profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            if id(frame.f_code) in self._watched:
                self._tell(frame.f_code)
        elif event == "return" and frame is self._outermost.frame:
            self._outermost.frame = None
            sys.setprofile(None)

    def _end(self) -> None:
        self._hooks.close()


def code_starts(started: Started, report: patch.Report) -> CodeStarts:
    """What this Python offers."""
    return (_Monitored if sys.version_info >= (3, 12) else _Profiled)(started, report)


def _outermost_wrapper() -> FrameType | None:
    found: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _WRAPPER[0] and frame.f_code.co_filename.endswith(_WRAPPER[1]):
            found = frame
        frame = frame.f_back
    return found


for _function in (_Monitored._hear, _Profiled._profile, CodeStarts._tell):
    # Python calls them in the middle of compiled calls: Dynamo must not look at them, and goes on with what they do not call.
    switch.set_code_exec_strategy(
        _function.__code__, switch._FrameExecStrategy(switch._FrameAction.SKIP, switch._FrameAction.DEFAULT)
    )
