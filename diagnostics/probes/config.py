"""Settings that do not reach the thread they were meant for.

From torch 2.12 a setting of `torch._dynamo.config` or `torch._inductor.config` belongs to the thread that made it: a
`recompile_limit` set in the main thread is the default elsewhere, also in autograd's own threads (F9). Up to torch 2.11 there
is one value for all, and patches of several threads that end out of order leave it changed (F10). Both are found by what the
program itself sets: each value is compared, in the thread that compiles, with what that thread reads; and at the end with the
value that was there before the program's patches.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from diagnostics import patch
from diagnostics.probes.probe import Probe
from diagnostics.records import Log, Observation
from diagnostics.who import inside_dynamo, program_lines, thread_name

_WATCHED = ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config")
_CONFIG_MODULE = "_config_module.py"
_SIMPLE = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class _Setting:
    value: Any
    thread: str
    ident: int
    where: tuple[str, ...]


@dataclass
class _Patches:
    """The program's `config.patch` blocks of one name that are open, over all threads."""

    before: Any
    idents: set[int] = field(default_factory=set)
    threads: dict[str, None] = field(default_factory=dict)
    open: int = 0


class ConfigProbe(Probe):
    """Writes down settings that a compiling thread does not see, and values that overlapping patches left behind."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self._lock = threading.Lock()
        self._settings: dict[tuple[str, str], _Setting] = {}
        self._patches: dict[tuple[str, str], _Patches] = {}

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        report = self._log.not_observed
        with contextlib.ExitStack() as stack:
            stack.enter_context(patch.SETTING.subscribed(self._set, report))
            stack.enter_context(patch.COMPILE.subscribed(self._compiles, report))
            stack.enter_context(patch.GRAPH.subscribed(self._compiles, report))
            yield

    def _set(self, arguments: tuple[Any, ...], _keywords: dict[str, Any]) -> patch.Finish | None:
        module, name, value = arguments
        module_name = getattr(module, "__name__", "")
        if module_name not in _WATCHED or not isinstance(value, _SIMPLE) or inside_dynamo():
            return None
        how = _how()
        if how is None:
            return None
        key = (module_name, name)
        if how == "__enter__":
            self._opens(key, getattr(module, name))
        elif how == "__exit__":
            return lambda _result, _error: self._closes(key, module)
        self._settings[key] = _Setting(value, thread_name(), threading.get_ident(), program_lines())
        return None

    def _compiles(self, _arguments: tuple[Any, ...], _keywords: dict[str, Any]) -> None:
        me = threading.get_ident()
        for (module_name, name), setting in list(self._settings.items()):
            if setting.ident == me:
                continue
            seen = getattr(sys.modules[module_name], name)
            if seen != setting.value:
                self._add("sees", module_name, name, (setting.thread, thread_name()), set_to=setting.value, seen=seen,
                          where_first=list(setting.where))  # fmt: skip

    def _opens(self, key: tuple[str, str], before: Any) -> None:
        with self._lock:
            patches = self._patches.setdefault(key, _Patches(before))
            patches.open += 1
            patches.idents.add(threading.get_ident())
            patches.threads[thread_name()] = None

    def _closes(self, key: tuple[str, str], module: Any) -> None:
        self._settings.pop(key, None)
        with self._lock:
            patches = self._patches.get(key)
            if patches is None:
                return
            patches.open -= 1
            if patches.open > 0:
                return
            del self._patches[key]
        found = getattr(module, key[1])
        if len(patches.idents) > 1 and found != patches.before:
            self._add("left", *key, tuple(patches.threads), set_to=patches.before, seen=found)

    def _add(self, what: str, module: str, name: str, threads: tuple[str, ...], **fields: Any) -> None:
        self._log.add(
            Observation(
                kind="setting",
                name=f"{module}.{name}",
                threads=threads,
                where=program_lines(),
                time_seconds=time.time(),
                fields={"what": what, **fields},
            )
        )


def _how() -> str | None:
    """`set` for an assignment of the program, `__enter__` or `__exit__` for its `config.patch`, None for torch's own."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not frame.f_code.co_filename.endswith(_CONFIG_MODULE):
        frame = frame.f_back
    how = "set"
    caller = frame.f_back
    while caller is not None and caller.f_code.co_filename.endswith((_CONFIG_MODULE, "contextlib.py")):
        if caller.f_code.co_name in ("__enter__", "__exit__"):
            how = caller.f_code.co_name
        caller = caller.f_back
    if caller is None or "/torch/" in caller.f_code.co_filename:
        return None
    return how
