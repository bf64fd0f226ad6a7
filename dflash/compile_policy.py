"""Who may compile what, when, and under which protection from other threads.

| policy | threads compile | protected by |
|---|---|---|
| `prewarm` (default) | never: the main thread does it first, forward and backward; then frozen | isolation |
| `isolate` | at once, those of one device after its first, whose code they share | isolation |
| `lock` | in turns, while nobody else works | one lock around each first micro-batch |
| `force` | at once | `force_compile_during_fx_trace`: the error F1 only |
| `none` | at once | nothing: for measuring what the others are worth |
| `eager` | never, and nobody else does | |

Each drafter's forward is one `torch.compile(fullgraph=True, dynamic=False)` graph; the scoring of logits and the target's layers
may be compiled, too (`--compile.loss`, `--compile.target`). After a worker's first micro-batch of a kind (training, validation) a
compile is a failure, and so is a call that ran no graph, everywhere.

Isolated policies run backward in the calling thread: autograd's device thread is one for all threads of a GPU, can wait for the
compile lock that another thread holds (F8), and has none of the caller's settings from torch 2.12. Settings of Dynamo are
applied in every thread that does not see them (from torch 2.12 they are per thread, F9) and verified there.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config as functorch
from torch import nn
from torch._dynamo import config as dynamo
from torch._dynamo.backends.registry import lookup_backend

from dflash.compile_counts import CompileCounts, CompileReport
from dflash.config import CompileConfig, ConfigError
from dflash.fx.gpu_guard import without_gpu_guard
from dflash.fx.isolation import IsolationError, isolated
from dflash.turns import Turns

KINDS = 2  # training and validation
COMPILES_PER_KIND = 2  # Dynamo may split a guard once
_ISOLATED = frozenset({"prewarm", "isolate"})
_FORCE = "force_compile_during_fx_trace"
_BUDGET = "activation_memory_budget"


class RecompileError(RuntimeError):
    """Something compiled after the freeze, or ran uncompiled."""


class CompilePolicy:
    """Compiles drafters and watches all compiling in the process. Thread-safe; use `watching` around the whole run."""

    def __init__(self, config: CompileConfig, *, num_drafters: int) -> None:
        """Raises ConfigError when this torch cannot do what the policy needs."""
        self.config = config
        self._counts = CompileCounts()
        self._turns = Turns()
        self._begun: set[tuple[str, str]] = set()  # worker, work
        self._compiled: set[tuple[torch.device, str]] = set()
        self._firsts: dict[tuple[torch.device, str], threading.Lock] = {}
        # Per code object, over all drafters and devices; threads that compile at once each fill an entry with the same graph.
        self._settings: dict[str, Any] = {
            "recompile_limit": max(dynamo.recompile_limit, KINDS * COMPILES_PER_KIND * num_drafters)
        }
        self._partitioning: dict[str, Any] = {_BUDGET: config.activation_memory} if config.activation_memory < 1 else {}
        if self._partitioning and not hasattr(functorch, _BUDGET):
            raise ConfigError(f"compile.activation-memory: torch {torch.__version__} has no {_BUDGET}; leave it at 1")
        if config.policy == "force":
            if not hasattr(dynamo, _FORCE):
                raise ConfigError(f"compile.policy force: torch {torch.__version__} has no {_FORCE}; use prewarm or isolate")
            self._settings[_FORCE] = True

    @property
    def warms_up(self) -> bool:
        """Whether the main thread runs everything once before other threads exist."""
        return self.config.policy in {"prewarm", "eager"}

    def compiled(self, module: nn.Module | Callable[..., Any]) -> Callable[..., Any]:
        """The module or function as the policy lets it run. Raises ConfigError on an unknown backend."""
        if self.config.policy == "eager":
            return module
        return self._counts.counting_calls(torch.compile(module, fullgraph=True, dynamic=False, backend=self._backend))

    @functools.cached_property
    def _backend(self) -> Callable[..., Any]:
        """One for all drafters: Dynamo shares compiled code between drafters of one device only where the backend is the same."""
        try:
            backend = lookup_backend(self.config.backend)
        except Exception as error:
            raise ConfigError(f"compile.backend {self.config.backend!r} is not known to this torch: {error}") from error
        return self._counts.counting_runs(backend)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count every compile of the process, protect its threads, make room in Dynamo's cache. Restores what it changes.

        Raises ConfigError when the isolation that the policy needs cannot be had.
        """
        partitioning = functorch.patch(**self._partitioning)
        with without_gpu_guard(), self._isolation(), dynamo.patch(**self._settings), partitioning, self._counts.watching():
            yield

    @contextlib.contextmanager
    def in_worker(self) -> Iterator[None]:
        """The settings of a thread that compiles or runs compiled code. Raises ConfigError when they do not hold there."""
        with contextlib.ExitStack() as undo:
            if self.config.policy != "none":
                # Only where they are not seen: threads that patch settings of the process undo each other (F10).
                for module, settings in ((dynamo, self._settings), (functorch, self._partitioning)):
                    unseen = {name: value for name, value in settings.items() if getattr(module, name) != value}
                    if unseen:
                        undo.enter_context(module.patch(**unseen))
                self._verify()
            if self.config.policy in _ISOLATED:
                undo.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield

    @contextlib.contextmanager
    def turn(self, worker: str, work: str, device: torch.device) -> Iterator[None]:
        """One micro-batch of a worker on `device`. Its first one of each kind of work may compile."""
        first = (worker, work) not in self._begun
        with self._place(device, work, first=first), self._counts.expecting(first), _named_recompiles():
            yield
        self._begun.add((worker, work))

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """From here to the end of the block nothing compiles, but first micro-batches where the policy did not warm up."""
        self._counts.everything_is_expected = False
        with contextlib.ExitStack() as undo:
            if self.warms_up and not self.config.allow_recompiles:
                undo.enter_context(torch.compiler.set_stance("fail_on_recompile"))
            if self.config.policy != "none":
                undo.enter_context(_cache_entries_stay_in_place())
            undo.callback(setattr, self._counts, "everything_is_expected", True)
            yield

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
        """The counts now, of calls that have returned."""
        return self._counts.report(
            policy=self.config.policy,
            backend=self.config.backend if self.config.policy != "eager" else "none",
            allowed=self.config.allow_recompiles,
        )

    def _place(self, device: torch.device, work: str, *, first: bool) -> AbstractContextManager[None]:
        if self.config.policy == "lock":
            return self._turns.alone() if first else self._turns.together()
        if self.config.policy == "isolate" and first:
            return self._after_the_first(device, work)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _after_the_first(self, device: torch.device, work: str) -> Iterator[None]:
        """Wait while another worker of the device compiles this work; the code is shared (F12: each would compile it)."""
        key = (device, work)
        lock = self._firsts.setdefault(key, threading.Lock())
        with contextlib.ExitStack() as alone:
            alone.enter_context(lock)
            if key in self._compiled:
                alone.close()
            yield
            self._compiled.add(key)

    @contextlib.contextmanager
    def _isolation(self) -> Iterator[None]:
        if self.config.policy not in _ISOLATED:
            yield
            return
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(isolated())
            except IsolationError as error:
                raise ConfigError(f"compile.policy {self.config.policy}: {error}. Or use --compile.policy lock") from error
            try:
                yield
            except BaseException as error:
                try:
                    stack.close()
                except IsolationError as left:  # a thread of the failed run is still inside a trace
                    error.add_note(str(left))
                raise

    def _verify(self) -> None:
        expected = self._settings | self._partitioning
        found = {name: getattr(dynamo if name in self._settings else functorch, name) for name in expected}
        wrong = {name: value for name, value in found.items() if value != expected[name]}
        if wrong:
            raise ConfigError(
                f"Dynamo's settings do not hold in thread {threading.current_thread().name}: found {wrong}, "
                f"expected {expected}; something else in this process sets them"
            )


@contextlib.contextmanager
def _named_recompiles() -> Iterator[None]:
    """What torch says when it refuses to compile in the frozen state, as RecompileError."""
    try:
        yield
    except RuntimeError as error:
        if "stance is 'fail_on_recompile'" not in str(error):
            raise
        raise RecompileError(
            f"compiled after warm-up, and refused: {error}\nThe guard says what changed: a shape that was not declared, or a "
            "setting of the process. Keep it as it was in the warm-up, or name the function in --compile.allow-recompiles"
        ) from error


@contextlib.contextmanager
def _cache_entries_stay_in_place() -> Iterator[None]:
    """Stop Dynamo from moving the cache entry that a call used to the front of its list.

    A thread that searches the list just then may miss its own entry and recompile for nothing (F18). Training and validation
    are two entries that all drafters share.
    """
    switch: Callable[[bool], Any] | None = getattr(torch._C._dynamo.eval_frame, "_set_lru_cache", None)
    if switch is None:
        yield
        return
    switch(False)
    try:
        yield
    finally:
        switch(True)
