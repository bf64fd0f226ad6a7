"""A watch over processes of one's own: looks at the stacks of one that does nothing for a while.

The owner calls `check()` about once a second; that reads CPU times only, until a process with several threads has used none
for `stall_seconds`. Then its stacks are read once, and again only after it has worked in between.
Limits: a deadlock in a process that goes on computing in other threads is not noticed (use `python -m diagnostics.hang`);
threads that spin while they wait use CPU time. This module imports no torch.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from diagnostics.stacks import CannotObserve, NoSuchProcess, cpu_seconds, take, worked
from diagnostics.waiting import HangReport, analyse


@dataclass(kw_only=True)
class _Rest:
    """Since when a process has used no CPU time, and whether that was looked at."""

    cpu_seconds: float
    since_seconds: float  # of time.monotonic
    looked_at: bool = False


class HangWatch:
    """Watches the processes that `pids` returns at each check."""

    def __init__(self, pids: Callable[[], list[int]], stall_seconds: float) -> None:
        if not stall_seconds > 0:
            raise ValueError(f"stall_seconds is {stall_seconds:g}, expected seconds above 0")
        self._pids, self._stall_seconds = pids, stall_seconds
        self._rests: dict[int, _Rest] = {}

    def check(self) -> HangReport | None:
        """The report on a process that has just been at rest for `stall_seconds`, or None; at most one process a check.

        The report may say that nothing is known to be stuck (`stuck` is False): its threads then wait for work. What cannot be
        observed is a report with `not_observed`, not an error.
        """
        pids = self._pids()
        self._rests = {pid: rest for pid, rest in self._rests.items() if pid in pids}
        for pid in pids:
            now_seconds = time.monotonic()
            rest = self._rest(pid, now_seconds)
            if not rest.looked_at and now_seconds - rest.since_seconds >= self._stall_seconds and _threads(pid) > 1:
                rest.looked_at = True
                return self._look(pid, rest)
        return None

    def _rest(self, pid: int, now_seconds: float) -> _Rest:
        used = cpu_seconds(pid)
        rest = self._rests.get(pid)
        if rest is None or worked(rest.cpu_seconds, used, now_seconds - rest.since_seconds):
            rest = self._rests[pid] = _Rest(cpu_seconds=used, since_seconds=now_seconds)
        return rest

    def _look(self, pid: int, rest: _Rest) -> HangReport | None:
        """One look is enough: that nothing moved since is known from the CPU time."""
        try:
            seen = take(pid)
        except NoSuchProcess:
            return None
        except CannotObserve as error:
            still_seconds = time.monotonic() - rest.since_seconds
            return HangReport(pid=pid, still_seconds=still_seconds, not_observed=(str(error),))
        return analyse(dataclasses.replace(seen, at_seconds=rest.since_seconds), seen)


def _threads(pid: int) -> int:
    try:
        return int(psutil.Process(pid).num_threads())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
