"""Who and where: the name of the running thread and the lines of the program that led here, found without side effects."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType, TracebackType

import torch

_TORCH = str(Path(torch.__file__).parent)
_HERE = Path(__file__).parent
_OURS = (str(_HERE), str(_HERE / "probes"))  # not the scenarios beside them: those are programs
_MACHINERY = ("<frozen ", threading.__file__, contextlib.__file__, str(Path(threading.__file__).parent / "concurrent"))
_MAX_LINES = 6


def thread_name() -> str:
    """The running thread's name. A thread that Python did not start (autograd's device threads) is named by its number."""
    # threading.current_thread() would register such a thread for ever.
    known = getattr(threading, "_active", {}).get(threading.get_ident())
    return known.name if known is not None else f"native thread {threading.get_native_id()}"


def program_lines(limit: int = _MAX_LINES) -> tuple[str, ...]:
    """The program's last `limit` lines on this thread's stack, the innermost last; torch's own if there are no others."""
    frames: list[tuple[str, int, str]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return _lines(frames[::-1], limit)


def traceback_lines(trace: TracebackType | None, limit: int = _MAX_LINES) -> tuple[str, ...]:
    """The same of an exception's traceback."""
    return _lines([(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in traceback.walk_tb(trace)], limit)


def inside_dynamo() -> bool:
    """This thread is inside a compile of Dynamo."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_compile" and code.co_filename.endswith("convert_frame.py"):
            return True
        frame = frame.f_back
    return False


def _lines(frames: list[tuple[str, int, str]], limit: int) -> tuple[str, ...]:
    """`frames` from the outermost to the innermost."""
    others = [frame for frame in frames if not frame[0].startswith(_MACHINERY) and str(Path(frame[0]).parent) not in _OURS]
    program = [frame for frame in others if not frame[0].startswith(_TORCH)]
    return tuple(f"{_short(path)}:{line} {function}" for path, line, function in (program or others)[-limit:])


def _short(path: str) -> str:
    here = str(Path.cwd()) + "/"
    return path.rpartition("site-packages/")[2].removeprefix(here)
