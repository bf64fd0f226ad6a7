"""Pass signals on to the program, each once.

A signal that is sent to the process group, by Ctrl-C or a supervisor, reaches the program without our help; one that is sent to
fxprobe alone does not. They are told apart by a sentinel: an idle process in the same group, which dies of the first kind only.
Limit: two different signals to the group within the time that a new sentinel takes to start (milliseconds).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_DEATH_SECONDS = 0.2


@contextlib.contextmanager
def collected() -> Iterator[Callable[[], list[int]]]:
    """Inside the block signals wait; what is yielded returns, in their order, those that the process group did not get."""
    arrived: deque[int] = deque()

    def handle(number: int, _frame: FrameType | None) -> None:
        arrived.append(number)

    def ours_alone() -> list[int]:
        taken = [arrived.popleft() for _ in range(len(arrived))]
        return [number for number in taken if not sentinel.died_of(number)]

    sentinel = _Sentinel()
    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield ours_alone
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sentinel.close()


class _Sentinel:
    """A forked process that waits for a signal with its default effect, or for the end of this process."""

    def __init__(self) -> None:
        self._start()

    def died_of(self, number: int) -> bool:
        """Whether signal `number` has reached the group; a new sentinel then stands in for the dead one."""
        until = time.monotonic() + _DEATH_SECONDS
        while time.monotonic() < until:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                os.close(self._alive)
                self._start()
                return os.WIFSIGNALED(status) and os.WTERMSIG(status) == number
            time.sleep(0.01)  # waitpid knows no time limit
        return False

    def close(self) -> None:
        """End it: its pipe closes."""
        os.close(self._alive)
        os.waitpid(self._pid, 0)

    def _start(self) -> None:
        reader, self._alive = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self._pid = os.fork()
            if self._pid == 0:
                for number in SIGNALS:
                    signal.signal(number, signal.SIG_DFL)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if self._pid == 0:
            os.close(self._alive)
            os.read(reader, 1)  # returns when this process has ended or closed the pipe
            os._exit(0)
        os.close(reader)
