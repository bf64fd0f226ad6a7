"""What a program can do against the failures, as switches that a recipe runs under; a cure is tried, not believed.

The policy `none` is the unprotected program. `Stage` is what a recipe sees of a policy.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo.config

import dflash.fx
from dflash.fx.gpu_guard import without_gpu_guard
from diagnostics.stress.workers import WatchedLock, Worker, new_worker


@dataclass(frozen=True, kw_only=True)
class Policy:
    """One way to run a program; `what` is its line in the table."""

    what: str
    serial: bool = False  # every thread ends before the next one starts
    lock: bool = False  # one lock around every trace and every compiled call; plain module calls do not take it
    processes: bool = False  # a process for each thread
    config: Mapping[str, Any] = field(default_factory=dict)  # of torch._dynamo.config, set in each thread
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of torch.compile
    context: bool = False  # threads start with a copy of the main thread's context variables
    single_threaded_autograd: bool = False  # backward runs in the thread that calls it
    own_generator: bool = False  # random numbers come from a generator of the thread's own
    stance: str = "default"
    isolate: bool = False
    missing: Callable[[], str | None] = lambda: None  # why this torch does not have it


def _no_argument(name: str) -> Callable[[], str | None]:
    return lambda: None if name in inspect.signature(torch.compile).parameters else f"torch.compile has no {name}="


def _no_setting(name: str) -> Callable[[], str | None]:
    return lambda: None if hasattr(torch._dynamo.config, name) else f"torch._dynamo.config has no {name}"


NONE = "none"
ISOLATION = "isolation"
POLICIES = {
    NONE: Policy(what="no protection"),
    ISOLATION: Policy(what="dflash.fx.isolated", isolate=True),
    "serial": Policy(what="traces and first compiles end before the next thread starts", serial=True),
    "lock": Policy(what="one lock around every trace and compiled call", lock=True),
    "processes": Policy(what="a process each", processes=True),
    "force": Policy(
        what="force_compile_during_fx_trace in each thread",
        config={"force_compile_during_fx_trace": True},
        missing=_no_setting("force_compile_during_fx_trace"),
    ),
    "limit": Policy(
        what="recompile_limit= of torch.compile", arguments={"recompile_limit": 64}, missing=_no_argument("recompile_limit")
    ),
    "each thread": Policy(what="the limit set in each thread", config={"recompile_limit": 64}),
    "context": Policy(what="threads started with contextvars.copy_context()", context=True),
    "dynamic": Policy(what="dynamic=True", arguments={"dynamic": True}),
    "calling thread": Policy(what="autograd in the calling thread", single_threaded_autograd=True),
    "generator": Policy(what="a generator of the thread's own", own_generator=True),
    "stance": Policy(what="stance fail_on_recompile after the warm-up", stance="fail_on_recompile"),
}


class Stage:
    """Where a recipe plays: starts workers and runs things as the policy says."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.heard: Callable[[], object] = _nothing  # called before a thread waits for its turn
        self._lock = WatchedLock(threading.RLock(), self._hear)

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Around a whole recipe."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_gpu_guard())
            if self.policy.isolate:
                stack.enter_context(dflash.fx.isolated())
            yield

    def start(self, name: str, act: Callable[[], object]) -> Worker:
        """Start a worker; with a serial policy it has ended, without parking, when this returns."""
        run = copy_context().run if self.policy.context else _call
        worker = new_worker(name, lambda: run(self._inside, act), parks=not self.policy.serial, process=self.policy.processes)
        worker.start()
        if self.policy.serial:
            worker.finish()
        return worker

    def compile(self, function: Callable[..., Any], **arguments: Any) -> Callable[..., Any]:
        """`torch.compile` with the policy's arguments."""
        compiled: Callable[..., Any] = torch.compile(function, **{**arguments, **self.policy.arguments})
        return compiled

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Around a trace or a compiled call."""
        with self._lock if self.policy.lock else contextlib.nullcontext():
            yield

    def _hear(self) -> None:
        self.heard()

    def _inside(self, act: Callable[[], object]) -> object:
        with contextlib.ExitStack() as stack:
            if self.policy.config:
                stack.enter_context(torch._dynamo.config.patch(dict(self.policy.config)))
            if self.policy.single_threaded_autograd:
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            return act()


def _nothing() -> None:
    pass


def _call(function: Callable[..., object], *arguments: object) -> object:
    return function(*arguments)
