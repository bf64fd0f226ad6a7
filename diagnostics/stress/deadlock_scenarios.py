"""F8: Dynamo's lock and autograd's device thread wait for each other.

A device made in Python gives autograd a real device thread on any machine. Two stand-ins keep the recipe small: a backend
that differentiates while it compiles, as flex_attention does, and a backward that compiles at its first call, as
AOTAutograd's do. Only the end of the recipe looks at a clock: a deadlock is what has not moved for a few seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo import convert_frame
from torch.utils import backend_registration

from diagnostics.stress.cures import Stage
from diagnostics.stress.evidence import Evidence, Graphs, X, finish, polynomial, verdict
from diagnostics.stress.workers import WAIT_SECONDS, WatchedLock, park

_STUCK_SECONDS = 3.0


class _Step(torch.autograd.Function):
    """Calls a function in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, in_backward: Callable[[], object]) -> Tensor:
        """Remember what to call."""
        del x
        ctx.in_backward = in_backward
        return _on_device()

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> tuple[Tensor, None]:
        """Call it, in autograd's thread of the device."""
        ctx.in_backward()
        return _on_device(), None


def lock_and_device_thread(stage: Stage) -> Evidence:
    """F8: a compile differentiates while it holds Dynamo's lock; the device thread waits for this lock in another backward."""
    backend_registration._setup_privateuseone_for_python_backend("pythondevice")
    met, ended = threading.Event(), threading.Event()
    stage.heard = met.set

    def differentiate_in_compile() -> None:
        park()
        with torch.enable_grad():
            _differentiate(lambda: None)

    compiled = stage.compile(polynomial, backend=Graphs(in_compile=differentiate_in_compile))
    backward = stage.compile(lambda x: x - 1, backend="eager")

    def compile_it() -> None:
        try:
            with stage.turn():
                compiled(X)
        finally:
            ended.set()

    def call_in_backward() -> None:
        with stage.turn():
            backward(X)

    def differentiate() -> None:
        try:
            _differentiate(call_in_backward)
        finally:
            met.set()

    with mock.patch.object(convert_frame, "compile_lock", WatchedLock(convert_frame.compile_lock, met.set)):
        compiling = stage.start("compiling", compile_it)
        compiling.settle()
        innocent = stage.start("innocent", differentiate)
        if not met.wait(WAIT_SECONDS):
            raise TimeoutError("the backward did not come to Dynamo's lock")
        compiling.release()
        stuck = not ended.wait(_STUCK_SECONDS)
        if not stuck:
            finish(compiling, innocent)
    yes = (
        f"deadlock, nothing moved for {_STUCK_SECONDS:.0f} s: thread compiling holds a lock and waits for autograd's device "
        "thread, which waits for the lock in the backward of thread innocent"
    )
    return verdict(stuck, yes, "both ended", compiling, innocent)


def _differentiate(in_backward: Callable[[], object]) -> None:
    x = _on_device().requires_grad_()
    torch.autograd.grad(_Step.apply(x, in_backward), x, _on_device())  # type: ignore[no-untyped-call]


def _on_device() -> Tensor:
    empty: Tensor = torch._C._acc.create_empty_tensor((2,), torch.float32)
    return empty
