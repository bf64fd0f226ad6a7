"""What this torch has of what the failures need: looked for, never concluded from a version number.

Each `why_not_*` returns None where the failure can happen, else the reason why it cannot.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import Any

import torch
import torch._dynamo.config
from torch.utils import backend_registration

from dflash.fx import seams


def why_not_shared_flag() -> str | None:
    """F1, F2, F6 need a tracing flag that is one for the process."""
    return "the tracing flag is per thread" if seams.tracing_state().flag_scope == "thread" else None


def why_not_config_per_thread() -> str | None:
    """F9 needs config values that each thread has of its own."""
    return None if config_is_per_thread() else "config values are one for the process"


def why_not_shared_config() -> str | None:
    """F10 needs config values that are one for the process."""
    return "config values are per thread" if config_is_per_thread() else None


def why_not_compiling_flag() -> str | None:
    """F11 needs a flag of the process that every compile sets."""
    return None if hasattr(torch.compiler, "_compile_session_context") else "a compile does not set the flag of the process"


def why_not_frame_count() -> str | None:
    """F19 needs the count of compiled frames in a fullgraph call, and an error where it is 0."""
    eval_frame = torch._dynamo.eval_frame
    if not hasattr(eval_frame, "set_fullgraph_compiled_frame_count"):
        return "compiled frames are not counted"
    if not hasattr(eval_frame, "get_skip_reasons"):
        return "a fullgraph call without a compiled frame only warns"
    return None if _frame_count_is_shared() else "the count of compiled frames is per thread"


def why_no_python_device() -> str:
    """F8 is tried with a device made in Python; empty where torch can make one."""
    found = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
    return "" if found else "this torch cannot make a device in Python"


def _frame_count_is_shared() -> bool:
    """What one thread sets, another reads; the count is put back."""
    exchange: Any = vars(torch._dynamo.eval_frame)["set_fullgraph_compiled_frame_count"]
    mark, seen = 12345, list[int]()
    before = exchange(mark)
    thread = threading.Thread(target=lambda: seen.append(exchange(mark)))
    thread.start()
    thread.join()
    exchange(before)
    return seen == [mark]


def config_is_per_thread() -> bool:
    """Values of torch._dynamo.config are context variables."""
    entries: Any = vars(torch._dynamo.config)["_config"]
    return isinstance(entries["recompile_limit"].user_override, ContextVar)
