"""Who holds Dynamo's compile lock and who waits for it - and the deadlock with autograd's device threads, before it happens.

A compile holds the lock and may call `autograd.grad` while it traces; that call waits for autograd's device thread. If the
device thread is just then running another backward whose graph compiles lazily, it waits for the lock: neither goes on (F8).
The moment is known here: a thread that Python did not start begins to wait for the lock while its holder is inside autograd.
A wait that ends was no deadlock (the holder's backward ran in its own thread, or on another device), and is written down as such.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from diagnostics import patch
from diagnostics.probes.probe import Probe
from diagnostics.records import Log, Observation
from diagnostics.who import program_lines, thread_name

_NOTICEABLE_SECONDS = 1e-3


@dataclass(frozen=True)
class _Holder:
    thread: str
    ident: int
    where: tuple[str, ...]
    started_seconds: float


class ThreadsProbe(Probe):
    """Writes down long waits for the compile lock, how long each thread held it, and a deadlock in the making."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self._holder: _Holder | None = None
        self._depth = 0  # of the holder; only the holder changes it

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        with patch.COMPILE_LOCK.subscribed(self._changes, self._log.not_observed):
            yield

    def _changes(self, arguments: tuple[Any, ...], _keywords: dict[str, Any]) -> patch.Finish | None:
        if arguments == ("acquire",):
            return self._acquire()
        self._release()
        return None

    def _acquire(self) -> patch.Finish:
        holder, me, started = self._holder, threading.get_ident(), time.perf_counter()
        doomed = holder is not None and holder.ident != me and _is_native(me) and _is_inside_autograd(holder.ident)
        if doomed and holder is not None:
            self._add("deadlock", (holder.thread, thread_name()), 0.0, where_first=list(holder.where), role="waits")

        def acquired(result: Any, _error: BaseException | None) -> None:
            if doomed and holder is not None:
                self._add("deadlock", (holder.thread, thread_name()), 0.0, where_first=list(holder.where), role="went on")
            if result is False:  # a try that failed
                return
            self._depth += 1
            if self._depth > 1:
                return
            waited = time.perf_counter() - started
            if holder is not None and waited >= _NOTICEABLE_SECONDS:
                self._add("lock", (holder.thread, thread_name()), waited, role="waited")
            self._holder = _Holder(thread_name(), me, program_lines(), time.perf_counter())

        return acquired

    def _release(self) -> None:
        holder = self._holder
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and holder is not None:
            self._holder = None
            self._add("lock", (holder.thread,), time.perf_counter() - holder.started_seconds, role="held")

    def _add(self, kind: Any, threads: tuple[str, ...], seconds: float, **fields: Any) -> None:
        self._log.add(
            Observation(
                kind=kind,
                name="compile lock",
                threads=threads,
                where=program_lines(),
                time_seconds=time.time(),
                duration_seconds=seconds,
                fields=fields,
            )
        )


def _is_native(ident: int) -> bool:
    """Python did not start this thread: one of autograd's device threads, in a program of torch."""
    return ident not in getattr(threading, "_active", {})


def _is_inside_autograd(ident: int) -> bool:
    frame: FrameType | None = sys._current_frames().get(ident)
    while frame is not None:
        if frame.f_code.co_name == "_engine_run_backward":
            return True
        frame = frame.f_back
    return False
