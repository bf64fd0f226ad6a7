"""Python imports a module of this name at the start of every process; below fxprobe it is this one, through PYTHONPATH.

It runs the environment's own `sitecustomize`, if there is one, and hands over to `diagnostics.process`. It leaves no trace
in this process but `PYTHONPATH`, which child processes need. Standard library only: most processes never import torch.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

_HERE = Path(__file__).absolute().parent


def _others() -> list[str]:
    return [path for path in sys.path if Path(path).absolute() != _HERE]


def _run_the_environments_own() -> None:
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError("No module named 'sitecustomize'", name="sitecustomize")  # as without us; `site` goes on
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _watch() -> None:
    root = str(_HERE.parent.parent)
    sys.path.insert(0, root)
    try:
        from diagnostics import apart, process  # noqa: PLC0415 - only now can they be found
    finally:
        sys.path.remove(root)  # nothing of the program's is hidden
    process.start(os.environ["FXPROBE_JOURNALS"])
    if apart.VARIABLE in os.environ:
        apart.hide()


sys.path[:] = _others()
if "FXPROBE_JOURNALS" in os.environ:
    _watch()
_run_the_environments_own()
