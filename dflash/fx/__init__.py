"""FX tracing and threads: `isolate` gives each thread its own state, `seams` reads what is shared, `repair` undoes leaks.

`isolate`, `isolated`, `self_check` and `limits` import torch (and Dynamo) when they are first asked for. In a sub-interpreter
asking raises IsolationError and imports nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dflash.fx.interpreters import IsolationError as IsolationError
from dflash.fx.interpreters import refuse_sub_interpreter

if TYPE_CHECKING:
    from dflash.fx.checks import self_check as self_check
    from dflash.fx.isolation import isolate as isolate
    from dflash.fx.isolation import isolated as isolated
    from dflash.fx.overlaps import IsolationWarning as IsolationWarning
    from dflash.fx.overlaps import limits as limits

_LAZY = {
    "isolate": "dflash.fx.isolation",
    "isolated": "dflash.fx.isolation",
    "self_check": "dflash.fx.checks",
    "limits": "dflash.fx.overlaps",
    "IsolationWarning": "dflash.fx.overlaps",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    refuse_sub_interpreter()
    return getattr(importlib.import_module(_LAZY[name]), name)
