"""Threads run one at a time; at each park point a strategy decides who goes on. Knows nothing of torch.

`Scheduler.run` starts the threads, each stops at once, and from then on exactly one is let go until it comes to the next
park point or ends. The choices are a schedule: a string of thread letters, "aab", that can be replayed.

A thread that waits for a lock of a parked thread would stall everybody: one that sleeps for a grace period without using
the processor is taken for blocked, and another goes on; it counts again when it wakes. When only blocked threads are left
for longer, that is a deadlock, reported with their stacks.

Known limits: while a blocked thread wakes, two threads run for a moment. What a thread does between two park points is not
interleaved. A thread that sleeps for another reason (a child process) also counts as blocked. Threads of a deadlock stay:
run each schedule in a process of its own.
"""

from __future__ import annotations

import string
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

GRACE_SECONDS = 0.1
DEADLOCK_SECONDS = 3.0
LETTERS = string.ascii_lowercase

Choose = Callable[[str, str], str]  # letters of the threads that can go on, who went last ("" at first); returns one of them
State = Literal["running", "parked", "blocked", "done"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one thread ended: its result or its exception; neither when it never did."""

    result: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One execution."""

    schedule: str  # the choices made, one letter for each
    places: tuple[str, ...]  # for each choice, where the thread had been parked
    outcomes: tuple[Outcome, ...]  # by thread
    deadlock: tuple[str, ...] = ()  # stacks of the threads that blocked each other


@dataclass(eq=False)
class _Controlled:
    letter: str
    thread: threading.Thread
    state: State = "running"
    place: str = "start"
    outcome: Outcome = field(default_factory=Outcome)

    def activity(self) -> tuple[str, str, float]:
        """Changes whenever the thread parks, ends or uses the processor."""
        return self.state, self.place, _processor_seconds(self.thread)


class Scheduler:
    """Runs threads by the choices of a strategy. Use it once."""

    def __init__(
        self, choose: Choose, *, grace_seconds: float = GRACE_SECONDS, deadlock_seconds: float = DEADLOCK_SECONDS
    ) -> None:
        self._choose, self._grace_seconds, self._deadlock_seconds = choose, grace_seconds, deadlock_seconds
        self._changed = threading.Condition()
        self._threads: list[_Controlled] = []
        self._by_ident: dict[int, _Controlled] = {}
        self._free = False  # nobody is controlled any more

    def run(self, bodies: Sequence[Callable[[], Any]]) -> Run:
        """Run each function in a thread of its own until all have ended or are deadlocked. Raises ValueError beyond 26."""
        if len(bodies) > len(LETTERS):
            raise ValueError(f"{len(bodies)} threads: schedules name at most {len(LETTERS)} by one letter each")
        for letter, body in zip(LETTERS, bodies, strict=False):
            thread = threading.Thread(target=self._body, args=(len(self._threads), body), name=f"thread-{letter}", daemon=True)
            self._threads.append(_Controlled(letter=letter, thread=thread))
        for one in self._threads:
            one.thread.start()
        schedule = ""
        places: list[str] = []
        deadlock: tuple[str, ...] = ()
        while (parked := self._await_choice()) is not None:
            if not parked:
                deadlock = tuple(_stack(one) for one in self._threads if one.state != "done")
                break
            letter = self._choose("".join(one.letter for one in parked), schedule[-1:])
            chosen = next(one for one in parked if one.letter == letter)
            schedule += letter
            places.append(chosen.place)
            self._let_go(chosen)
        self._release_all()
        return Run(
            schedule=schedule, places=tuple(places), outcomes=tuple(one.outcome for one in self._threads), deadlock=deadlock
        )

    def park(self, place: str) -> None:
        """A park point: stop here until chosen. Threads that are not controlled pass."""
        mine = self._by_ident.get(threading.get_ident())
        if mine is None:
            return
        with self._changed:
            if self._free:
                return
            mine.state, mine.place = "parked", place
            self._changed.notify_all()
            self._changed.wait_for(lambda: mine.state == "running" or self._free)

    def _body(self, index: int, body: Callable[[], Any]) -> None:
        mine = self._threads[index]
        self._by_ident[threading.get_ident()] = mine
        self.park("start")
        try:
            outcome = Outcome(result=body())
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            outcome = Outcome(error=error)
        with self._changed:
            mine.outcome, mine.state = outcome, "done"
            self._changed.notify_all()

    def _await_choice(self) -> list[_Controlled] | None:
        """The threads that can go on once nobody runs; none of them: a deadlock; None: all have ended."""
        with self._changed:
            until = None
            while True:
                self._await_quiet()
                if all(one.state == "done" for one in self._threads):
                    return None
                parked = [one for one in self._threads if one.state == "parked"]
                until = until or time.monotonic() + self._deadlock_seconds
                if parked or time.monotonic() > until:
                    return parked

    def _await_quiet(self) -> None:
        """Wait until every thread that is not parked has ended or has slept for the grace period: those are blocked."""
        while any(one.state in {"running", "blocked"} for one in self._threads):
            before = [one.activity() for one in self._threads]
            self._changed.wait(self._grace_seconds)
            moving = [one for one in self._threads if one.state in {"running", "blocked"}]
            if before != [one.activity() for one in self._threads] or any(_wants_processor(one.thread) for one in moving):
                continue
            for one in moving:
                one.state = "blocked"
            return

    def _let_go(self, chosen: _Controlled) -> None:
        with self._changed:
            chosen.state = "running"
            self._changed.notify_all()

    def _release_all(self) -> None:
        with self._changed:
            self._free = True
            self._changed.notify_all()
        for one in self._threads:
            if one.state == "done":
                one.thread.join()


def _processor_seconds(thread: threading.Thread) -> float:
    """Processor time of a live thread; 0 where the system does not tell, so that only park points count as activity."""
    if thread.ident is None or not thread.is_alive() or not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def _wants_processor(thread: threading.Thread) -> bool:
    """The thread is ready to run, but a busy machine does not let it (Linux only)."""
    try:
        status = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "R"


def _stack(one: _Controlled) -> str:
    frame = sys._current_frames().get(one.thread.ident or 0)
    lines = traceback.format_stack(frame)[-6:] if frame is not None else ["  (no stack)\n"]
    return f"thread {one.letter}, last parked at {one.place}:\n{''.join(lines)}"
