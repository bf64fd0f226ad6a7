"""Exceptions that nothing in the program handled, where they have a place in the failure catalogue. None is swallowed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from diagnostics import patch
from diagnostics.catalogue import match
from diagnostics.records import Log, Observation
from diagnostics.who import thread_name, traceback_lines


class ExceptionsProbe:
    """Listens to the hooks that Python calls for unhandled exceptions of threads and of the main program."""

    def __init__(self, log: Log) -> None:
        self._log = log

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Observe inside the block."""
        with (
            patch.THREAD_EXCEPTION.subscribed(self._in_thread, self._log.not_observed),
            patch.PROGRAM_EXCEPTION.subscribed(self._in_program, self._log.not_observed),
        ):
            yield

    def _in_thread(self, arguments: tuple[Any, ...], _keywords: dict[str, Any]) -> None:
        hook = arguments[0]
        thread = hook.thread.name if hook.thread is not None else thread_name()
        self._note(hook.exc_value, hook.exc_traceback, thread)

    def _in_program(self, arguments: tuple[Any, ...], _keywords: dict[str, Any]) -> None:
        _, error, trace = arguments
        self._note(error, trace, thread_name())

    def _note(self, error: BaseException | None, trace: TracebackType | None, thread: str) -> None:
        if error is None or match(str(error)) is None:
            return
        self._log.add(
            Observation(
                kind="exception",
                name=type(error).__name__,
                threads=(thread,),
                where=traceback_lines(trace),
                time_seconds=time.time(),
                fields={"message": str(error)[:500], "seen": "unhandled"},
            )
        )
