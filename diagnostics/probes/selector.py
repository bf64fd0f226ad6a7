"""Who asks `torch.compiler.is_compiling()` while another thread compiles, and is told yes.

From torch 2.13 any compile makes it true in all threads, before that an export does. Code that chooses by it, such as
`compiled if not is_compiling() else plain`, then takes the wrong branch in an innocent thread (F11).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from diagnostics import patch
from diagnostics.probes.probe import Probe
from diagnostics.records import Log, Observation
from diagnostics.who import program_lines, thread_name

_COMPILER_PATHS = ("/torch/_dynamo/", "/torch/export/", "/torch/_export/")


class SelectorProbe(Probe):
    """Writes down answers that are about another thread."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self._compiling: dict[int, str] = {}  # ident -> name of the threads in a compile

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        report = self._log.not_observed
        with patch.COMPILE.subscribed(self._starts, report), patch.IS_COMPILING.subscribed_to_answers(self._asked, report):
            yield

    def _starts(self, _arguments: tuple[Any, ...], _keywords: dict[str, Any]) -> patch.Finish:
        ident = threading.get_ident()
        before = self._compiling.get(ident)
        self._compiling[ident] = thread_name()

        def finish(_result: Any, _error: BaseException | None) -> None:
            if before is None:
                self._compiling.pop(ident, None)

        return finish

    def _asked(self, _arguments: tuple[Any, ...], _keywords: dict[str, Any]) -> patch.Finish:
        return self._answered

    def _answered(self, answer: Any, _error: BaseException | None) -> None:
        if not answer or _is_inside_compiler():
            return
        me = threading.get_ident()
        owners = [name for ident, name in list(self._compiling.items()) if ident != me]
        seen = Observation(
            kind="foreign_compiling",
            name="torch.compiler.is_compiling",
            threads=(owners[-1] if owners else "another thread", thread_name()),
            where=program_lines(),
            time_seconds=time.time(),
        )
        self._log.add(seen)


def _is_inside_compiler() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if any(path in frame.f_code.co_filename for path in _COMPILER_PATHS):
            return True
        frame = frame.f_back
    return False
