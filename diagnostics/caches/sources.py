"""torch's hash of its own sources, which entries of a cache hold, without importing torch: torch's own lines, run on its files.

Which files are hashed differs between versions (2.14 hashes one more than 2.13), so the functions that do it are taken from the
text of the installed torch and run, with the few names that they use. To import torch for it takes some 4 s, this 0.2 s.
Nothing is kept: a source of torch that was edited gives another hash at once.

Equal to torch's own value on 2.11.0+cu130, 2.13.0+cpu and 2.14.1+cu130; the lines of 2.12 and 2.15 use the same names.
A torch whose lines use others is told by UnknownTorch, with the name.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import pkgutil
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_HASHES = "_inductor/codecache.py"
_FUNCTIONS = (("_environment.py", "is_fbcode"), (_HASHES, "build_code_hash"), (_HASHES, "torch_key"))


class UnknownTorch(Exception):
    """The hash could not be computed; says why."""


def hash_of_sources(folder: Path, version: str) -> bytes:
    """What `torch._inductor.codecache.torch_key()` returns for the torch in `folder`, whose `__version__` is `version`.

    Raises UnknownTorch where this torch's lines cannot be found, or do not run by themselves.
    """
    names: dict[str, Any] = {
        "hashlib": hashlib,
        "os": os,
        "pkgutil": pkgutil,
        "torch": SimpleNamespace(__version__=version),
        "dynamo_timed": lambda *_, **__: contextlib.nullcontext(),
        "_TORCH_PATH": str(folder),
        "__file__": str(folder / _HASHES),
    }
    try:
        for file, function in _FUNCTIONS:
            lines = _lines(folder / file, function)
            exec(compile(lines, str(folder / file), "exec", dont_inherit=True), names)  # noqa: S102 - torch's, as an import runs it
        names["config"] = SimpleNamespace(is_fbcode=names["is_fbcode"])
        importlib.invalidate_caches()  # finders remember a folder's files
        value = names["torch_key"]()
    except UnknownTorch:
        raise
    except Exception as error:  # lines of any torch may raise anything
        why = f"{type(error).__name__}: {error}"
        raise UnknownTorch(f"torch {version} hashes its sources in another way than known: {why}") from error
    if not isinstance(value, bytes):
        raise UnknownTorch(f"torch {version} hashes its sources to a {type(value).__name__}, bytes were expected")
    return value


def _lines(file: Path, function: str) -> str:
    """The text of a function, without decorators; its annotations name what is not imported here. Raises UnknownTorch."""
    found = re.findall(rf"^def {function}\(.*?(?=^[^\s)#]|\Z)", file.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    if len(found) != 1:
        raise UnknownTorch(f"{file} defines {function} {len(found)} times, not once: how it hashes its sources is unknown")
    return f"from __future__ import annotations\n{found[0]}"
