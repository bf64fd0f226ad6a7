"""Backward in the calling thread, where the caller traces or holds Dynamo's compile lock (F8).

On a GPU, autograd runs backward in a thread of the device, which all threads share. A thread that holds the compile lock and
waits for it waits for ever when it is in another thread's compiled backward, which wants the lock; and it has none of the
caller's tracing state. Every other backward runs where it always did.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
import torch.autograd.graph
from torch._C._dynamo import eval_frame as switch
from torch._dynamo import convert_frame

from dflash.fx import dispatch
from dflash.fx.code_swap import Swapped, UnknownInternals, with_constants


class Backward(Swapped):
    """`torch.autograd.graph._engine_run_backward`, which `backward` and `grad` call, with other code."""

    def __init__(self) -> None:
        """Raises UnknownInternals; changes nothing."""
        lock = convert_frame.compile_lock  # kept: a watcher that stands in for it later still takes it
        function = getattr(torch.autograd.graph, "_engine_run_backward", None)
        if type(function) is not FunctionType or function.__closure__ or not hasattr(lock, "_is_owned"):
            raise UnknownInternals("torch.autograd.graph._engine_run_backward, or Dynamo's compile lock, is not as expected")
        super().__init__(function)
        original = FunctionType(self._code, function.__globals__, function.__name__, function.__defaults__)
        original.__kwdefaults__ = function.__kwdefaults__

        def run(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not (lock._is_owned() or dispatch.this_thread_traces()):
                return original(t_outputs, *args, **kwargs)
            with torch.autograd.set_multithreading_enabled(False):
                return original(t_outputs, *args, **kwargs)

        self._new_code = with_constants(_engine_run_backward.__code__, {"run": run})
        for code in (self._new_code, run.__code__):
            # As torch's own, below a compiled function that breaks at `grad`: Dynamo goes on with what they call.
            switch.set_code_exec_strategy(code, switch._FrameExecStrategy(switch._FrameAction.SKIP, switch._FrameAction.DEFAULT))

    def after_fork(self) -> None:
        """Nothing belongs to a thread here."""


def _engine_run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
    run: Any = "run"  # exchanged for a function: the code runs with the globals of torch.autograd.graph
    return run(t_outputs, *args, **kwargs)
