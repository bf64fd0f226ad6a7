"""Where the ranks of this machine are: `py-spy dump` of each, and where it cannot look, the rank's own faulthandler.

py-spy needs the right to trace processes (root, CAP_SYS_PTRACE, or ptrace_scope 0) and also reads one that is stopped. The
other way needs the process to run: SIGUSR1 makes it write its stacks to its own stderr.

Beside them lie the last collectives of every rank that could still write, from torch's flight recorder: a pickled dictionary;
`torchfrtrace` is made for those of NCCL and does not read Gloo's. A rank that wrote nothing leaves the file of an earlier life of
the run, if there is one. Not run with NCCL.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
from torch._C import _distributed_c10d

RECORDED = 2000  # collectives of a process
RECORDER_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # torch's name, and its older one
DUMP_SECONDS = 10.0  # for all of them together, they are read at the same time


def answer_to_signal() -> None:
    """Make this process write its stacks to stderr at SIGUSR1."""
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__ or sys.stderr, all_threads=True)


def write_stacks(processes: Mapping[str, int], path: Path) -> None:
    """Write the stacks of processes, each under its name, to `path`. What cannot be read is said in the file."""
    command = _py_spy()
    running: dict[str, subprocess.Popen[str] | None] = {}
    for name, pid in processes.items():
        running[name] = None if command is None else _dump(command, pid)
    texts = [f"== {name}, process {processes[name]}\n{_stacks(child, processes[name])}\n" for name, child in running.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(texts), encoding="utf-8")


def record_collectives() -> None:
    """Have torch keep the last collectives of this process, unless a variable says how many. Before process groups are made."""
    if not any(name in os.environ for name in RECORDER_VARIABLES):
        os.environ[RECORDER_VARIABLES[0]] = str(RECORDED)


def write_collectives(path: Path, *, nccl: bool) -> None:
    """Write what was recorded of this process to `path`, pickled; nothing where this torch keeps no record."""
    dump = getattr(_distributed_c10d, "_dump_nccl_trace" if nccl else "_dump_fr_trace", None)
    if dump is not None:
        path.write_bytes(dump())


def _dump(command: str, pid: int) -> subprocess.Popen[str]:
    arguments = [command, "dump", "--pid", str(pid)]
    with contextlib.suppress(psutil.Error):
        if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
            arguments.append("--nonblocking")  # py-spy cannot stop it once more
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _stacks(child: subprocess.Popen[str] | None, pid: int) -> str:
    if child is None:
        return f"py-spy is not installed; {_ask(pid)}"
    try:
        output, _ = child.communicate(timeout=DUMP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return f"py-spy gave no answer within {DUMP_SECONDS:.0f} s; {_ask(pid)}"
    return output if child.returncode == 0 else f"py-spy: {output.strip()}; {_ask(pid)}"


def _ask(pid: int) -> str:
    try:
        os.kill(pid, signal.SIGUSR1)
    except OSError:
        return "the process has ended"
    return "asked it to write its stacks to its own stderr"


def _py_spy() -> str | None:
    with contextlib.suppress(OSError):
        beside = Path(sys.executable).with_name("py-spy")
        if beside.is_file():
            return str(beside)
    return shutil.which("py-spy")
