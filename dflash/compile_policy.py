"""Who may compile what, when: once, alone, in this process, forward and backward; then frozen.

Policy `prewarm`: every drafter's forward is one `torch.compile(fullgraph=True, dynamic=False)` graph, compiled by the main
thread before any worker thread exists (reference: fx-race table of remedies). Policy `eager`: nothing is compiled.

After the freeze a compile is a failure, with the function, its line, the thread and the failed guards in the message. Silent
uncompiled execution cannot hide: each compiled graph counts its runs, and a call that ran no graph is a fallback.

Known limit: the counting needs a backend that Dynamo calls with the graph, which all of torch's backends are.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.utils import counters, guard_failures

from dflash.config import CompileConfig, ConfigError
from dflash.fx import seams

ENTRIES_PER_DRAFTER = 4  # training and validation, each once more when Dynamo has to split a guard


class RecompileError(RuntimeError):
    """Something compiled after the freeze, or ran uncompiled."""


@dataclass(frozen=True, kw_only=True)
class CompileReport:
    """What compiling did in this run."""

    policy: str
    backend: str
    compiles_in_warmup: int
    recompiles_after_warmup: tuple[str, ...]  # one line each: function, place, thread, reason
    calls: int  # calls of compiled functions
    graph_runs: int  # of them, those that ran a compiled graph
    graph_breaks: int
    fallbacks: tuple[str, ...]  # one line each


class CompilePolicy:
    """Compiles drafters and watches all compiling in the process. Thread-safe; use `watching` around the whole run."""

    def __init__(self, config: CompileConfig, *, num_drafters: int) -> None:
        self.config = config
        self._num_drafters = num_drafters
        self._lock = threading.Lock()
        self._calls = 0
        self._graph_runs = 0
        self._compiles_in_warmup = 0
        self._after_warmup: list[tuple[str, str]] = []
        self._frozen = False
        self._graph_breaks_before = 0
        self._warnings_before: frozenset[str] = frozenset()  # a process remembers them for ever

    def compiled(self, module: nn.Module) -> Callable[..., torch.Tensor]:
        """The module as the policy lets it run. Raises ConfigError on an unknown backend."""
        if self.config.policy == "eager":
            return module
        try:
            inner = lookup_backend(self.config.backend)
        except Exception as error:
            raise ConfigError(f"compile.backend {self.config.backend!r} is not known to this torch: {error}") from error
        function = torch.compile(module, fullgraph=True, dynamic=False, backend=self._counting(inner))

        def call(*args: Any) -> torch.Tensor:
            with self._lock:
                self._calls += 1
            result: torch.Tensor = function(*args)
            return result

        return call

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count every compile of the process, and make room in Dynamo's cache for all drafters. Restores what it changes."""
        self._graph_breaks_before = sum(counters["graph_break"].values())
        self._warnings_before = frozenset(seams.fallback_warnings())
        limit = max(torch._dynamo.config.recompile_limit, ENTRIES_PER_DRAFTER * self._num_drafters)
        handle = register_bytecode_hook(self._on_compile)
        try:
            with torch._dynamo.config.patch(recompile_limit=limit):
                yield
        finally:
            handle.remove()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """From here to the end of the block nothing may compile, except functions allowed by name."""
        stance = "default" if self.config.allow_recompiles else "fail_on_recompile"
        self._frozen = True
        try:
            with torch.compiler.set_stance(stance), _cache_entries_stay_in_place():
                yield
        finally:
            self._frozen = False

    def check(self) -> None:
        """Raise RecompileError if anything compiled or fell back since the freeze that was not allowed."""
        report = self.report()
        if report.recompiles_after_warmup:
            raise RecompileError(
                "compiled after warm-up:\n"
                + "\n".join(report.recompiles_after_warmup)
                + "\nA shape that was not declared reached a compiled function. Fix the shape, or name the function in "
                "--compile.allow-recompiles"
            )
        if report.fallbacks:
            raise RecompileError("compiled code was bypassed:\n" + "\n".join(report.fallbacks))

    def report(self) -> CompileReport:
        """The counters now. Calls still running in another thread count as fallbacks until they return: ask between steps."""
        graph_breaks = sum(counters["graph_break"].values()) - self._graph_breaks_before
        with self._lock:
            fallbacks = [warning for warning in seams.fallback_warnings() if warning not in self._warnings_before]
            if self._calls > self._graph_runs:
                fallbacks.append(
                    f"{self._calls - self._graph_runs} of {self._calls} calls of compiled functions ran no compiled graph"
                )
            if graph_breaks:
                fallbacks.append(f"{graph_breaks} graph breaks: {', '.join(map(repr, counters['graph_break']))}")
            return CompileReport(
                policy=self.config.policy,
                backend=self.config.backend if self.config.policy != "eager" else "none",
                compiles_in_warmup=self._compiles_in_warmup,
                recompiles_after_warmup=tuple(
                    line for name, line in self._after_warmup if name not in self.config.allow_recompiles
                ),
                calls=self._calls,
                graph_runs=self._graph_runs,
                graph_breaks=graph_breaks,
                fallbacks=tuple(fallbacks),
            )

    def _counting(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def backend(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor], **options: Any) -> Callable[..., Any]:
            run = inner(graph, example_inputs, **options)

            def counted(*args: Any) -> Any:
                with self._lock:
                    self._graph_runs += 1
                return run(*args)

            return counted

        return backend

    def _on_compile(self, code: CodeType, new_code: CodeType) -> None:  # noqa: ARG002 - Dynamo's hook signature
        with self._lock:
            if not self._frozen:
                self._compiles_in_warmup += 1
                return
            reasons = guard_failures.get(code) or ["first compile of this function"]
            place = f"{code.co_filename}:{code.co_firstlineno}"
            line = f"- {code.co_name} ({place}) in thread {threading.current_thread().name}: {reasons[-1]}"
            self._after_warmup.append((code.co_name, line))


@contextlib.contextmanager
def _cache_entries_stay_in_place() -> Iterator[None]:
    """Stop Dynamo from moving the cache entry that a call used to the front of its list.

    A thread that searches the list just then may miss its own entry and recompile for nothing (F18). Training and validation
    are two entries that all drafters share.
    """
    switch: Callable[[bool], object] | None = getattr(torch._C._dynamo.eval_frame, "_set_lru_cache", None)
    if switch is None:
        yield
        return
    switch(False)
    try:
        yield
    finally:
        switch(True)
