"""Exceptions that nothing in the program handled, where they have a place in the failure catalogue. None is swallowed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from diagnostics import patch
from diagnostics.catalogue import match
from diagnostics.probes.probe import Probe
from diagnostics.records import Log, Observation
from diagnostics.who import thread_name, traceback_lines


class ExceptionsProbe(Probe):
    """Listens to the hook that Python calls for unhandled exceptions of threads.

    A program with a hook of its own handles them itself: that is noted, and no reason to distrust the report.
    """

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        with patch.THREAD_EXCEPTION.subscribed(self._in_thread, self._log.note):
            yield

    def _in_thread(self, arguments: tuple[Any, ...], _keywords: dict[str, Any]) -> None:
        hook = arguments[0]
        if hook.exc_value is not None:
            note_unhandled(self._log, hook.exc_value, hook.thread.name if hook.thread is not None else thread_name())


def note_unhandled(log: Log, error: BaseException, thread: str) -> None:
    """Write down an exception that `thread` ended with, if the catalogue knows it."""
    if match(str(error)) is None:
        return
    log.add(
        Observation(
            kind="exception",
            name=type(error).__name__,
            threads=(thread,),
            where=traceback_lines(error.__traceback__),
            time_seconds=time.time(),
            fields={"message": str(error)[:500], "seen": "unhandled"},
        )
    )
