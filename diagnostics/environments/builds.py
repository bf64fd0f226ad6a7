"""Which build of torch is installed, without importing it: so a torch that cannot be imported is described too.

Two builds of one commit are told apart by `cuda` (or `hip`) and by `record`, the hash of the wheel's files; two commits by `git`.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diagnostics.environments.distributions import Distribution

_FIELDS = {"__version__": "version", "git_version": "git", "cuda": "cuda", "hip": "hip", "xpu": "xpu", "debug": "debug"}


def torch_build(distributions: Sequence[Distribution]) -> dict[str, Any]:
    """Version, git commit, CUDA and hash of the installed torch; `not_observed` says why something is missing."""
    record = next((one.record for one in distributions if one.name == "torch"), None)
    empty = dict.fromkeys(_FIELDS.values())
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError) as error:
        return {**empty, "record": record, "not_observed": f"torch cannot be found: {error}"}
    if spec is None or not spec.submodule_search_locations:
        return {**empty, "record": record, "not_observed": "torch is not installed in this Python"}
    path = Path(next(iter(spec.submodule_search_locations))) / "version.py"
    try:
        return {**empty, **_assigned(path.read_text(encoding="utf-8")), "record": record}
    except (OSError, SyntaxError, ValueError) as error:
        return {**empty, "record": record, "not_observed": f"torch/version.py cannot be read: {error}"}


def _assigned(text: str) -> dict[str, Any]:
    """The constants that version.py assigns."""
    values = {}
    for node in ast.parse(text).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Constant):
            values.update(
                {_FIELDS[target.id]: value.value for target in targets if isinstance(target, ast.Name) and target.id in _FIELDS}
            )
    return values
