"""Who meets a tracing flag, and what is left behind when all traces have ended.

Up to torch 2.13 the flag is one for the process: a compiled call in an innocent thread meets the trace of another. From 2.14
it is per thread, and a call can only meet its own. The shared state is read whenever the last trace in progress ends, and when
the probe comes off.

Compiled calls are listened to while a trace is in progress or a flag is left set; at other times none can meet a flag, and
torch's own code answers, so that they cost nothing more. A probe that is attached while a trace is in progress, of which it
does not hear the end, listens until one call in ten thousand finds nothing left of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from dflash.fx import seams
from diagnostics import patch
from diagnostics.probes.probe import Probe
from diagnostics.probes.tracer import Trace, Traces
from diagnostics.records import Log, Observation
from diagnostics.who import program_lines, thread_name


class FlagProbe(Probe):
    """Writes down compiled calls that meet a tracing flag, and leaks at quiet moments."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self._traces = Traces(log.not_observed, on_start=self._started, on_end=self._ended)
        self._since_quiet: dict[str, str] = {}  # threads that traced since the last quiet moment, and from which line
        self._known: set[str] = set()
        self._left_set: set[int] = set()  # threads that found their flag or patches when no trace was known; 0: the process's
        self._is_over = False

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        self._known = set(seams.leaks(seams.tracing_state()))
        for sentence in self._known:
            self._log.not_observed(f"before the probes were attached: {sentence}")
        with patch.FLAG_CHECK.subscribed_to_answers(self._asked, self._log.not_observed), self._traces.watched():
            self._traces.when_quiet(self._look)
            yield
            self._traces.when_quiet(self._look)
            with self._traces.standing_still():
                self._is_over = True

    def _started(self, trace: Trace, _others: tuple[Trace, ...]) -> None:
        self._listen(on=True)
        self._since_quiet[trace.thread] = trace.where[-1] if trace.where else "a place outside the program"

    def _ended(self, _trace: Trace, _error: BaseException | None, quiet: bool) -> None:
        if quiet:
            self._look()
            self._since_quiet.clear()

    def _listen(self, *, on: bool) -> None:
        if not self._is_over:  # a trace that began while the probe came off
            patch.FLAG_CHECK.listen(on=on)

    def _look(self) -> None:
        # Another thread may be compiling: that is no leak, and no moment to judge the compiling flag.
        state = dataclasses.replace(seams.tracing_state(), compiling=None)
        whose = threading.get_ident() if state.flag_scope == "thread" else 0
        is_clear = state.flag is False and not state.patched_methods and not state.patcher
        (self._left_set.discard if is_clear else self._left_set.add)(whose)
        self._listen(on=bool(self._left_set))
        for sentence in seams.leaks(state):
            if sentence not in self._known:
                self._known.add(sentence)
                threads, where = tuple(self._since_quiet), tuple(self._since_quiet.values())
                self._log.add(Observation(kind="leak", name=sentence, threads=threads, where=where, time_seconds=time.time()))

    def _asked(self, _arguments: tuple[Any, ...], _keywords: dict[str, Any]) -> patch.Finish:
        return self._answered

    def _answered(self, answer: Any, _error: BaseException | None) -> None:
        if answer:
            if _asked_by_compiled_call():
                self._met()
            return
        self._traces.when_quiet(self._look)  # one call in ten thousand of those listened to

    def _met(self) -> None:
        me = threading.get_ident()
        active = self._traces.active()
        own = any(trace.ident == me for trace in active)
        owners = [trace for trace in active if trace.ident != me]
        owner = thread_name() if own else owners[-1].thread if owners else "none in progress"
        fields = {
            "effect": _effect(),
            "tracer": owners[-1].name if owners and not own else "",
            "where_first": list(owners[-1].where) if owners and not own else [],
        }
        self._log.add(
            Observation(
                kind="foreign_flag",
                name="compiled call",
                threads=(owner, thread_name()),
                where=program_lines(),
                time_seconds=time.time(),
                fields=fields,
            )
        )


def _effect() -> str:
    """What a compiled call does when it meets the flag, by the configuration that this thread sees."""
    config = sys.modules["torch._dynamo.config"]  # imported: a compiled function exists
    if getattr(config, "force_compile_during_fx_trace", False):
        return "compiled"
    return "raises" if getattr(config, "error_on_nested_fx_trace", True) else "runs uncompiled"


def _asked_by_compiled_call() -> bool:
    """Dynamo asks for a compiled call; torch.export asks the same for its own purposes."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "is_fx_symbolic_tracing":
        frame = frame.f_back
    caller = frame.f_back if frame is not None else None
    return caller is not None and caller.f_code.co_filename.endswith("eval_frame.py")
