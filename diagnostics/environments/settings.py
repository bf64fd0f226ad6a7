"""Settings of Dynamo, Inductor and their like that differ from torch's defaults. Nothing is imported: that would take seconds.

Two sources. In a program that has imported a config module: its values that differ from the default written there. And every
variable that is set and that the source of a config module reads, as "FIELD of MODULE reads VARIABLE". Limits: a value that a
program set in another process is not seen; a variable read through a helper outside the module is seen among the variables only.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from diagnostics.environments.masking import masked_variable

MODULES = ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config", "torch.fx.experimental._config")
_PLAIN = (bool, int, float, str, type(None))


def differing() -> dict[str, str]:
    """Setting -> what it is, and why it differs."""
    found = dict(_from_variables(os.environ))
    for name in MODULES:
        module = sys.modules.get(name)
        if module is not None:
            found.update(_live(name, module))
    return found


def _live(name: str, module: Any) -> Iterator[tuple[str, str]]:
    entries: dict[str, Any] | None = getattr(module, "_config", None)
    if not isinstance(entries, dict):
        yield name, "not observed: this torch keeps its settings in another way"
        return
    for key, entry in entries.items():
        default, missing = getattr(entry, "default", None), not hasattr(entry, "default")
        if missing or not isinstance(default, _PLAIN) or key.startswith("_") or getattr(entry, "alias", None) is not None:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # to look at a deprecated setting is not to use it
            value = getattr(module, key, default)
        if isinstance(value, _PLAIN) and value != default:
            yield f"{name}.{key}", f"{masked_variable(key, str(value))} (default {default})"


def _from_variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name in MODULES:
        path = _source(name)
        try:
            tree = None if path is None else ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError) as error:
            yield name, f"not observed: {error}"
            continue
        for setting, variables in _readers(tree) if tree is not None else ():
            told = [f"{each}={masked_variable(each, environment[each])}" for each in variables if each in environment]
            if told:
                yield f"{name}.{setting}", f"set by {', '.join(told)}"


def _source(name: str) -> Path | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))).joinpath(*name.split(".")[1:]).with_suffix(".py")
    return path if path.exists() else None


def _readers(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Each assignment whose value names something in capitals that could be a variable, also inside classes (`triton.x`)."""
    for prefix, node in _assignments("", tree.body):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        strings = [
            each.value
            for each in ast.walk(node.value or node)
            if isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value.isupper() and "_" in each.value
        ]
        for target in targets:
            if strings and isinstance(target, ast.Name):
                yield f"{prefix}{target.id}", list(dict.fromkeys(strings))


def _assignments(prefix: str, body: list[ast.stmt]) -> Iterator[tuple[str, ast.Assign | ast.AnnAssign]]:
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            yield prefix, node
        elif isinstance(node, ast.ClassDef):
            yield from _assignments(f"{prefix}{node.name}.", node.body)
