"""Recipes in fresh processes: a server imports torch once and forks a copy of itself for each, several at a time.

A fork of a server that has done nothing but import is as good as a new process and takes milliseconds instead of seconds.
It must have one thread when it forks, which it checks. GPUs are hidden from recipes: they need none, and forks could not
use them. A recipe that hangs is killed with its children, one that dies is reported with its last words.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, Any, Literal, Self

_ROOT = Path(__file__).parents[2]
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
LIMIT_SECONDS = 30.0
PARALLEL = 2

State = Literal["happened", "did not happen", "failed", "hung", "died"]  # failed: the recipe itself raised


class ServerError(RuntimeError):
    """The server could not start; the message has its last words."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One recipe under one policy."""

    name: str
    policy: str = "none"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a job."""

    name: str
    policy: str
    state: State
    what: str
    seconds: float = 0.0


class Server:
    """The server of one block of code: `with Server() as server: server.plan; server.run(jobs)`."""

    def __init__(self) -> None:
        self.plan: dict[str, Any] = {}  # torch: its version; recipes: what scenarios.plan says

    def __enter__(self) -> Self:
        """Start it and read its plan. Raises ServerError."""
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, **dict.fromkeys(ONE_THREAD, "1"), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
        command = (sys.executable, "-m", "diagnostics.stress.replay")
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        try:
            self.plan = json.loads(self._line())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """End it: it ends when its input does; it is killed if it does not."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()

    def run(self, jobs: Sequence[Job], *, parallel: int = PARALLEL, limit_seconds: float = LIMIT_SECONDS) -> Iterator[Outcome]:
        """Run `jobs`, `parallel` at a time; yields their outcomes as they end. `limit_seconds` is for each."""
        assert self._process.stdin is not None
        request = {"jobs": [dataclasses.asdict(job) for job in jobs], "parallel": parallel, "limit_seconds": limit_seconds}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        for _ in jobs:
            yield Outcome(**json.loads(self._line()))

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise ServerError(f"the server of recipes ended: {last_words(self._errors)}")
        return line


def last_words(file: IO[str], lines: int = 3) -> str:
    """The last lines of what a process wrote."""
    file.seek(0)
    return " | ".join(file.read().strip().splitlines()[-lines:]) or "it said nothing"


@dataclass(frozen=True, kw_only=True)
class _Child:
    """In the server: one forked process, leader of a group of its own."""

    job: Job
    pid: int
    answer: Connection
    words: IO[str]
    started: float


def _serve() -> None:
    """The server: print the plan, then run the jobs of each request on standard input."""
    from diagnostics.stress import scenarios  # noqa: PLC0415 - only the server imports torch

    importlib.import_module("torch._inductor.compile_fx")  # what each fork would import for its first compile
    gc.freeze()  # what is imported is garbage to no fork, and need not be copied to be looked at
    _say(scenarios.plan())
    for line in sys.stdin:
        request = json.loads(line)
        jobs = [Job(**job) for job in request["jobs"]]
        for outcome in _run(jobs, request["parallel"], request["limit_seconds"]):
            _say(dataclasses.asdict(outcome))


def _run(jobs: Sequence[Job], parallel: int, limit_seconds: float) -> Iterator[Outcome]:
    waiting, children = deque(jobs), list[_Child]()
    try:
        while waiting or children:
            while waiting and len(children) < parallel:
                children.append(_fork(waiting.popleft(), limit_seconds))
            end = min(child.started for child in children) + limit_seconds
            ready = wait([child.answer for child in children], max(0.0, end - time.monotonic()))
            for child in children.copy():
                late = time.monotonic() - child.started > limit_seconds
                if child.answer in ready or late:
                    children.remove(child)
                    yield _end(child, answered=child.answer in ready, limit_seconds=limit_seconds)
    finally:
        for child in children:
            _end(child, answered=False, limit_seconds=limit_seconds)


def _fork(job: Job, limit_seconds: float) -> _Child:
    if (threads := _threads()) != 1:
        raise RuntimeError(f"{threads} threads in the server of recipes, expected 1: a fork would copy locks that they hold")
    here, there = Pipe(duplex=False)
    words = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in _end
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        here.close()
        _be_child(job, there, words, limit_seconds)
    there.close()
    return _Child(job=job, pid=pid, answer=here, words=words, started=started)


def _be_child(job: Job, answer: Connection, words: IO[str], limit_seconds: float) -> None:
    """Run the job, answer, and leave without looking back: threads may be stuck."""
    os.setsid()
    faulthandler.dump_traceback_later(limit_seconds + 10, exit=True, file=words)  # if the server is killed meanwhile
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor in (1, 2):
        os.dup2(words.fileno(), descriptor)
    from diagnostics.stress import scenarios  # noqa: PLC0415 - already imported

    try:
        evidence = scenarios.play(job.name, job.policy)
        answer.send(("happened" if evidence.happened else "did not happen", evidence.what))
    except BaseException as error:  # noqa: BLE001 - told to the server
        answer.send(("failed", f"{type(error).__name__}: {error}"))
    finally:
        os._exit(0)


def _end(child: _Child, *, answered: bool, limit_seconds: float) -> Outcome:
    """Read the answer if there is one, and end the child with all its children."""
    state: State
    what: str
    state, what = "hung", f"no end within {limit_seconds:g} s, killed: {last_words(child.words)}"
    if answered:
        try:
            state, what = child.answer.recv()
        except EOFError:
            state, what = "died", ""
    if state != "died":
        os.kill(child.pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
    with contextlib.suppress(ProcessLookupError):  # no other process of its group is left
        os.killpg(child.pid, signal.SIGKILL)
    if state == "died":
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        what = f"died by {how}: {last_words(child.words)}"
    child.answer.close()
    child.words.close()
    seconds = round(time.monotonic() - child.started, 2)
    return Outcome(name=child.job.name, policy=child.job.policy, state=state, what=what, seconds=seconds)


def _threads() -> int:
    """Threads of this process, where the system tells, also those that Python does not know."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()


def _say(values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve()
