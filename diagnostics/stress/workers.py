"""Threads of a recipe, which stop where the recipe says and go on when it says so; no sleeps, no chance.

A `Worker` is running, parked, waiting for a lock, or done. `settle` returns when it is no longer running, so that one
schedule serves a recipe without protection and the same recipe with a lock, where a worker waits instead of parking.
With `Policy.processes` each worker is a forked process of its own, with the same methods.

Known limit: `park` works in the worker's own thread, not in a device thread of autograd.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Protocol

WAIT_SECONDS = 60.0
_MAX_LETTERS = 100
_own_process: _Process | None = None  # set in the forked process of a worker


class Worker(Protocol):
    """One thread, or one process, of a recipe."""

    name: str
    result: Any  # what its function returned; None before, and when it raised
    error: str | None  # "RuntimeError: first line" of what it raised

    def settle(self) -> None:
        """Wait until it has parked, waits for a lock, or is done. Raises TimeoutError after WAIT_SECONDS."""

    def go(self) -> None:
        """Let it pass one park point, now or when it comes there."""

    def release(self) -> None:
        """Let it pass all park points from now on."""

    def finish(self) -> None:
        """Wait until it is done. Raises TimeoutError after WAIT_SECONDS."""


class ThreadWorker(threading.Thread):
    """A worker as a thread. What it raises is kept, and printed by Python as that of any thread."""

    def __init__(self, name: str, act: Callable[[], object], *, parks: bool = True) -> None:
        """`parks` False: it passes all park points."""
        super().__init__(name=name, daemon=True)
        self.result: Any = None
        self.error: str | None = None
        self._act, self._parks = act, parks
        self._state, self._permits = "running", 0
        self._changed = threading.Condition()

    def run(self) -> None:
        """Run the function in this thread."""
        try:
            self.result = self._act()
        except BaseException as error:
            self.error = describe(error)
            raise
        finally:
            self._become("done")

    def settle(self) -> None:
        """See Worker."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._state != "running", WAIT_SECONDS):
                raise TimeoutError(f"thread {self.name} neither parked nor ended within {WAIT_SECONDS:.0f} s")

    def release(self) -> None:
        """See Worker."""
        self._parks = False
        self.go()

    def go(self) -> None:
        """See Worker."""
        with self._changed:
            self._permits += 1
            if self._state == "parked":
                self._state = "running"
            self._changed.notify_all()

    def finish(self) -> None:
        """See Worker."""
        self.join(WAIT_SECONDS)
        if self.is_alive():
            raise TimeoutError(f"thread {self.name} did not end within {WAIT_SECONDS:.0f} s")

    def park(self) -> None:
        """Stop here until `go`."""
        if not self._parks:
            return
        with self._changed:
            if not self._permits:
                self._state = "parked"
                self._changed.notify_all()
                if not self._changed.wait_for(lambda: self._permits > 0, WAIT_SECONDS):
                    raise TimeoutError(f"nobody let thread {self.name} go on within {WAIT_SECONDS:.0f} s")
            self._permits -= 1
            self._state = "running"

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the wait for a lock."""
        self._become("waiting")
        yield
        self._become("running")

    def _become(self, state: str) -> None:
        with self._changed:
            self._state = state
            self._changed.notify_all()


class _Process:
    """A worker as a forked process: it talks to the recipe through a pipe."""

    def __init__(self, name: str, act: Callable[[], object]) -> None:
        self.name = name
        self.result: Any = None
        self.error: str | None = None
        self._act = act
        self._here, self._there = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(target=self._run, args=(self._there,), name=name, daemon=True)
        self._parks, self._permits = True, 0.0
        self._state = "running"

    def start(self) -> None:
        self._process.start()
        self._there.close()

    def settle(self) -> None:
        while self._state == "running":
            if not self._here.poll(WAIT_SECONDS):
                raise TimeoutError(f"process {self.name} neither parked nor ended within {WAIT_SECONDS:.0f} s")
            self._state, self.result, self.error = self._here.recv()
            if self._state == "parked" and self._permits > 0:  # it has gone on already
                self._permits -= 1
                self._state = "running"

    def go(self) -> None:
        self._send("go", 1)

    def release(self) -> None:
        self._send("release", math.inf)

    def _send(self, word: str, permits: float) -> None:
        if self._state == "done":
            return
        if self._state == "parked":
            self._state = "running"
            permits -= 1
        self._permits += permits
        with contextlib.suppress(BrokenPipeError):  # it has ended meanwhile
            self._here.send(word)

    def finish(self) -> None:
        self.settle()
        if self._state != "done":
            raise TimeoutError(f"process {self.name} is parked and nobody let it go on")
        self._process.join(WAIT_SECONDS)

    def park(self) -> None:
        """In the process: stop here until `go`."""
        if not self._parks:
            return
        self._there.send(("parked", None, None))
        if not self._there.poll(WAIT_SECONDS):
            raise TimeoutError(f"nobody let process {self.name} go on within {WAIT_SECONDS:.0f} s")
        self._parks = self._there.recv() != "release"

    def _run(self, there: Connection) -> None:
        global _own_process
        _own_process, self._there = self, there
        try:
            there.send(("done", self._act(), None))
        except BaseException as error:  # noqa: BLE001 - told to the recipe, and printed
            traceback.print_exc()
            there.send(("done", None, describe(error)))


def new_worker(name: str, act: Callable[[], object], *, parks: bool, process: bool) -> ThreadWorker | _Process:
    """A worker that has not started."""
    return _Process(name, act) if process and parks else ThreadWorker(name, act, parks=parks)


def park() -> None:
    """Stop the calling worker here until the recipe lets it go on."""
    _current().park()


class WatchedLock:
    """A lock that tells the recipe that a worker waits for it."""

    def __init__(self, lock: Any, heard: Callable[[], object] = lambda: None) -> None:
        """`lock` has acquire and release; `heard` is called before a thread waits, whoever it is."""
        self._lock, self._heard = lock, heard

    def __enter__(self) -> None:
        """Acquire."""
        if self._lock.acquire(blocking=False):
            return
        self._heard()
        thread = threading.current_thread()
        with thread.waiting() if isinstance(thread, ThreadWorker) else contextlib.nullcontext():
            self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        """Release."""
        self._lock.release()


def describe(error: BaseException) -> str:
    """Type and beginning of an exception."""
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first if len(first) <= _MAX_LETTERS else first[:_MAX_LETTERS] + '...'}"


def _current() -> ThreadWorker | _Process:
    thread = threading.current_thread()
    worker = thread if isinstance(thread, ThreadWorker) else _own_process
    assert worker is not None, "park was called outside a worker of a recipe"
    return worker
