"""One run of the user's command, in a process group of its own, with its output in a file."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from diagnostics.bisection.outcomes import BadInput, Trial
from diagnostics.environments.masking import masked

_TAIL_BYTES = 2**20  # of the output, for the number
_LAST_LINE_CHARACTERS = 200
_END_SECONDS = 30.0  # that killed processes are waited for
_OWN = "DFLASH_BISECT_ENVIRONMENT"  # tells the command which environment it runs in


@dataclass(frozen=True, kw_only=True)
class Command:
    """What is run, and how its output is read."""

    arguments: tuple[str, ...]
    metric: re.Pattern[str] | None
    timeout_seconds: float | None

    def run(self, *, directory: Path, variables: dict[str, str], log: Path, started: Callable[[int], None]) -> Trial:
        """Run once. Raises BadInput where the command does not exist. Whatever happens, its process group ends with it."""
        began = time.monotonic()
        with log.open("wb") as output:
            try:
                process = subprocess.Popen(
                    _found(self.arguments, variables), cwd=directory, env=variables, stdin=subprocess.DEVNULL, stdout=output,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise BadInput(f"cannot run {self.arguments[0]!r} in {directory}: {error.strerror}") from error
            timed_out = False
            try:
                started(process.pid)
                process.wait(self.timeout_seconds)
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                _end_group(process)
        text = _tail(log)
        returncode = process.wait()
        figure = None if timed_out or returncode != 0 else self._figure(text)
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
        return Trial(
            returncode=returncode,
            figure=figure,
            seconds=round(time.monotonic() - began, 3),
            timed_out=timed_out,
            last_line=masked(last.strip())[:_LAST_LINE_CHARACTERS],
        )

    def _figure(self, text: str) -> float | None:
        """The last number that the pattern finds: its first group, or all of it."""
        if self.metric is None:
            return None
        found = list(self.metric.finditer(text))
        if not found:
            return None
        try:
            return float((found[-1][1] if self.metric.groups else found[-1][0]).replace(",", ""))
        except (ValueError, AttributeError):
            return None


def variables_of(python: Path | None, *, root: Path | None, worktree: Path | None, cache: Path) -> dict[str, str]:
    """The environment of a trial: a virtual environment first on PATH, and imports from the worktree, not from the checkout."""
    variables = dict(os.environ)
    if python is not None:
        variables["VIRTUAL_ENV"] = variables[_OWN] = str(python.parent.parent)
        variables["PATH"] = os.pathsep.join((str(python.parent), variables.get("PATH", os.defpath)))
        variables.pop("PYTHONHOME", None)
    if worktree is not None and root is not None:
        given = [_moved(path, root, worktree) for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
        own = [path for path in (worktree / "src", worktree) if path.is_dir()]
        variables["PYTHONPATH"] = os.pathsep.join((*map(str, own), *given))
    else:
        variables["PYTHONPYCACHEPREFIX"] = str(cache / "pycache")  # the checkout that is run in gets no compiled files
    return variables


def _moved(path: str, root: Path, worktree: Path) -> str:
    """A path inside the checkout as one inside the worktree."""
    absolute = Path(path).resolve()
    return str(worktree / absolute.relative_to(root)) if absolute.is_relative_to(root) else path


def _found(arguments: Sequence[str], variables: dict[str, str]) -> list[str]:
    """The command with its program looked up on the trial's PATH: Popen would look on ours."""
    program = arguments[0]
    if os.sep in program and Path(program).name.startswith("python") and _OWN in variables:
        raise BadInput(f"{program} is one fixed Python, not that of the environments: write `python`, which is found on PATH")
    if os.sep not in program:
        for folder in variables.get("PATH", os.defpath).split(os.pathsep):
            candidate = Path(folder) / program
            if candidate.is_file() and os.access(candidate, os.X_OK):
                return [str(candidate), *arguments[1:]]
    return list(arguments)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the process group and wait until it is gone: it may hold memory of the GPU."""
    limit = time.monotonic() + _END_SECONDS
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        while _is_alive(process.pid) and time.monotonic() < limit:
            time.sleep(0.01)
    except ProcessLookupError:
        process.wait()


def _is_alive(group: int) -> bool:
    """Whether a process of the group still runs; the dead that nobody has collected do not."""
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            if os.getpgid(one.pid) == group and one.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")
