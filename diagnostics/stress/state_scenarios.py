"""F9, F10, F11, F19: settings and counters that threads do, or do not, share."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch._dynamo.callback
from torch._dynamo import eval_frame

from diagnostics.stress.cures import Stage
from diagnostics.stress.evidence import Evidence, Graphs, X, finish, polynomial, verdict
from diagnostics.stress.workers import park

_SIZES = range(2, 12)


def unseen_limit(stage: Stage) -> Evidence:
    """F9: a recompile limit set in the main thread, and a thread with more shapes than the default limit."""
    graphs = Graphs()
    compiled = stage.compile(polynomial, backend=graphs, dynamic=False)

    def work() -> tuple[int, int]:
        with stage.turn():
            for size in _SIZES:
                compiled(torch.ones(size))
        return torch._dynamo.config.recompile_limit, len(_SIZES) - graphs.runs

    with torch._dynamo.config.patch(recompile_limit=64):
        worker = stage.start("worker", work)
        finish(worker)
    seen, uncompiled = worker.result or (None, 0)
    what = f"limit {seen} in thread worker, 64 in main; {uncompiled} of {len(_SIZES)} calls ran uncompiled"
    return verdict(uncompiled > 0, what, what, worker)


def lost_setting(stage: Stage) -> Evidence:
    """F10: dynamic=False of a function is undone by another thread's call of a function with dynamic=True."""
    other = stage.compile(polynomial, backend=Graphs(in_run=park), dynamic=True)
    finish(stage.start("warm", lambda: other(X).sum().item()))
    graphs = Graphs()
    compiled = stage.compile(lambda x: x - 1, backend=graphs, dynamic=False)

    def call_other() -> None:
        with stage.turn():
            other(X)

    def work() -> bool:
        with stage.turn(), _parked_at_compile():
            compiled(torch.ones(5))
        return graphs.dynamic

    innocent = stage.start("innocent", work)
    innocent.settle()
    calling = stage.start("calling", call_other)
    calling.settle()
    finish(innocent, calling)
    lost = "dynamic=False was forgotten: thread innocent compiled for a symbolic size"
    return verdict(innocent.result is True, lost, "dynamic=False was kept", calling, innocent)


def misled_selector(stage: Stage) -> Evidence:
    """F11: code that runs uncompiled when is_compiling() says so, beside a thread that compiles."""
    graphs = Graphs()
    compiled = stage.compile(polynomial, backend=graphs)
    compiled(X)
    other = stage.compile(lambda x: x - 1, backend=Graphs(in_compile=park))

    def compile_other() -> None:
        with stage.turn():
            other(X)

    def select() -> int:
        with stage.turn():
            (polynomial if torch.compiler.is_compiling() else compiled)(X)
        return graphs.runs

    compiling = stage.start("compiling", compile_other)
    compiling.settle()
    innocent = stage.start("innocent", select)
    innocent.settle()
    finish(compiling, innocent)
    misled = "is_compiling() was True in thread innocent because thread compiling compiled: it ran uncompiled"
    return verdict(innocent.result == 1, misled, "the call ran compiled", compiling, innocent)


def lost_count(stage: Stage) -> Evidence:
    """F19: two calls of another thread set back the count of compiled frames of a fullgraph call."""
    graphs = Graphs(in_run=lambda: park() if graphs.runs > 1 else None)
    compiled = stage.compile(polynomial, backend=graphs, fullgraph=True)
    compiled(X)
    other = stage.compile(lambda x: x - 1, backend="eager", fullgraph=True)
    other(X)

    def call() -> int:
        with stage.turn():
            compiled(X)
        return graphs.runs

    def call_twice() -> None:
        for _ in range(2):
            with stage.turn():
                other(X)

    with torch.compiler.set_stance(stage.policy.stance), _parked_around_calls("other"):
        tracing = stage.start("other", call_twice)
        tracing.settle()  # before its first call
        tracing.go()
        tracing.settle()  # after its first call has given the count back
        innocent = stage.start("innocent", call)
        innocent.settle()  # in its graph, counted
        tracing.go()
        tracing.settle()  # before its second call, which has begun to count anew
        innocent.release()
        innocent.settle()
        finish(tracing, innocent)
    return verdict("found no compiled frames" in str(innocent.error), "", "the call ran compiled", tracing, innocent)


@contextlib.contextmanager
def _parked_at_compile() -> Iterator[None]:
    """The next compile parks at its beginning."""
    handler = torch._dynamo.callback.callback_handler

    def wait(_arguments: object) -> None:
        park()

    handler.register_start_callback(wait)
    try:
        yield
    finally:
        handler.remove_start_callback(wait)


@contextlib.contextmanager
def _parked_around_calls(name: str) -> Iterator[None]:
    """Compiled calls of thread `name` park when they have begun to count, and again when they have given the count back."""
    original: Callable[[bool], bool] = vars(eval_frame)[
        "set_skip_guard_eval_unsafe"
    ]  # a call of torch.compile sets it at these two moments

    def set_and_park(value: bool) -> bool:
        if threading.current_thread().name == name:
            park()
        return original(value)

    with mock.patch.object(eval_frame, "set_skip_guard_eval_unsafe", set_and_park):
        yield
