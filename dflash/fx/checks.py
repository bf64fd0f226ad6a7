"""`dflash.fx.self_check()`: make each race happen in this process and say what became of it: `cured`, `not cured`, `not needed`.

Each check parks one thread where the state is shared, lets another act, and looks. `not needed` is a state that this torch
isolates itself. Races that would leave the process damaged are undone at once. Needs under two seconds once Dynamo is imported;
no other thread may trace, compile or call modules meanwhile.

Run it: `python -c "import dflash.fx; dflash.fx.isolate(); print(dflash.fx.self_check())"`
"""

from __future__ import annotations

import importlib
import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._dynamo import convert_frame

from dflash.fx import seams
from dflash.fx.isolation import refuse_unless_quiet
from dflash.fx.per_thread import STATE, is_shared
from dflash.fx.repair import repair

State = Literal["cured", "not cured", "not needed"]
_WAIT_SECONDS = 10.0
_FLAG = ("torch.fx._symbolic_trace", "_is_fx_tracing_flag")


def self_check() -> dict[str, State]:
    """What became of each race, by its name and the failure's id.

    Raises IsolationError while a thread traces or compiles, or where a trace has left its state behind.
    """
    refuse_unless_quiet()
    try:
        return {
            "F1, F2: the tracing flag": _of_state(*_FLAG),
            "F3, F4: module calls beside a trace": _in_trace(_module_call),
            "F3: parameters beside a trace": _in_trace(_parameter),
            "F5, F6: traces that end in the order in which they began": _overlap(),
            "F11: is_compiling()": _of_state("torch.compiler", "_is_compiling_flag"),
            "F14: a tracer made beside a trace": _in_trace(_tracer_knows),
            "F8: backward under the compile lock": _backward_under_the_lock(),
            **{f"{module}.{name}": _of_state(module, name) for module, name in _other_state()},
        }
    finally:
        repair()


class _Parked:
    """A thread that is inside `act` until the block ends."""

    def __init__(self, act: Callable[[Callable[[], None]], object]) -> None:
        self._here, self._go = threading.Event(), threading.Event()
        self._act = act
        self._thread = threading.Thread(target=self._run, name="self-check", daemon=True)
        self.result: object = None

    def __enter__(self) -> None:
        self._thread.start()
        self._here.wait(_WAIT_SECONDS)

    def __exit__(self, *_error: object) -> None:
        self.finish()

    def finish(self) -> None:
        self._go.set()
        self._thread.join(_WAIT_SECONDS)

    def _park(self) -> None:
        self._here.set()
        self._go.wait(_WAIT_SECONDS)

    def _run(self) -> None:
        try:
            self.result = self._act(self._park)
        except Exception as error:  # noqa: BLE001 - an overlap that is not cured may raise anything: the check looks at what is left
            self.result = error
        finally:
            self._here.set()


class _Root(nn.Module):
    def __init__(self, park: Callable[[], None]) -> None:
        super().__init__()
        self.park = park

    def forward(self, x: Tensor) -> Tensor:
        self.park()
        return x


def _trace(park: Callable[[], None]) -> torch.fx.Graph:
    return torch.fx.Tracer().trace(_Root(park))


def in_trace() -> AbstractContextManager[object]:
    """Another thread is inside a trace until the block ends."""
    return _Parked(_trace)


def _in_trace(is_right: Callable[[], bool]) -> State:
    """`is_right` is asked while another thread traces."""
    with _Parked(_trace):
        right = is_right()
    return "cured" if right else "not cured"


def _module_call() -> bool:
    try:
        return type(nn.Identity()(torch.ones(1))) is Tensor
    except NameError:  # of the foreign tracer
        return False


def _parameter() -> bool:
    linear = nn.Linear(1, 1, device="meta")
    foreign = getattr(nn.Module.__getattr__, "__wrapped__", None) is not None  # the wrapper that torch.fx puts there
    return not foreign and linear.weight is linear._parameters["weight"]


def _tracer_knows() -> bool:
    return id(getattr(math.sqrt, "__wrapped__", math.sqrt)) in torch.fx.Tracer()._autowrap_function_ids


def _overlap() -> State:
    earlier, later = _Parked(_trace), _Parked(_trace)
    with earlier, later:
        earlier.finish()
    clean = not seams.leaks(seams.tracing_state())
    repair()
    whole = all(isinstance(thread.result, torch.fx.Graph) for thread in (earlier, later))
    return "cured" if clean and whole else "not cured"


def _of_state(module_name: str, name: str) -> State:
    """Whether what one thread sets is seen by another."""
    module, absent = importlib.import_module(module_name), object()
    before, mark = getattr(module, name, absent), object()
    if not is_shared(module, name):
        return "not needed"

    def change(park: Callable[[], None]) -> None:
        own = getattr(module, name)
        setattr(module, name, mark)
        park()
        setattr(module, name, own)

    with _Parked(change):
        return "cured" if getattr(module, name) is before else "not cured"


def _other_state() -> list[tuple[str, str]]:
    known = {_FLAG, ("torch.compiler", "_is_compiling_flag")}
    return [(module, name) for module, names in STATE.items() for name in names if (module, name) not in known]


class _Looks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[bool]) -> Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.seen.append(torch._C._is_multithreading_enabled())
        return gradient, None


def _backward_under_the_lock() -> State:
    seen: list[bool] = []
    x = torch.ones(1, requires_grad=True)
    with convert_frame.compile_lock:
        torch.autograd.grad(_Looks.apply(x, seen), x, torch.ones(1))  # type: ignore[no-untyped-call]
    return "cured" if seen == [False] else "not cured"
