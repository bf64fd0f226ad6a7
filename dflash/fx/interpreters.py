"""Sub-interpreters: torch keeps its state, and threads their values, for the process; isolation is refused there.

What happens there without the refusal: with Python 3.11 `import torch` never returns; with 3.12 it raises ImportError in an
isolated sub-interpreter, and works in one that shares the lock of the main one, as web servers make them. Imports no torch,
so that the refusal comes before any of it.
"""

from __future__ import annotations

import _thread
import importlib
from typing import Any

_MODULES = ("_interpreters", "_xxsubinterpreters")  # Python 3.13 and later, and before; neither is documented


class IsolationError(RuntimeError):
    """Isolation was not installed, or not removed; nothing was changed. The message says why and what to do."""


def refuse_sub_interpreter() -> None:
    """Raises IsolationError in any but the main interpreter. Where Python does not tell, it is taken for the main one."""
    if not _is_main():
        raise IsolationError(
            "this is a sub-interpreter: torch keeps its state for the whole process, so that threads of other interpreters could "
            "not be isolated from this one. Use torch in the main interpreter, or in processes; nothing was changed"
        )


def _is_main() -> bool:
    tells: Any = getattr(_thread, "_is_main_interpreter", None)
    if tells is not None:
        return bool(tells())
    for name in _MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        return bool(module.get_current() == module.get_main())
    return True
