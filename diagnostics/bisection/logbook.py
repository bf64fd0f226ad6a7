"""Everything that was tried, on disk before it counts: a killed bisection goes on where it was.

    FOLDER/journal.jsonl   first what is asked, then a line for each start and each result, flushed to disk one by one
    FOLDER/lock            held while a bisection runs

A last line that was cut off by a kill is cut away; damage anywhere else is an error. A command that outlived its bisection is
known by its process id and start time, and is ended before anything is measured again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import filelock
import psutil

from diagnostics.bisection.outcomes import BadInput, NotObserved, Trial

VERSION = 1


class Logbook:
    """The journal of one question. A context manager; for one process at a time."""

    def __init__(self, folder: Path, question: dict[str, Any], *, fresh: bool = False) -> None:
        self._fresh = fresh  # forget what is there
        self.folder = folder
        self.path = folder / "journal.jsonl"
        self.trials: dict[tuple[str, str, int], Trial] = {}
        self.unbuildable: dict[str, str] = {}  # key of a set of pins -> why
        self.notes: list[str] = []
        self._question = {"kind": "question", "version": VERSION, **question}
        self._lock = filelock.FileLock(folder / "lock", timeout=0)
        self._started: tuple[int, float] | None = None

    def __enter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except filelock.Timeout as error:
            raise BadInput(f"the same bisection is running already (lock {self.folder / 'lock'})") from error
        except OSError as error:
            raise BadInput(f"cannot write to {self.folder}: {error.strerror}: name another --cache") from error
        try:
            if self._fresh:
                self.path.unlink(missing_ok=True)
            self._load()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._lock.release()

    def started(self, pid: int) -> None:
        """A command runs, as the leader of a process group."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._append({"kind": "started", "pid": pid, "created_seconds": psutil.Process(pid).create_time()})

    def add_trial(self, stage: str, state: str, number: int, trial: Trial) -> None:
        """A result; it is on disk when this returns."""
        self.trials[stage, state, number] = trial
        self._append({"kind": "trial", "stage": stage, "state": state, "number": number, **trial.to_dict()})

    def add_unbuildable(self, key: str, why: str) -> None:
        """A set of packages that the installer refuses."""
        self.unbuildable[key] = why
        self._append({"kind": "cannot be built", "key": key, "why": why})

    def _append(self, record: dict[str, Any]) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise NotObserved(f"cannot write {self.path}: {error.strerror}: what is not written down does not count") from error

    def _load(self) -> None:
        try:
            content = self.path.read_bytes() if self.path.exists() else b""
        except OSError as error:
            raise BadInput(f"{self.path}: {error.strerror}") from error
        whole = content[: content.rfind(b"\n") + 1]
        if not whole:
            self.path.unlink(missing_ok=True)
            self._append(self._question)
            return
        try:
            records = [json.loads(line) for line in whole.splitlines()]
            if records[0] != self._question:
                raise BadInput(f"{self.path} is about another question or of another version: use --fresh or another --cache")
            for record in records[1:]:
                self._take(record)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, BadInput):
                raise
            raise BadInput(f"{self.path} is damaged ({type(error).__name__}): --fresh begins anew") from error
        if len(whole) < len(content):
            with self.path.open("rb+") as file:
                file.truncate(len(whole))
            self.notes.append("a line that was cut off by the end of the last run was removed from the journal")
        self._end_left_over()

    def _take(self, record: dict[str, Any]) -> None:
        match record["kind"]:
            case "started":
                self._started = (int(record["pid"]), float(record["created_seconds"]))
            case "trial":
                self.trials[record["stage"], record["state"], int(record["number"])] = Trial.from_dict(record)
                self._started = None
            case "cannot be built":
                self.unbuildable[record["key"]] = record["why"]
            case kind:
                raise ValueError(f"a record of kind {kind!r}")

    def _end_left_over(self) -> None:
        """End the command of a bisection that was killed, if it still runs."""
        if self._started is None:
            return
        pid, created_seconds = self._started
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if abs(psutil.Process(pid).create_time() - created_seconds) < 0.01:
                os.killpg(pid, signal.SIGKILL)
                self.notes.append(f"ended process {pid}, which the last run left behind")
