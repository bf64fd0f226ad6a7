"""Programs that really fail: `python tests/programs/crashes.py NAME...`. Their standard error is a log for tests of triage.

`race` a compiled call meets another thread's trace; `leak` two traces end in the order in which they began; `limit` more
shapes than the recompile limit; `flex` uncompiled flex_attention; `nan` anomaly mode; `missing` an import; `chain` an error
while another is handled; `full` a full device; `ranks` two gloo ranks (under torchrun), of which one raises while the other
waits for it. Under torchrun only rank 1 does the others.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention


class Parked(nn.Module):
    """Its forward, which a trace runs, sets one event and waits for another."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.go_on = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.inside.set()
        self.go_on.wait(60)
        return x + 1


class Drafter(nn.Module):
    """Calls a compiled function from a submodule, as the drafter of the case study does."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.Identity()
        self.self_attn.forward = torch.compile(torch.sin, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.self_attn(x)


def race() -> None:
    parked, drafter = Parked(), Drafter()
    drafter(torch.ones(2))
    tracer = threading.Thread(target=make_fx_of, args=(parked,), name="target")
    tracer.start()
    parked.inside.wait(60)
    victim = threading.Thread(target=drafter, args=(torch.ones(2),), name="drafter-0")
    victim.start()
    victim.join()
    parked.go_on.set()
    tracer.join()


def make_fx_of(module: nn.Module) -> None:
    make_fx(module)(torch.ones(2))


def leak() -> None:
    first, second = Parked(), Parked()
    threads = [
        threading.Thread(target=make_fx_of, args=(module,), name=f"traces-{n}") for n, module in enumerate((first, second))
    ]
    for thread, module in zip(threads, (first, second), strict=True):
        thread.start()
        module.inside.wait(60)
    for thread, module in zip(threads, (first, second), strict=True):
        module.go_on.set()
        thread.join()


def foreign_module() -> None:
    parked = Parked()
    tracer = threading.Thread(target=symbolic_trace, args=(parked,), name="target")
    tracer.start()
    parked.inside.wait(60)
    victim = threading.Thread(target=nn.Linear(2, 2), args=(torch.ones(2),), name="drafter-1")
    victim.start()
    victim.join()
    parked.go_on.set()
    tracer.join()


def limit() -> None:
    torch._dynamo.config.recompile_limit = 2
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    for size in range(2, 6):
        compiled(torch.ones(size))


def flex() -> None:
    q = torch.ones(1, 1, 16, 16)
    flex_attention(q, q, q)


def nan() -> None:
    x = torch.zeros(1, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        (torch.sqrt(x) * 0).sum().backward()


def missing() -> None:
    import a_package_that_is_missing  # noqa: F401, PLC0415 - the failure


def chain() -> None:
    try:
        {}["step"]
    except KeyError:
        raise ValueError("no such step: 7")  # noqa: B904 - the chain is the point


def full() -> None:
    with Path("/dev/full").open("w") as file:
        file.write("x" * 100_000)


def ranks() -> None:
    torch.distributed.init_process_group("gloo")
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("bad sample 4711")
    torch.distributed.all_reduce(torch.ones(1))


PROGRAMS: dict[str, Callable[[], None]] = {
    program.__name__: program for program in (race, leak, foreign_module, limit, flex, nan, missing, chain, full, ranks)
}

if __name__ == "__main__":
    warnings.simplefilter("default")
    for name in sys.argv[1:]:
        if name == "ranks":
            ranks()
        if os.environ.get("RANK", "1") != "1":
            continue
        try:
            PROGRAMS[name]()
        except Exception:  # noqa: BLE001 - whatever it is, it is printed
            traceback.print_exc()
