"""What a recipe saw, and small things that recipes share: a backend that counts, modules and functions that park."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from dflash.fx import seams
from diagnostics.stress.cures import Stage
from diagnostics.stress.workers import Worker, park

X = torch.ones(2)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """`what` happened, or what was seen instead."""

    happened: bool
    what: str


class UnexpectedError(RuntimeError):
    """A recipe went another way: neither the failure nor a cure was seen."""


class Graphs:
    """A backend of torch.compile that runs graphs as they are, counts, and calls what a recipe wants called."""

    def __init__(self, *, in_compile: Callable[[], None] | None = None, in_run: Callable[[], None] | None = None) -> None:
        self.compiles, self.runs = 0, 0
        self.dynamic = False  # a graph took a symbolic size
        self._in_compile, self._in_run = in_compile, in_run

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile, in Dynamo's sense."""
        self.compiles += 1
        sizes = [size for value in inputs if isinstance(value, Tensor) for size in value.shape]
        self.dynamic |= any(isinstance(value, torch.SymInt) for value in (*inputs, *sizes))
        if self._in_compile is not None:
            self._in_compile()

        def run(*arguments: Any) -> Any:
            self.runs += 1
            if self._in_run is not None:
                self._in_run()
            return graph.forward(*arguments)

        return run


class ParksInForward(nn.Module):
    """A module whose trace stops in the middle, after it has used `inner` if there is one."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Park."""
        park()
        return x + 1 if self.inner is None else self.inner(x)


def polynomial(x: Tensor) -> Tensor:
    """Something to compile."""
    return x * x + 1


def parks(x: Tensor) -> Tensor:
    """A function whose trace stops in the middle."""
    park()
    return x + 1


def trace_and_park(stage: Stage) -> None:
    """make_fx, parked."""
    with stage.turn():
        make_fx(parks)(X)


def beside(stage: Stage, first: Callable[[], object], act: Callable[[], object]) -> tuple[Worker, Worker]:
    """Run `act` in thread `innocent` while thread `tracing` is parked in `first`."""
    tracing = stage.start("tracing", first)
    tracing.settle()
    innocent = stage.start("innocent", act)
    innocent.settle()
    finish(tracing, innocent)
    return tracing, innocent


def finish(*workers: Worker) -> None:
    """Let each go on and end, one after the other."""
    for worker in workers:
        worker.release()
        worker.finish()


def verdict(happened: bool, yes: str, no: str, *workers: Worker) -> Evidence:
    """`yes` or `no`, with what the workers raised. Raises UnexpectedError when they raised and it did not happen."""
    raised = errors(*workers)
    if raised and not happened:
        raise UnexpectedError(f"not what the recipe is about: {raised}")
    return Evidence(happened=happened, what="; ".join(filter(None, (yes, raised))) if happened else no)


def left_behind() -> str:
    """Methods of nn.Module that are patched although nothing traces."""
    return "; ".join(f"nn.Module.{method} stays patched" for method in seams.tracing_state().patched_methods or ())


def errors(*workers: Worker) -> str:
    """What workers raised, each with its thread's name."""
    return "; ".join(f"{worker.error} in thread {worker.name}" for worker in workers if worker.error)


@contextlib.contextmanager
def limit(stage: Stage, number: int) -> Iterator[None]:
    """A recompile limit for this thread, unless the policy sets one in each thread."""
    with torch._dynamo.config.patch({"recompile_limit": number, **stage.policy.config}):
        yield
