"""One child process for each combination: its result, or how it died or where it hung. Imports no torch.

A child that does not end in time is shown by py-spy, or where that is missing or not allowed by the child's own
faulthandler, and is then killed with everything that it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diagnostics.stress.combination import Combination, Refused

_DUMP_SECONDS = 30.0
_ANSWER_SECONDS = 5.0
_MAX_LINES = 120


def run_child(combination: Combination, *, hang_seconds: float) -> dict[str, Any]:
    """The result of one combination. A hang (no end within its seconds and `hang_seconds`) or a crash is a result, too.

    Raises Refused when the child found the combination impossible.
    """
    command = [sys.executable, "-m", "diagnostics.stress.runner", combination.to_json()]
    return watch(command, limit_seconds=combination.seconds + hang_seconds)


def watch(command: Sequence[str], *, limit_seconds: float) -> dict[str, Any]:
    """Run a command whose last line of output is its result, and which writes `phase: NAME` to standard error."""
    with tempfile.TemporaryDirectory(prefix="stress-") as directory:
        output, errors = Path(directory, "output"), Path(directory, "errors")
        with output.open("wb") as output_file, errors.open("ab") as errors_file:
            child = subprocess.Popen(command, stdout=output_file, stderr=errors_file, start_new_session=True)
        try:
            code = child.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            stacks = _stacks(child.pid, errors)
            return {"failure": f"hung while running: {_phase(errors)}; no end within {limit_seconds:.0f} s", "stacks": stacks}
        finally:
            _kill(child)
        return _result(code, output.read_text(), errors)


def _result(code: int, output: str, errors: Path) -> dict[str, Any]:
    if code == 0:
        result: dict[str, Any] = json.loads(output.splitlines()[-1])
        return result
    lines = errors.read_text().strip().splitlines()
    if code == 2:
        raise Refused(lines[-1] if lines else "the child refused without a message")
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    hint = "; a CUDA build of torch without a GPU crashes when a second thread compiles" if code < 0 else ""
    return {"failure": f"died by {how} while running: {_phase(errors)}{hint}", "stacks": "\n".join(lines[-_MAX_LINES:])}


def _stacks(process: int, errors: Path) -> str:
    """What the child's threads do, by py-spy, or else by its faulthandler."""
    beside = Path(sys.executable).parent / "py-spy"
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return f"(py-spy is not installed; from the child's faulthandler)\n{_own_stacks(process, errors)}"
    try:
        command = (program, "dump", "--pid", str(process))
        dump = subprocess.run(command, capture_output=True, text=True, timeout=_DUMP_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"(py-spy gave no answer within {_DUMP_SECONDS:.0f} s)\n{_own_stacks(process, errors)}"
    if dump.returncode == 0:
        return dump.stdout
    why = (dump.stderr.strip().splitlines() or ["without a message"])[-1]
    return f"(py-spy failed: {why}; from the child's faulthandler)\n{_own_stacks(process, errors)}"


def _own_stacks(process: int, errors: Path) -> str:
    if not hasattr(signal, "SIGUSR1"):
        return "this system has no signal to ask the child with"
    before = len(errors.read_text())
    os.kill(process, signal.SIGUSR1)
    until = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < until and "Current thread" not in errors.read_text()[before:]:
        time.sleep(0.1)
    return errors.read_text()[before:] or f"the child gave no answer within {_ANSWER_SECONDS:.0f} s"


def _phase(errors: Path) -> str:
    phases = [line.removeprefix("phase: ") for line in errors.read_text().splitlines() if line.startswith("phase: ")]
    return phases[-1] if phases else "imports"


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End the child and what it started (Inductor keeps workers)."""
    with contextlib.suppress(ProcessLookupError):  # it ended, and left nothing behind
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
