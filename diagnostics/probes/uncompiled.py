"""Calls that should have run compiled and did not, counted one by one, with the reason.

Dynamo marks a code object when it gives it up: after the recompile limit its compiled versions still run, and all other calls
run uncompiled; after a compile that failed under `suppress_errors`, or up to torch 2.13 was asked for under a TorchDispatchMode,
none runs compiled any more. From then on nothing in Python hears of it, so the starts of these code objects are counted
(`diagnostics.code_starts`). From torch 2.14 on Dynamo looks at each call under a TorchDispatchMode anew, and a stance is asked
for in each compiled call: these are counted there. Until something of this kind happens, nothing but Dynamo's own look at a new
frame is observed, which no call pays for that finds its compiled version.

Not counted: functions that Dynamo never compiles by its own lists, and `torch.compiler.disable`, on purpose; a function given
up because of a graph break from which it cannot resume is told once, without a count, because what it calls may be compiled;
functions given up before the probe was attached; functions that were never compiled, under the stance `eager_on_recompile`.
`error_on_nested_fx_trace` is the flag probe's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from diagnostics import patch
from diagnostics.code_starts import code_starts
from diagnostics.probes.compiles import function_and_place, hit_the_limit
from diagnostics.probes.probe import Probe
from diagnostics.records import Log, Observation
from diagnostics.who import program_lines, thread_name

UNCOMPILED_STANCES = ("force_eager", "eager_on_recompile")
_NO_STANCE = ""


@dataclass(frozen=True)
class _Reason:
    """Why calls of one function run uncompiled; `setter` is the thread that set a stance."""

    function: str
    sentence: str
    why: str  # limit, skipped, mode or stance
    setter: str = _NO_STANCE


@dataclass
class _Count:
    """Calls so far, those written down, and what is written."""

    seen: Observation
    calls: int = 0
    told: int = 0


class UncompiledProbe(Probe):
    """Writes down `fallback`: one for each function, reason and thread, its count the calls that ran uncompiled."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self._lock = threading.RLock()
        self._reasons: dict[int, _Reason] = {}  # by the id of a code object that code_starts keeps alive
        self._counts: dict[tuple[_Reason, str], _Count] = {}
        self._compiled: weakref.WeakValueDictionary[int, CodeType] = weakref.WeakValueDictionary()
        self._in_progress = threading.local()  # .failed: what the compile in this thread's look at a frame raised
        self._setter, self._hears_stance = _NO_STANCE, False
        self._starts = code_starts(self._started, log.not_observed)
        self._hooks = contextlib.ExitStack()

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        report = self._log.not_observed
        with self._hooks:
            self._hooks.callback(self._tell_all)
            self._hooks.callback(self._starts.close)
            self._hooks.enter_context(patch.FRAME.subscribed(self._looks_at, report))
            self._hooks.enter_context(patch.COMPILE.subscribed(self._compiles, report))
            self._hooks.enter_context(patch.STANCE.subscribed(self._sets_stance, report))
            stance = getattr(getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None), "stance", None)
            if stance in UNCOMPILED_STANCES:
                self._obey(str(stance), "somebody before the probes")
            yield

    def _looks_at(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> patch.Finish:
        code: CodeType = (arguments[1] if len(arguments) > 1 else keywords["frame"]).f_code
        outer = getattr(self._in_progress, "failed", None)
        self._in_progress.failed = None

        def finish(result: Any, error: BaseException | None) -> None:
            failed, self._in_progress.failed = self._in_progress.failed, outer
            if error is not None:
                return  # the program gets it
            if result.guarded_code is not None:
                self._compiled[id(code)] = code
            elif failed is not None:
                self._given_up(code, *failed)
            elif _is_refused_for_a_mode(code, result):
                if result.apply_to_code:  # for the life of the process, up to torch 2.13
                    self._watch(code, _Reason(code.co_qualname, "was called under a TorchDispatchMode once", "skipped"))
                else:
                    self._count(_Reason(code.co_qualname, "was called under a TorchDispatchMode", "mode"))

        return finish

    def _compiles(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> patch.Finish:
        name, _ = function_and_place(arguments, keywords, program_lines())

        def finish(_result: Any, error: BaseException | None) -> None:
            self._in_progress.failed = None if error is None else (name, error)

        return finish

    def _given_up(self, code: CodeType, name: str, error: BaseException) -> None:
        if hit_the_limit(error):
            self._watch(code, _Reason(name, "reached the recompile limit", "limit"))
        elif _is_graph_break(error):
            sentence = f"{name} cannot be compiled: {str(error).strip().splitlines()[0]}"
            self._add(sentence, why="graph break", function=name)
        else:
            kind = type(getattr(error, "inner_exception", error)).__name__
            self._watch(code, _Reason(name, f"failed to compile ({kind}), which suppress_errors hides", "skipped"))

    def _watch(self, code: CodeType, reason: _Reason) -> None:
        with self._lock:
            self._reasons[id(code)] = reason
        if not self._starts.watch(code):
            self._count(reason)  # this call at least

    def _started(self, code: CodeType) -> None:
        reason = self._reasons.get(id(code))
        if reason is not None:
            self._count(reason)

    def _sets_stance(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        stance = keywords.get("stance", arguments[1] if len(arguments) > 1 else "default")
        if stance in UNCOMPILED_STANCES:
            setter = thread_name()
            self._log.add(
                Observation(kind="stance", name=str(stance), threads=(setter,), where=program_lines(), time_seconds=time.time())
            )
            self._obey(str(stance), setter)

    def _obey(self, stance: str, setter: str) -> None:
        with self._lock:
            self._setter = setter
            if not self._hears_stance:
                self._hears_stance = True
                self._hooks.enter_context(patch.STANCE_CALLBACK.subscribed(self._asks_stance, self._log.not_observed))
        if stance == "eager_on_recompile":
            for code in list(self._compiled.values()):
                if id(code) not in self._reasons:
                    self._watch(code, _Reason(code.co_qualname, _obeyed(stance, setter), "stance", setter))

    def _asks_stance(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> patch.Finish:
        callback = arguments[0] if arguments else keywords["callback"]

        def finish(result: Any, _error: BaseException | None) -> None:
            function = _called_function()
            if result is None and callable(callback) and function:
                self._count(_Reason(function, _obeyed("force_eager", self._setter), "stance", self._setter))

        return finish

    def _count(self, reason: _Reason) -> None:
        with self._lock:
            count = self._counts.get((reason, thread_name()))
            if count is None:
                count = self._counts[reason, thread_name()] = _Count(self._observation(reason))
            count.calls += 1
            if count.calls & (count.calls - 1) == 0:  # writing down takes longer than counting
                self._tell(count)

    def _tell(self, count: _Count) -> None:
        if count.calls > count.told:
            self._log.add(dataclasses.replace(count.seen, count=count.calls - count.told))
            count.told = count.calls

    def _tell_all(self) -> None:
        with self._lock:
            for count in self._counts.values():
                self._tell(count)

    def _observation(self, reason: _Reason) -> Observation:
        fields = {"why": reason.why, "setter": reason.setter, "function": reason.function}
        return Observation(
            kind="fallback",
            name=f"{reason.function} {reason.sentence}",
            threads=(thread_name(),),
            where=program_lines(),
            time_seconds=time.time(),
            fields=fields,
        )

    def _add(self, sentence: str, **fields: str) -> None:
        seen = Observation(
            kind="fallback",
            name=sentence,
            threads=(thread_name(),),
            where=program_lines(),
            time_seconds=time.time(),
            fields=fields,
        )
        self._log.add(seen)


def _obeyed(stance: str, setter: str) -> str:
    return f"obeyed the stance {stance} of {setter}"


def _is_graph_break(error: BaseException) -> bool:
    exceptions = sys.modules["torch._dynamo.exc"]
    return isinstance(error, (exceptions.Unsupported, exceptions.UserError))


def _is_refused_for_a_mode(code: CodeType, result: Any) -> bool:
    if hasattr(result, "skip_reason"):
        return "dispatch mode" in (result.skip_reason or "")
    convert_frame = sys.modules["torch._dynamo.convert_frame"]
    by_stack = getattr(convert_frame.config, "inline_torch_dispatch_torch_compile", False)
    in_mode = "any_torch_dispatch_mode_on_stack" if by_stack else "is_in_any_mode_without_ignore_compile_internals"
    asked = getattr(convert_frame, in_mode, lambda: False)
    return asked() and not convert_frame.config.disable and not convert_frame.trace_rules.check(code)


def _called_function() -> str:
    """What the innermost call of a compiled function on this thread's stack is going to run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        frame = frame.f_back
    function = frame.f_locals.get("fn") if frame is not None else None
    owner = getattr(function, "__self__", None)
    return type(owner).__qualname__ if owner is not None else str(getattr(function, "__qualname__", ""))
