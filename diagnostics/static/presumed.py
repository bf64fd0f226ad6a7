"""Method names of tensors and of Python's own types: a method of that name, of an object of unknown class, is taken for one.

Otherwise every `x.view(...)` would be something that a scan could not follow. Such calls are counted.
Known limit: a class of the scanned program with a method of the same name, in an object of unknown class, is missed.
"""

from __future__ import annotations

import ast
import builtins
import collections
import inspect
import io
import logging
import pathlib
import re
import sys
import threading
import types
from functools import cached_property
from pathlib import Path

from diagnostics.static.sources import Sources

_TYPES: tuple[type, ...] = (
    *(str, bytes, bytearray, list, tuple, dict, set, frozenset, int, float, complex, slice, range, type, property),
    *(types.FunctionType, types.GeneratorType, types.ModuleType, types.CodeType, BaseException),
    *(collections.deque, collections.OrderedDict, collections.Counter, collections.defaultdict, collections.ChainMap),
    *(io.TextIOWrapper, io.BytesIO, io.StringIO, re.Pattern, re.Match, pathlib.Path, logging.Logger),
    *(threading.Thread, threading.Event, type(threading.Lock()), inspect.Signature, inspect.BoundArguments, ast.AST),
)


class PresumedMethods:
    """The names, read from Python and from the stubs of the installed torch."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def has(self, name: str) -> bool:
        """Whether tensors or Python's own types have a method of this name."""
        return name in self._names

    def is_missing(self, name: str) -> bool:
        """Whether the dotted `name` is of a module that is not installed, so that nobody knows what it does."""
        top = name.partition(".")[0]
        return (
            top not in {*sys.stdlib_module_names, "builtins"}
            and not self._sources.is_leaf(top)
            and self._sources.place(top) is None
        )

    @cached_property
    def _names(self) -> frozenset[str]:
        names = {name for one in (*_TYPES, builtins) for name in dir(one)}
        torch = self._sources.place("torch")
        if torch is not None and torch.source is not None:
            stubs = torch.source.parent / "_C"
            for file in ("__init__.pyi", "_VariableFunctions.pyi"):
                if (stubs / file).exists():
                    names |= set(re.findall(r"^(?: {4})?def (\w+)", _tensor_part(stubs / file), re.MULTILINE))
        tensor = self._sources.module("torch._tensor")
        if tensor is not None:
            names |= {node.name for node in ast.walk(tensor.node) if isinstance(node, ast.FunctionDef)}
        return frozenset(names)


def _tensor_part(path: Path) -> str:
    """The class TensorBase of the stubs of torch._C; all of another file."""
    text = path.read_text()
    start = text.find("class TensorBase")
    if start < 0:
        return text
    end = text.find("\nclass ", start)
    return text[start:end] if end > 0 else text[start:]
