"""FX tracing and threads: `isolate` gives each thread its own state, `seams` reads what is shared, `repair` undoes leaks.

`isolate`, `isolated` and `self_check` import torch (and Dynamo) when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash.fx.checks import self_check as self_check
    from dflash.fx.isolation import isolate as isolate
    from dflash.fx.isolation import isolated as isolated

_LAZY = {"isolate": "dflash.fx.isolation", "isolated": "dflash.fx.isolation", "self_check": "dflash.fx.checks"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
