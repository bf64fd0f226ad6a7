"""The stacks of a live Python process, read from outside by `py-spy dump --json`: nothing runs in the process that is looked at.

py-spy stops the process for some milliseconds, so that all stacks belong to one moment. It needs the right to trace the
process (see `_NO_RIGHTS`). Native names of threads and relative paths of scripts are looked up in /proc and through psutil;
where that fails (not Linux), threads that Python did not start have no name. This module imports no torch.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

DEVICE_THREAD = re.compile(r"pt_autograd_\d+")  # what torch calls the threads that run backward, one a device
_DUMP_SECONDS = 60.0
_TICK_SECONDS = 0.02  # CPU times are counted in ticks of a hundredth of a second
_IDLE_SHARE = 0.01  # of one core: what threads that only poll use
_NO_RIGHTS = (
    "no right to trace process {pid}: run this command as root or, where kernel.yama.ptrace_scope is 0, as the user who started "
    "the process; in a container start it with --cap-add SYS_PTRACE"
)
_PROBES = "/diagnostics/patch.py"


class CannotObserve(Exception):
    """The stacks cannot be read; the message says why and what to do."""


class NoSuchProcess(CannotObserve):
    """There is no process of this number, or it has ended."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One call on a stack. `native`: C or C++ code, seen with --native only."""

    name: str
    file: str
    line: int
    native: bool = False


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One thread at one moment. `frames` begin with the innermost; a thread that is outside Python has none."""

    name: str
    native_id: int
    active: bool  # on a CPU, or ready to be
    owns_gil: bool
    frames: tuple[Frame, ...]

    @property
    def python_frames(self) -> tuple[Frame, ...]:
        """The frames without C and C++, and without those that the probes put around torch's functions."""
        return tuple(frame for frame in self.frames if not frame.native and not frame.file.endswith(_PROBES))


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All threads of a process at one moment, and the CPU time that it and its children had used by then."""

    pid: int
    stacks: tuple[Stack, ...]
    cpu_seconds: float
    at_seconds: float  # of time.monotonic
    device_cpu_seconds: dict[str, float] = field(default_factory=dict)  # of autograd's device threads, by name and native id


def take(pid: int, *, native: bool = False) -> Snapshot:
    """Look at process `pid`. Raises NoSuchProcess, or CannotObserve with what to do."""
    if has_ended(pid):
        raise NoSuchProcess(f"there is no process {pid}: it has ended, or never was")
    command = [_py_spy(), "dump", "--json", "--pid", str(pid), *(["--native"] if native else [])]
    at_seconds, cpu, device_cpu = time.monotonic(), cpu_seconds(pid), _device_cpu_seconds(pid)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DUMP_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise CannotObserve(f"py-spy gave no answer about process {pid} within {_DUMP_SECONDS:.0f} s: try again") from None
    if done.returncode != 0:
        if has_ended(pid):
            raise NoSuchProcess(f"process {pid} ended while it was looked at")
        raise CannotObserve(explain(pid, done.stderr))
    stacks = parse(done.stdout, pid)
    return Snapshot(pid=pid, stacks=stacks, cpu_seconds=cpu, at_seconds=at_seconds, device_cpu_seconds=device_cpu)


def parse(text: str, pid: int | None = None) -> tuple[Stack, ...]:
    """The threads that py-spy printed; with `pid`, names and paths are completed from the live process."""
    directory = _directory(pid) if pid is not None else None
    try:
        found = [_stack(thread, pid, directory) for thread in json.loads(text)]
    except (ValueError, KeyError, TypeError) as error:
        printed = text.strip()[:200] or "nothing"
        raise CannotObserve(
            f"py-spy printed {printed!r} ({error!r}), expected a JSON list of threads: install py-spy 0.4 or later"
        ) from error
    return tuple(sorted(found, key=lambda stack: stack.native_id))  # on Linux the main thread is the first


def explain(pid: int, message: str) -> str:
    """What to do about an error that py-spy printed."""
    if re.search(r"permission|not permitted|privileges|run as root|requires root", message, re.IGNORECASE):
        return _NO_RIGHTS.format(pid=pid)
    if re.search(r"python version|python interpreter|libpython|find a python", message, re.IGNORECASE):
        return _not_python(pid)
    return f"py-spy could not read process {pid}: {' '.join(re.split(r'(?i)(?:stack )?backtrace', message)[0].split())[:300]}"


def _not_python(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        name, below = process.name(), process.children(recursive=True)
        pythons = [f"{each.pid} ({' '.join(each.cmdline()[1:3])})" for each in below if each.name().startswith("python")]
    except psutil.Error:
        name, pythons = "", []
    if name.startswith("python"):
        return f"process {pid} runs a Python that this py-spy does not know: pip install --upgrade py-spy"
    advice = f"below it runs Python: {', '.join(pythons)}" if pythons else "give the PID of a Python process (ps -C python3)"
    return f"process {pid} ({name or 'unknown'}) is not Python, so it has no Python stacks: {advice}"


def has_ended(pid: int) -> bool:
    """No such process, or only its exit code is left."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


def cpu_seconds(pid: int) -> float:
    """CPU time used by a process and its living and ended children (compile workers, data loaders); 0 if it has ended."""
    total = 0.0
    try:
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            total += _own_cpu_seconds(each)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return total
    return total


def worked(before_cpu_seconds: float, after_cpu_seconds: float, seconds: float) -> bool:
    """More CPU time was used in `seconds` than threads use that only poll (or children came and went)."""
    return abs(after_cpu_seconds - before_cpu_seconds) > _TICK_SECONDS + _IDLE_SHARE * seconds


def _own_cpu_seconds(process: psutil.Process) -> float:
    try:
        return float(sum(process.cpu_times()[:4]))  # user, system, and the same of ended children
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0.0


def _device_cpu_seconds(pid: int) -> dict[str, float]:
    """py-spy does not show those that are in C++ only: they have no Python stack."""
    try:
        threads = psutil.Process(pid).threads()
    except psutil.Error:
        return {}
    named = [(_native_name(pid, thread.id) or "", thread) for thread in threads]
    return {
        f"{name} ({thread.id})": thread.user_time + thread.system_time for name, thread in named if DEVICE_THREAD.fullmatch(name)
    }


def _py_spy() -> str:
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.is_file() else shutil.which("py-spy")
    if found is None:
        raise CannotObserve(f"py-spy is neither beside {sys.executable} nor on PATH: pip install py-spy")
    return found


def _stack(thread: dict[str, Any], pid: int | None, directory: str | None) -> Stack:
    native_id = int(thread["os_thread_id"] or thread["thread_id"])
    name = thread["thread_name"] or ("MainThread" if native_id == pid else None)  # unnamed until threading is imported
    if name is None and pid is not None:
        name = _native_name(pid, native_id)
    return Stack(
        name=name or f"native thread {native_id}",
        native_id=native_id,
        active=bool(thread["active"]),
        owns_gil=bool(thread["owns_gil"]),
        frames=tuple(_frame(frame, directory) for frame in thread["frames"]),
    )


def _frame(frame: dict[str, Any], directory: str | None) -> Frame:
    file, native = str(frame["filename"]), frame.get("module") is not None
    if directory is not None and not native and not file.startswith(("/", "<")):
        file = str(Path(directory) / file)  # a script's own path is as it was typed
    return Frame(name=str(frame["name"]), file=file, line=int(frame["line"]), native=native)


def _native_name(pid: int, native_id: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/task/{native_id}/comm").read_text().strip() or None
    except OSError:
        return None


def _directory(pid: int) -> str | None:
    try:
        return str(psutil.Process(pid).cwd())
    except psutil.Error:
        return None
