"""Act when a module has been imported, without importing it: most programs under the probes never need most of torch.

Standard library only. The finder steps aside at once for every other module, and leaves the module as it would have been:
its loader and spec are the original ones when the import ends.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Callback = Callable[[], None]


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.waiting: dict[str, list[Callback]] = {}
        self._asking = threading.local()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002 - Python's signature
        if name not in self.waiting or getattr(self._asking, "name", None) == name:
            return None
        self._asking.name = name
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking.name = None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, lambda: self.imported(name))
        return spec

    def imported(self, name: str) -> None:
        with self.lock:
            callbacks = self.waiting.pop(name, [])
        for callback in callbacks:
            callback()


class _Loader(importlib.abc.Loader):
    def __init__(self, original: Any, then: Callback) -> None:
        self._original, self._then = original, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._original.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._original
        module.__loader__ = self._original
        self._original.exec_module(module)
        self._then()


_finder = _Finder()


def when_imported(name: str, callback: Callback) -> Callback:
    """Call `callback` now if module `name` has been imported, else right after it is. Returns what takes it back."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        callback()
        return lambda: None
    with _finder.lock:
        _finder.waiting.setdefault(name, []).append(callback)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)

    def forget() -> None:
        with _finder.lock:
            if callback in _finder.waiting.get(name, []):
                _finder.waiting[name].remove(callback)
            if not any(_finder.waiting.values()) and _finder in sys.meta_path:
                sys.meta_path.remove(_finder)

    return forget


def exists(name: str) -> bool:
    """Whether module `name` could be imported, found without importing it or the packages around it."""
    path: Sequence[str] | None = None
    parts = name.split(".")
    for last, _ in enumerate(parts):
        so_far = ".".join(parts[: last + 1])
        module = sys.modules.get(so_far)
        if module is None:
            spec = importlib.machinery.PathFinder.find_spec(so_far, path)
            if spec is None:
                return False
            path = spec.submodule_search_locations
        else:
            path = getattr(module, "__path__", None)
    return True
