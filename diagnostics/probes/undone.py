"""What one thread drew or set while another compiled, and the compile has undone (F16).

A compile saves the CPU's random state and the default dtype of the process when Dynamo begins to trace a frame, and puts both
back when it has ended. The seams are the two functions of torch with which it does so: what they are about to undo is looked at
just before. Nothing is paid for elsewhere: a compile asks each once, and programs rarely call them.

Not told: who drew random numbers, and the compile itself may have (then nobody is harmed), so that this is a hazard; nothing is
said in a program of one thread. Not looked at: random states of GPUs and of Python's and numpy's generators.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from diagnostics import patch
from diagnostics.probes.probe import Probe
from diagnostics.records import Log, Observation
from diagnostics.who import program_lines, thread_name

RANDOM, DTYPE = "random state", "default dtype"
_SOMEBODY = "another thread"


class UndoneProbe(Probe):
    """Writes down each time that a compile puts back something else than it finds."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self._set_dtype = (_SOMEBODY, 0, "")  # who set it last: name, ident, line of the program

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        report = self._log.not_observed
        with contextlib.ExitStack() as stack:
            stack.enter_context(patch.RANDOM_STATE.subscribed(self._restores_random, report))
            stack.enter_context(patch.DEFAULT_DTYPE.subscribed(self._sets_dtype, report))
            yield

    def _restores_random(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        state = arguments[0] if arguments else keywords["new_state"]
        if threading.active_count() > 1 and _is_restoring() and _bytes(state) != _bytes(torch.default_generator.get_state()):
            self._add(RANDOM, _SOMEBODY, "")

    def _sets_dtype(self, arguments: tuple[Any, ...], _keywords: dict[str, Any]) -> None:
        if not _is_restoring():
            lines = program_lines()
            self._set_dtype = (thread_name(), threading.get_ident(), lines[-1] if lines else "")
        elif arguments[0] is not torch.get_default_dtype():
            name, ident, where = self._set_dtype
            if ident != threading.get_ident():
                self._add(DTYPE, name, where)

    def _add(self, what: str, other: str, where: str) -> None:
        self._log.add(
            Observation(
                kind="undone",
                name=what,
                threads=(other, thread_name()),
                where=program_lines(),
                time_seconds=time.time(),
                fields={"where_first": [where] if where else []},
            )
        )


def _is_restoring() -> bool:
    """The observed function was called by Dynamo's `preserve_global_state`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in ("set_rng_state", "set_default_dtype"):
        frame = frame.f_back
    caller = frame.f_back if frame is not None else None
    return caller is not None and caller.f_code.co_filename.endswith("/_dynamo/convert_frame.py")


def _bytes(state: torch.Tensor) -> bytes:
    """Read without an operator, which a mode of the caller would take."""
    return ctypes.string_at(state.data_ptr(), state.numel())
