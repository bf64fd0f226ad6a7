"""F7, F12, F16, F18: what compiling in one thread does to others: limits, duplicates, random numbers, guards."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo import convert_frame
from torch._dynamo.utils import guard_failures

from diagnostics.stress.cures import Stage
from diagnostics.stress.evidence import Evidence, Graphs, X, beside, finish, limit, polynomial, verdict
from diagnostics.stress.workers import WatchedLock, Worker, park

_THREADS = 4
_NO_REASON = ("Unexpected recompilation", "BACKEND_MATCH failure")  # torch 2.11 blames the backend, which is the same


def recompile_limit(stage: Stage) -> Evidence:
    """F7: two threads with two shapes each, and a limit of three versions over all threads."""
    graphs = Graphs()
    compiled = stage.compile(polynomial, backend=graphs, dynamic=False)

    def work(sizes: tuple[int, ...]) -> int:
        before = graphs.runs
        with limit(stage, 3), stage.turn():
            for size in sizes:
                compiled(torch.ones(size))
        return len(sizes) - graphs.runs + before

    workers = []
    for name, sizes in (("tracing", (2, 3)), ("innocent", (4, 5))):
        worker = stage.start(name, lambda sizes=sizes: work(sizes))  # type: ignore[misc]  # mypy cannot infer its type
        finish(worker)
        workers.append(worker)
    uncompiled = {worker.name: worker.result for worker in workers if worker.result}
    what = "; ".join(f"{count} of 2 calls of thread {name} ran uncompiled" for name, count in uncompiled.items())
    return verdict(bool(uncompiled), what, "all 4 calls ran compiled", *workers)


def duplicate_compiles(stage: Stage) -> Evidence:
    """F12: threads whose first calls meet at the compile lock compile once each."""
    graphs = Graphs(in_compile=lambda: park() if graphs.compiles == 1 else None)
    compiled = stage.compile(polynomial, backend=graphs)

    def call() -> int:
        with stage.turn():
            compiled(X)
        return graphs.compiles

    with mock.patch.object(convert_frame, "compile_lock", WatchedLock(convert_frame.compile_lock)):
        workers = []
        for number in range(_THREADS):
            workers.append(stage.start(f"first call {number}", call))
            workers[-1].settle()
        finish(*workers)
    what = f"compiled {graphs.compiles} times by {_THREADS} threads"
    return verdict(graphs.compiles > 1, what, what, *workers)


def repeated_numbers(stage: Stage) -> Evidence:
    """F16: a compile restores the random state that it found: a thread beside it draws the same numbers again."""

    def draw_twice() -> bool:
        generator = torch.Generator() if stage.policy.own_generator else None
        first = torch.rand(4, generator=generator)
        park()
        return torch.equal(first, torch.rand(4, generator=generator))

    innocent = _beside_compile(stage, draw_twice)
    yes = "thread innocent drew the same random numbers twice"
    return verdict(innocent.result is True, yes, "the numbers differ", innocent)


def undone_default(stage: Stage) -> Evidence:
    """F16: the same with the default dtype that a thread sets while another compiles."""

    def set_and_read() -> str:
        torch.set_default_dtype(torch.float64)
        park()
        return str(torch.get_default_dtype())

    innocent = _beside_compile(stage, set_and_read)
    what = f"thread innocent set the default dtype torch.float64 and read {innocent.result}"
    return verdict(innocent.result == "torch.float32", what, what, innocent)


def wrong_guard(stage: Stage) -> Evidence:
    """F18: a module is put into another mode while another thread compiles it: its code is filed under the wrong mode."""
    module, graphs = _Mode(), Graphs(in_compile=lambda: park() if graphs.compiles == 1 else None)
    compiled = stage.compile(module, backend=graphs)

    def compile_it() -> None:
        with stage.turn():
            compiled(X)

    compiling, innocent = beside(stage, compile_it, lambda: module.eval().training)
    wrong = not module.training and bool((compiled(X) != module(X)).any())
    what = "the module compiled while it was put into eval mode computes what it did in training mode, silently"
    return verdict(wrong, what, "the results are right", compiling, innocent)


def passing_guard(stage: Stage) -> Evidence:
    """F18: a guard fails at the call and passes when Dynamo, having waited for its lock, looks for the reason."""
    module = _Mode()
    compiled = stage.compile(module, backend="eager")
    compiled(X)
    module.eval()
    other = stage.compile(polynomial, backend=Graphs(in_compile=park))
    failures_before = len(_unexpected())

    def call(function: Callable[..., object]) -> None:
        with stage.turn():
            function(X)

    with mock.patch.object(convert_frame, "compile_lock", WatchedLock(convert_frame.compile_lock)):
        compiling = stage.start("compiling", lambda: call(other))
        compiling.settle()
        innocent = stage.start("innocent", lambda: call(compiled))
        innocent.settle()
        module.train()
        finish(compiling, innocent)
    failures = _unexpected()[failures_before:]
    yes = f"recompiled although the guards pass: {failures[0][:100]}..." if failures else ""
    return verdict(bool(failures), yes, "guards failed as they should", compiling, innocent)


def _unexpected() -> list[str]:
    """Reasons of recompiles that Dynamo could not find."""
    reasons = [reason.splitlines()[0] for found in guard_failures.values() for reason in found]
    return [reason for reason in reasons if any(words in reason for words in _NO_REASON)]


class _Mode(nn.Module):
    """Its code depends on its mode, so that Dynamo guards it."""

    def forward(self, x: Tensor) -> Tensor:
        """One of two."""
        return x + 1 if self.training else x - 1


def _beside_compile(stage: Stage, act: Callable[[], object]) -> Worker:
    compiled = stage.compile(polynomial, backend=Graphs(in_compile=park))

    def compile_it() -> None:
        with stage.turn():
            compiled(X)

    compiling = stage.start("compiling", compile_it)
    compiling.settle()
    innocent = stage.start("innocent", act)
    innocent.settle()
    finish(compiling, innocent)
    return innocent
