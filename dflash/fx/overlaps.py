"""What isolation cannot isolate, said when it happens (F15, F16): `dflash.fx.limits()`, and one IsolationWarning of each kind.

A compile saves the random state, the default dtype and more when it begins and puts them back when it ends, for the whole
process; an export does so with backend flags. What another thread draws or sets in between is undone. Isolation looks at both
ends, which costs microseconds: a difference at the end, in a program of several threads, is counted and warned of once.

Known limits: who drew or set is not known; a compile that draws by itself looks the same. A thread that only computes while an
export has backends off is not seen. Devices other than the CPU have random states of their own, which are not looked at.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections import Counter
from types import FunctionType
from typing import Any

import torch
from torch._dynamo import convert_frame

from dflash.fx.code_swap import Swapped, UnknownInternals, with_constants

RANDOM, DTYPE, BACKENDS = "random state", "default dtype", "backend flags"
_CONSEQUENCES = {
    RANDOM: (
        "a compile puts back the CPU's random state that it found: numbers that another thread draws meanwhile are drawn again. "
        "Give each thread a torch.Generator of its own"
    ),
    DTYPE: "a compile puts back the default dtype that it found: another thread's set_default_dtype is undone. Set it before",
    BACKENDS: (
        "an export switches cuDNN, oneDNN and NNPACK off for every thread and puts back what it found: slower meanwhile, and "
        "another thread's setting is undone. Set flags before, and export when no thread computes"
    ),
}
_OTHERS = (
    "a module that another thread exports has FakeTensors for parameters meanwhile: export a copy",
    "recompile limits and compile caches are shared by all threads: 8 versions of a function by default, over all of them",
    "from torch 2.12 settings of Dynamo and Inductor belong to the thread that made them; up to 2.11 they are shared",
    "first compiles take turns; threads that wait for their turn may compile the same function once more",
    "Triton's autotuner and CUDA-graph trees are not made for threads",
)

_lock = threading.Lock()
_observed: Counter[str] = Counter()


class IsolationWarning(UserWarning):
    """Something that isolation cannot isolate has just happened to two threads."""


def limits() -> list[str]:
    """One sentence for each thing that stays process-wide, with how often it was seen to do harm where that can be seen."""
    sentences = [f"{kind} (undone {_observed[kind]} times so far): {why}" for kind, why in _CONSEQUENCES.items()]
    return [*sentences, *_OTHERS]


def note(kind: str, what: str) -> None:
    """Count, and warn the first time, that `kind` was changed and put back while the calling thread did `what`."""
    if threading.active_count() == 1:
        return  # it was this thread itself
    with _lock:
        _observed[kind] += 1
        first = _observed[kind] == 1
    if first:
        sentence = f"the {kind} changed while thread {threading.current_thread().name} {what}, and was put back"
        warnings.warn(f"{sentence}: {_CONSEQUENCES[kind]}. Said once; dflash.fx.limits() counts", IsolationWarning, stacklevel=2)


def backend_flags() -> tuple[bool, ...]:
    """Whether cuDNN, oneDNN and NNPACK are on."""
    return torch._C._get_cudnn_enabled(), torch._C._get_mkldnn_enabled(), torch._C._get_nnpack_enabled()


class Overlaps(Swapped):
    """Dynamo's `trace_frame`, around which it saves and puts back, with other code."""

    def __init__(self) -> None:
        """Raises UnknownInternals; changes nothing."""
        function = getattr(getattr(convert_frame, "trace_frame", None), "__wrapped__", None)
        if type(function) is not FunctionType or function.__closure__:
            raise UnknownInternals("torch._dynamo.convert_frame.trace_frame is not a function that saves and puts back")
        super().__init__(function)
        original = FunctionType(self._code, function.__globals__, function.__name__, function.__defaults__)
        original.__kwdefaults__ = function.__kwdefaults__

        def run(*args: Any, **kwargs: Any) -> Any:
            random, dtype = _random_state(), torch.get_default_dtype()
            try:
                return original(*args, **kwargs)
            finally:
                if torch.get_default_dtype() is not dtype:
                    note(DTYPE, "compiled")
                if _random_state() != random:
                    note(RANDOM, "compiled")

        self._new_code = with_constants(_trace_frame.__code__, {"run": run})

    def after_fork(self) -> None:
        """In the child the lock is free."""
        global _lock
        _lock = threading.Lock()


def _random_state() -> bytes:
    """Of the CPU's generator; read without an operator, which a mode of the caller would take."""
    state = torch.default_generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


def _trace_frame(*args: Any, **kwargs: Any) -> Any:
    run: Any = "run"  # exchanged for a function: the code runs with the globals of torch._dynamo.convert_frame
    return run(*args, **kwargs)
