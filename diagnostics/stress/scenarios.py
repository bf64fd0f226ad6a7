"""The failures of the catalogue, made to happen: `python -m diagnostics.stress.scenarios F3`.

Each scenario parks thread `tracing` inside its trace and lets thread `innocent` act: no chance is involved. They leave the
process as the failure leaves it, so run them in a process of their own, or under `python -m diagnostics.fxprobe -- -m ...`.
F1, F2 and F6 need a tracing flag that is one for the process: torch 2.13 and earlier.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

_WAIT_SECONDS = 60.0


class _Park:
    """A place where a thread waits until it is told to go on."""

    def __init__(self) -> None:
        self._reached, self._go_on = threading.Event(), threading.Event()

    def wait_here(self) -> None:
        self._reached.set()
        _await(self._go_on)

    def await_reached(self) -> None:
        _await(self._reached)

    def release(self) -> None:
        self._go_on.set()


class _ParksInForward(nn.Module):
    """A module whose trace stops in the middle."""

    def __init__(self, park: _Park, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner if inner is not None else nn.Identity()
        self._park = park

    def forward(self, x: Tensor) -> Tensor:
        self._park.wait_here()
        return x


def clean() -> None:
    """Trace, compile and call, one after the other."""
    compiled = torch.compile(torch.sin, backend="aot_eager")
    compiled(torch.ones(2))
    make_fx(torch.cos)(torch.ones(2))
    _finish(_start("innocent", lambda: compiled(torch.ones(2))))


def foreign_flag() -> None:
    """F1: a compiled call meets the trace of another thread and raises."""
    compiled = _compiled()
    _beside_make_fx(lambda: compiled(torch.ones(2)))


def silenced_flag() -> None:
    """F2: the same with error_on_nested_fx_trace=False: the call runs uncompiled."""
    compiled = _compiled()

    def call() -> None:
        with torch._dynamo.config.patch(
            error_on_nested_fx_trace=False
        ):  # in this thread: from torch 2.12 it is not seen elsewhere
            compiled(torch.ones(2))

    _beside_make_fx(call)


def hijacked_call() -> None:
    """F3: a module that the tracer does not know: the caller gets an error."""
    _beside_symbolic_trace(nn.Linear(2, 2), None)


def shared_leaf() -> None:
    """F3: a module that is part of what is traced: the caller gets a Proxy, silently."""
    shared = nn.Linear(2, 2)
    _beside_symbolic_trace(shared, shared)


def passed_through() -> None:
    """F4: make_fx lets the call through."""
    module = nn.Linear(2, 2)
    _beside_make_fx(lambda: module(torch.ones(2)))


def leaked_patch() -> None:
    """F5: two symbolic traces end in the order in which they began."""
    first, second = _Park(), _Park()
    tracing = _start("tracing", lambda: torch.fx.symbolic_trace(_ParksInForward(first)))
    first.await_reached()
    innocent = _start("innocent", lambda: torch.fx.symbolic_trace(_ParksInForward(second)))
    second.await_reached()
    first.release()
    _finish(tracing)
    second.release()
    _finish(innocent)


def stuck_flag() -> None:
    """F6: the same with make_fx, then a compiled call when nothing traces any more."""
    compiled = _compiled()
    first, second = _Park(), _Park()
    tracing = _start("tracing", lambda: make_fx(_parks(first))(torch.ones(2)))
    first.await_reached()
    innocent = _start("innocent", lambda: make_fx(_parks(second))(torch.ones(2)))
    second.await_reached()
    first.release()
    _finish(tracing)
    second.release()
    _finish(innocent)
    _finish(_start("late", lambda: compiled(torch.ones(2))))


SCENARIOS: dict[str, Callable[[], None]] = {
    "clean": clean,
    "F1": foreign_flag,
    "F2": silenced_flag,
    "F3": hijacked_call,
    "F3-shared": shared_leaf,
    "F4": passed_through,
    "F5": leaked_patch,
    "F6": stuck_flag,
}


def main(arguments: list[str]) -> int:
    """Run one scenario. What it raises in its threads is printed by Python and left to observers."""
    if len(arguments) != 1 or arguments[0] not in SCENARIOS:
        print(f"usage: python -m diagnostics.stress.scenarios {'|'.join(SCENARIOS)}", file=sys.stderr)  # noqa: T201 - usage
        return 2
    SCENARIOS[arguments[0]]()
    return 0


def _compiled() -> Callable[[Tensor], Tensor]:
    compiled: Callable[[Tensor], Tensor] = torch.compile(torch.sin, backend="eager")
    compiled(torch.ones(2))
    return compiled


def _parks(park: _Park) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        park.wait_here()
        return x + 1

    return function


def _beside_make_fx(act: Callable[[], object]) -> None:
    park = _Park()
    tracing = _start("tracing", lambda: make_fx(_parks(park))(torch.ones(2)))
    park.await_reached()
    _finish(_start("innocent", act))
    park.release()
    _finish(tracing)


def _beside_symbolic_trace(module: nn.Module, traced: nn.Module | None) -> None:
    park = _Park()
    tracing = _start("tracing", lambda: torch.fx.symbolic_trace(_ParksInForward(park, traced)))
    park.await_reached()
    _finish(_start("innocent", lambda: module(torch.ones(2))))
    park.release()
    _finish(tracing)


def _start(name: str, act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, name=name)
    thread.start()
    return thread


def _finish(thread: threading.Thread) -> None:
    thread.join(_WAIT_SECONDS)
    if thread.is_alive():
        raise TimeoutError(f"thread {thread.name} did not end within {_WAIT_SECONDS:.0f} s")


def _await(event: threading.Event) -> None:
    if not event.wait(_WAIT_SECONDS):
        raise TimeoutError(f"no thread came within {_WAIT_SECONDS:.0f} s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
