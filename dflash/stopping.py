"""Ending a run by signal: at the end of a step where there is one, at once where there is none."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from dflash import events


class Stop(threading.Event):
    """Set when the run was asked to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.stepping = False  # whether there is a step to finish


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Ctrl-C and SIGTERM ask the run to finish its step; before the first one, and a second Ctrl-C, interrupt at once.

    Handlers are restored.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        if not stop.stepping or (stop.is_set() and number == signal.SIGINT):
            raise KeyboardInterrupt
        stop.set()
        events.record("notice", text=f"{signal.Signals(number).name}: finishing the step, then saving; Ctrl-C again to drop it")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
