"""Who traces: every call of `Tracer.trace`, and which of them overlap.

`symbolic_trace`, `make_fx`, AOTAutograd, export and uncompiled flex_attention all pass through `Tracer.trace`. `Traces` is
the table of those in progress; the probes that need it keep their own, so that they come off in any order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from diagnostics import patch
from diagnostics.catalogue import match
from diagnostics.probes.probe import Probe
from diagnostics.records import Log, Observation
from diagnostics.who import inside_dynamo, program_lines, thread_name


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """One call of `Tracer.trace` in progress."""

    tracer: Any
    thread: str
    ident: int
    where: tuple[str, ...]
    time_seconds: float = field(default_factory=time.time)
    started_seconds: float = field(default_factory=time.perf_counter)

    @property
    def name(self) -> str:
        """The tracer's class."""
        return type(self.tracer).__qualname__


OnStart = Callable[[Trace, tuple[Trace, ...]], None]  # the trace that starts, those in progress
OnEnd = Callable[[Trace, BaseException | None, bool], None]  # the trace that ended, its exception, whether none is left


class Traces:
    """The traces in progress. Its callbacks run under its lock: while one runs, no other thread's trace starts or ends."""

    def __init__(self, report: patch.Report, *, on_start: OnStart | None = None, on_end: OnEnd | None = None) -> None:
        self._report, self._on_start, self._on_end = report, on_start, on_end
        self._lock = threading.RLock()
        self._active: tuple[Trace, ...] = ()
        _tables.add(self)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Keep the table inside the block. Raises NotObservable."""
        with patch.TRACE.subscribed(self._start, self._report):
            yield

    def active(self) -> tuple[Trace, ...]:
        """Those in progress, the earliest first."""
        return self._active

    def when_quiet(self, act: Callable[[], None]) -> None:
        """Call `act` unless a trace is in progress; none begins meanwhile."""
        with self.standing_still():
            if not self._active:
                act()

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """No other thread's trace starts or ends inside the block."""
        with self._lock:
            yield

    def forked(self) -> None:
        """In a forked child: the other threads are gone, and one of them may have held the lock."""
        self._lock = threading.RLock()
        self._active = tuple(trace for trace in self._active if trace.ident == threading.get_ident())

    def _start(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> patch.Finish:
        tracer = arguments[0] if arguments else keywords["self"]
        trace = Trace(tracer=tracer, thread=thread_name(), ident=threading.get_ident(), where=program_lines())
        with self._lock:
            others, self._active = self._active, (*self._active, trace)
            if self._on_start is not None:
                self._on_start(trace, others)

        def finish(_result: Any, error: BaseException | None) -> None:
            with self._lock:
                self._active = tuple(other for other in self._active if other is not trace)
                if self._on_end is not None:
                    self._on_end(trace, error, not self._active)

        return finish


_tables: weakref.WeakSet[Traces] = weakref.WeakSet()


def forked() -> None:
    """Tell all tables that this process is a forked child."""
    for table in _tables:
        table.forked()


class TracerProbe(Probe):
    """Writes down every trace, every overlap of two threads' traces, and what they raise."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self._traces = Traces(log.not_observed, on_start=self._started, on_end=self._ended)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        with self._traces.watched():
            yield

    def _started(self, trace: Trace, others: tuple[Trace, ...]) -> None:
        for other in others:
            if other.ident != trace.ident:
                self._log.add(
                    Observation(
                        kind="overlap",
                        name=f"{other.name} and {trace.name}",
                        threads=(other.thread, trace.thread),
                        where=trace.where,
                        time_seconds=trace.time_seconds,
                        fields={"where_first": list(other.where)},
                    )
                )

    def _ended(self, trace: Trace, error: BaseException | None, _quiet: bool) -> None:
        seen = Observation(
            kind="trace",
            name=trace.name,
            threads=(trace.thread,),
            where=trace.where,
            time_seconds=trace.time_seconds,
            duration_seconds=time.perf_counter() - trace.started_seconds,
            fields={"inside_dynamo": inside_dynamo()},
        )
        self._log.add(seen)
        if error is not None and match(str(error)) is not None:
            fields = {"message": str(error)[:500], "seen": "raised by a trace"}
            self._log.add(
                dataclasses.replace(seen, kind="exception", name=type(error).__name__, duration_seconds=0.0, fields=fields)
            )
