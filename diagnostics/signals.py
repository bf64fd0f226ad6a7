"""Pass signals on to the program, each once.

A signal that is sent to the process group, by Ctrl-C or a supervisor, reaches the program without our help; one that is sent to
fxprobe alone does not. They are told apart by a sentinel: an idle process in the same group, which dies of the first kind only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_DEATH_SECONDS = 0.2


@contextlib.contextmanager
def passed_on(send: Callable[[int], None]) -> Iterator[None]:
    """Inside the block, call `send` with each signal that the process group did not get."""
    sentinel = _Sentinel()

    def handle(number: int, _frame: FrameType | None) -> None:
        if not sentinel.died():
            send(number)

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sentinel.close()


class _Sentinel:
    """A forked process that waits for a signal with its default effect."""

    def __init__(self) -> None:
        self._pid = self._start()

    def died(self) -> bool:
        """Whether the signal that has just arrived has reached the group; a new sentinel then stands in for the dead one."""
        until = time.monotonic() + _DEATH_SECONDS
        while time.monotonic() < until:
            if os.waitpid(self._pid, os.WNOHANG)[0]:
                self._pid = self._start()
                return True
            time.sleep(0.01)
        return False

    def close(self) -> None:
        """End it."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    @staticmethod
    def _start() -> int:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            pid = os.fork()
            if pid:
                return pid
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        parent = os.getppid()
        while os.getppid() == parent:  # fxprobe may be killed
            time.sleep(1)
        os._exit(0)
