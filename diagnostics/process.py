"""The probes inside a process of the observed program: attached when torch is imported, taken off when the process ends.

Every process below fxprobe runs `start` (see `diagnostics/inject`): children, multiprocessing and torchrun workers, forks.
Python's exit handlers run in reverse, and this module's is registered before the program's, so that it is the last.

Limits: a process that was started with `-I` or `-E`, or without its parent's PYTHONPATH, is not observed, and fxprobe says
so when it notices. After `os._exit` or a signal, the last look at what is left behind is missing. Standard library only.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

from diagnostics import apart
from diagnostics.imports import when_imported
from diagnostics.journal import Journal
from diagnostics.records import Log

_watch: _Watch | None = None


def start(directory: str) -> None:
    """Watch this process, once, and write what is seen into `directory`."""
    global _watch
    if _watch is None:
        _watch = _Watch(directory)
        _watch.begin()


class _Watch:
    """The probes of this process and their journal."""

    def __init__(self, directory: str) -> None:
        self._journal = Journal(directory)
        self._log = Log(sink=self._journal.seen)
        self._probes = contextlib.ExitStack()
        self._version: str | None = None
        self._note_unhandled: Callable[[Log, BaseException, str], None] = lambda *_arguments: None
        self._tell_tracer: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Arrange for everything that follows."""
        atexit.register(self._end)
        os.register_at_fork(after_in_child=self._forked)
        when_imported("torch", self._torch_imported)
        when_imported("multiprocessing.util", self._multiprocessing_imported)

    def _torch_imported(self) -> None:
        import torch  # noqa: PLC0415 - the program has just done so

        self._version = torch.__version__
        self._journal.torch(self._version)
        try:
            with apart.importing():
                from diagnostics.observe import attach  # noqa: PLC0415 - needs torch
                from diagnostics.probes.exceptions import note_unhandled  # noqa: PLC0415 - needs torch
                from diagnostics.probes.tracer import forked  # noqa: PLC0415 - needs torch

            self._note_unhandled, self._tell_tracer = note_unhandled, forked
            attach(self._log, self._probes)
        except Exception as error:  # noqa: BLE001 - a defect of ours must not become the program's
            self._log.not_observed(f"the probes could not be attached: {type(error).__name__}: {error}")

    def _multiprocessing_imported(self) -> None:
        # A forked worker ends by os._exit after multiprocessing's own finalizers, and starts by forgetting the inherited ones.
        util: Any = sys.modules["multiprocessing.util"]
        util.register_after_fork(self, lambda watch: util.Finalize(None, watch._end, exitpriority=-1_000_000))

    def _forked(self) -> None:
        self._journal.restart()
        self._log.restart()
        if self._version is not None:
            self._journal.torch(self._version)
        self._tell_tracer()

    def _end(self) -> None:
        error = getattr(sys, "last_value", None)
        if error is not None:
            self._note_unhandled(self._log, error, "MainThread")
        self._probes.close()
        self._log.flush()
        self._journal.end()
