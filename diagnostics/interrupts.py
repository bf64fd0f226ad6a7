"""Ctrl-C while a command still imports ends it quietly with 130, without a traceback of half-done imports.

A command imports this before everything else that takes time. Where another program imports a command as a module, nothing is
changed. `diagnostics.output.ended_plainly` gives Ctrl-C back to Python when the command's own work begins. Standard library only.
Known limit: the first hundredths of a second, in which Python itself starts, are Python's.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130  # 128 + SIGINT, as shells say it
_COMMANDS = {f"diagnostics.{name}" for name in ("bisect", "compile_cache", "environment", "timeline", "triage")}


def as_usual() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)  # nothing has been written yet, and an exception would be told with a traceback


def _is_command() -> bool:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name in _COMMANDS


if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell ignores it
    signal.signal(signal.SIGINT, _end)
