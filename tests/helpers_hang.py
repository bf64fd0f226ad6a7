"""Threads as py-spy prints them, in the places of the installed torch where they wait."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from diagnostics.stacks import Snapshot, parse
from diagnostics.waiting import HangReport, analyse


def torch_file(name: str) -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / name


CONVERT_FRAME = torch_file("_dynamo/convert_frame.py")
ENGINE = ("_engine_run_backward", str(torch_file("autograd/graph.py")), "return Variable._execution_engine.run_backward(")
COMPILE = ("ConvertFrame._compile", str(CONVERT_FRAME), "def _compile(")
LOCK_HEAD = ("__call__", str(CONVERT_FRAME), "with compile_lock, _disable_current_modes():")
LOCK_BODY = ("__call__", str(CONVERT_FRAME), "frame, cache_entry, self.hooks, frame_state, skip=1")
BACKWARD_HEAD = ("compile_fx_backward", str(torch_file("_inductor/compile_fx.py")), "with compile_lock:")
AOT_AUTOGRAD = "/v/site-packages/torch/_functorch/aot_autograd.py"
PROGRAM = ("step", "/home/me/train.py", "")


def line_of(file: str, text: str) -> int:
    """The number of the last line of a real source file that holds `text`, so that the test follows torch."""
    lines = Path(file).read_text().splitlines() if text else []
    return max((number for number, line in enumerate(lines, 1) if text in line), default=1)


def thread(name: str | None, number: int, *frames: tuple[str, str, str], active: bool = False) -> dict[str, Any]:
    """One thread as py-spy prints it, the innermost frame first."""
    return {
        "pid": 1, "thread_id": number * 1000, "thread_name": name, "os_thread_id": number, "active": active, "owns_gil": False,
        "frames": [
            {"name": function, "filename": file, "module": None, "short_filename": Path(file).name, "line": line_of(file, text),
             "locals": None, "is_entry": False}
            for function, file, text in frames
        ],
    }  # fmt: skip


def snapshot(*threads: dict[str, Any], cpu_seconds: float = 0.0, at_seconds: float = 0.0) -> Snapshot:
    return Snapshot(pid=1, stacks=parse(json.dumps(threads)), cpu_seconds=cpu_seconds, at_seconds=at_seconds)


def look_twice(*threads: dict[str, Any]) -> HangReport:
    return analyse(snapshot(*threads), snapshot(*threads, at_seconds=5.0))


HOLDER = thread("compiles", 11, ENGINE, COMPILE, LOCK_BODY, PROGRAM)
DEVICE = thread("pt_autograd_0", 12, LOCK_HEAD, ("backward", "/home/me/train.py", ""))
TRAINER = thread("trains", 13, ENGINE, PROGRAM)
WAITER = thread("waits", 14, LOCK_HEAD, PROGRAM)
COLLECTIVE = thread("rank", 1, ("barrier", "/v/site-packages/torch/distributed/distributed_c10d.py", ""), PROGRAM)
RESTING = thread("queue", 2, ("wait", "/usr/lib/python3.11/threading.py", ""), PROGRAM)
