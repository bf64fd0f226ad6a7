"""Run a command in a fresh process and read its last line of standard output as JSON. Imports no torch.

The child gets its own process group, so that a run that hangs is ended with everything it started: asked first, then killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_GRACE_SECONDS = 20.0
_TAIL_LINES = 25


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
    returncode, output = _run(command, log=log, timeout_seconds=timeout_seconds, place=place)
    result = _last_object(output.decode(errors="replace"))
    if result is None:
        raise ChildFailed(_message(command, f"ended with exit code {returncode} and no JSON on its last line", log))
    tail = _tail(log.read_bytes())
    return ChildResult(returncode=returncode, result=result, seconds=time.monotonic() - started, stderr_tail=tail)


def run_to_success(command: Sequence[str], *, log: Path, timeout_seconds: float, place: Place = HERE) -> None:
    """Run `command` for what it leaves on disk. Raises ChildFailed on any exit code but 0, or after `timeout_seconds`."""
    returncode, _ = _run(command, log=log, timeout_seconds=timeout_seconds, place=place)
    if returncode != 0:
        raise ChildFailed(_message(command, f"ended with exit code {returncode}", log))


def _run(command: Sequence[str], *, log: Path, timeout_seconds: float, place: Place) -> tuple[int, bytes]:
    with log.open("wb") as errors:
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd=place.directory,
            env={**os.environ, **place.variables},
        )
        try:
            if place.started:
                place.started(child.pid)
            output, _ = child.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired as error:
            how = _end(child)
            raise ChildFailed(_message(command, f"did not end within {timeout_seconds:.0f} s and was {how}", log)) from error
        except BaseException:
            _end(child)
            raise
    return child.returncode, output


def _end(child: subprocess.Popen[bytes]) -> str:
    """Ask, wait, kill; says which it took."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    try:
        child.communicate(timeout=_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return f"killed, because it did not end within {_GRACE_SECONDS:.0f} s of being asked to"
    return "ended by SIGTERM"


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
