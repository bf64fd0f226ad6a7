"""Run a command in a fresh process and read its last line of standard output as JSON. Imports no torch.

The child gets its own process group, so that a run that hangs is ended with everything it started: asked first, then killed. On
Linux it also ends when this process is killed: a run that is held (`regression.alternation`) would otherwise stand for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

_GRACE_SECONDS = 20.0
_TAIL_LINES = 25
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_library = ctypes.CDLL(None) if sys.platform == "linux" else None


class ChildFailed(RuntimeError):
    """The command left no result; the message holds the end of its standard error."""


@dataclass(frozen=True, kw_only=True)
class ChildResult:
    """What a command left behind."""

    returncode: int
    result: dict[str, Any]  # its last line of standard output
    seconds: float
    stderr_tail: str


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a command runs: in a directory, with variables beside the environment's, and who is told its process id."""

    directory: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    started: Callable[[int], None] | None = None


HERE = Place()


def run_json(command: Sequence[str], *, log: Path, timeout_seconds: float, place: Place = HERE) -> ChildResult:
    """Run `command`; its standard error goes to the file `log`. A failing exit code with a result is a result.

    Raises ChildFailed when it runs longer than `timeout_seconds`, or ends without a JSON object on its last line.
    """
    started = time.monotonic()
    with Running.started(command, log=log, place=place) as running:
        returncode, result = running.result(timeout_seconds)
    tail = _tail(log.read_bytes())
    return ChildResult(returncode=returncode, result=result, seconds=time.monotonic() - started, stderr_tail=tail)


def run_to_success(command: Sequence[str], *, log: Path, timeout_seconds: float, place: Place = HERE) -> None:
    """Run `command` for what it leaves on disk. Raises ChildFailed on any exit code but 0, or after `timeout_seconds`."""
    with Running.started(command, log=log, place=place) as running:
        returncode, _ = running.output(timeout_seconds)
    if returncode != 0:
        raise ChildFailed(_message(command, f"ended with exit code {returncode}", log))


class Running:
    """A command that runs in a process group of its own, for those who do more than wait for its end."""

    def __init__(self, command: Sequence[str], process: subprocess.Popen[bytes], log: Path) -> None:
        self._command = command
        self._process = process
        self._log = log

    @classmethod
    @contextlib.contextmanager
    def started(cls, command: Sequence[str], *, log: Path, place: Place = HERE) -> Iterator[Self]:
        """Start `command`; its standard error goes to the file `log`. What still runs at the end of the block is ended."""
        with log.open("wb") as errors:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=place.directory,
                env={**os.environ, **place.variables},
                preexec_fn=_end_with_parent if _library else None,  # noqa: PLW1509 - one system call, loaded before
            )
            running = cls(command, process, log)
            try:
                if place.started:
                    place.started(process.pid)
                yield running
            finally:
                if process.poll() is None:
                    running.end()

    def has_ended(self) -> bool:
        """Whether the command itself has; what it started may go on."""
        return self._process.poll() is not None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the whole group, if there still is one."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def ask_to_end(self) -> None:
        """Send SIGTERM to the command alone, which ends what it has started in its own way."""
        if self._process.poll() is None:
            self._process.terminate()

    def output(self, timeout_seconds: float) -> tuple[int, bytes]:
        """Wait for the end; exit code and standard output. Raises ChildFailed after `timeout_seconds`."""
        try:
            output, _ = self._process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired as error:
            what = f"did not end within {timeout_seconds:.0f} s and was {self.end()}"
            raise ChildFailed(_message(self._command, what, self._log)) from error
        return self._process.returncode, output

    def result(self, timeout_seconds: float) -> tuple[int, dict[str, Any]]:
        """Wait for the end; exit code and the JSON object on the last line. Raises ChildFailed without one, or in time."""
        returncode, output = self.output(timeout_seconds)
        result = _last_object(output.decode(errors="replace"))
        if result is None:
            what = f"ended with exit code {returncode} and no JSON on its last line"
            raise ChildFailed(_message(self._command, what, self._log))
        return returncode, result

    def end(self) -> str:
        """Ask, wait, kill, also a group that was stopped; says which it took."""
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)
        try:
            self._process.communicate(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL)
            self._process.communicate()
            return f"killed, because it did not end within {_GRACE_SECONDS:.0f} s of being asked to"
        return "ended by SIGTERM"


def _end_with_parent() -> None:
    assert _library is not None
    _library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _last_object(output: str) -> dict[str, Any] | None:
    lines = output.strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _message(command: Sequence[str], what: str, log: Path) -> str:
    return f"{' '.join(command)}\n{what}. The end of its standard error (all of it: {log}):\n{_tail(log.read_bytes())}"


def _tail(errors: bytes) -> str:
    return "\n".join(errors.decode(errors="replace").splitlines()[-_TAIL_LINES:])
