"""What compiling did in a run: compiles, runs of compiled graphs, calls that ran none, warnings of uncompiled execution.

Silent uncompiled execution cannot hide: each compiled graph counts its runs, and a call that ran no graph is a fallback. A
compile is expected or not by the thread that does it (`expecting`); an unexpected one is told with its function, line, thread
and the guard that failed.

Known limit: the counting needs a backend that Dynamo calls with the graph, which all of torch's backends are. A backward that is
compiled at its first use is part of its forward's compile and not counted by itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.utils import counters, guard_failures

from dflash.fx import seams


@dataclass(frozen=True, kw_only=True)
class CompileReport:
    """What compiling did in this run."""

    policy: str
    backend: str
    compiles_in_warmup: int  # every compile that was expected
    recompiles_after_warmup: tuple[str, ...]  # one line each: function, place, thread, reason
    calls: int  # calls of compiled functions that returned
    graph_runs: int  # of them, those that ran a compiled graph
    graph_breaks: int
    fallbacks: tuple[str, ...]  # one line each


class CompileCounts:
    """Counts while `watching`. Thread-safe."""

    def __init__(self) -> None:
        self.everything_is_expected = True  # until the policy says otherwise
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._calls = 0
        self._bypassed = 0  # of them, those that ran no graph
        self._graph_runs = 0
        self._expected = 0
        self._unexpected: list[tuple[str, str]] = []
        self._reasons_seen: dict[CodeType, int] = {}  # Dynamo keeps one reason for each cache entry that did not fit
        self._graph_breaks_before = 0
        self._warnings_before: frozenset[str] = frozenset()  # a process remembers them for ever

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count every compile of the process inside the block."""
        self._graph_breaks_before = sum(counters["graph_break"].values())
        self._warnings_before = frozenset(seams.fallback_warnings())
        handle = register_bytecode_hook(self._on_compile)
        try:
            yield
        finally:
            handle.remove()

    @contextlib.contextmanager
    def expecting(self, expected: bool) -> Iterator[None]:
        """Whether this thread may compile inside the block."""
        before = getattr(self._thread, "expects", False)
        self._thread.expects = expected
        try:
            yield
        finally:
            self._thread.expects = before

    def counting_calls(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` (compiled), each call counted."""

        def call(*args: Any, **named: Any) -> Any:
            before = self._runs_of_thread()
            result = function(*args, **named)
            with self._lock:
                self._calls += 1
                self._bypassed += self._runs_of_thread() == before
            return result

        return call

    def counting_runs(self, backend: Callable[..., Any]) -> Callable[..., Any]:
        """`backend`, each run of a graph that it compiles counted."""

        def counted_backend(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor], **options: Any) -> Any:
            run = backend(graph, example_inputs, **options)

            def counted(*args: Any) -> Any:
                self._thread.runs = self._runs_of_thread() + 1
                with self._lock:
                    self._graph_runs += 1
                return run(*args)

            return counted

        return counted_backend

    def report(self, *, policy: str, backend: str, allowed: tuple[str, ...]) -> CompileReport:
        """The counts now, of calls that have returned; `allowed` functions may compile at any time."""
        graph_breaks = sum(counters["graph_break"].values()) - self._graph_breaks_before
        with self._lock:
            fallbacks = [warning for warning in seams.fallback_warnings() if warning not in self._warnings_before]
            if self._bypassed:
                fallbacks.append(f"{self._bypassed} of {self._calls} calls of compiled functions ran no compiled graph")
            if graph_breaks:
                fallbacks.append(f"{graph_breaks} graph breaks: {', '.join(map(repr, counters['graph_break']))}")
            return CompileReport(
                policy=policy,
                backend=backend,
                compiles_in_warmup=self._expected,
                recompiles_after_warmup=tuple(line for name, line in self._unexpected if name not in allowed),
                calls=self._calls,
                graph_runs=self._graph_runs,
                graph_breaks=graph_breaks,
                fallbacks=tuple(fallbacks),
            )

    def _runs_of_thread(self) -> int:
        """Graphs that this thread has run; a call runs its graph in its own thread."""
        return getattr(self._thread, "runs", 0)

    def _on_compile(self, code: CodeType, new_code: CodeType) -> None:  # noqa: ARG002 - Dynamo's hook signature
        with self._lock:
            known = guard_failures.get(code, [])
            reasons = [str(reason).strip() for reason in known[self._reasons_seen.get(code, 0) :]]
            self._reasons_seen[code] = len(known)
            if self.everything_is_expected or getattr(self._thread, "expects", False):
                self._expected += 1
                return
            place = f"{code.co_filename}:{code.co_firstlineno}"
            why = "; ".join(reasons) or "first compile of this function"
            line = f"- {code.co_name} ({place}) in thread {threading.current_thread().name}: {why}"
            self._unexpected.append((code.co_name, line))
