"""The compile lock and autograd's device thread wait for each other, on a CPU: `python tests/programs/deadlock.py`.

A device written in Python gives autograd a real device thread. Thread `compiles` takes a gradient on the device while it
compiles, as flex_attention does; thread `trains` runs a backward on the same device that compiles. The events only fix the
order; the locks and threads are torch's own. Prints `blocking` just before the deadlock, and then never ends.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.convert_frame
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

lock_is_held, device_thread_is_busy = threading.Event(), threading.Event()


class DeviceTensor(Tensor):
    """A tensor of the device, without any memory."""

    @staticmethod
    def __new__(cls: type[DeviceTensor]) -> Any:
        made = torch._C._acc.create_empty_tensor((1,), torch.float32)
        made.__class__ = cls
        return made


class OnDevice(torch.autograd.Function):
    """Calls `backward_act` in the backward, which runs where the output lives: in the device's thread."""

    @staticmethod
    def forward(ctx: Any, _x: Tensor, backward_act: Callable[[], object]) -> Tensor:
        ctx.act = backward_act
        return DeviceTensor()

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> tuple[Tensor, None]:
        ctx.act()
        return torch.zeros(1), None


def gradient_on_device(act: Callable[[], object]) -> None:
    x = torch.zeros(1, requires_grad=True)
    torch.autograd.grad(OnDevice.apply(x, act), x, DeviceTensor())


def compiles() -> None:
    def backend(module: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        lock_is_held.set()
        device_thread_is_busy.wait()
        gradient_on_device(lambda: None)
        return module.forward

    torch.compile(torch.sin, backend=backend)(torch.ones(1))


def trains() -> None:
    def recompute() -> None:
        device_thread_is_busy.set()
        lock_is_held.wait()
        sys.stdout.write("blocking\n")
        sys.stdout.flush()
        torch.compile(torch.cos, backend="eager")(torch.ones(1))

    gradient_on_device(recompute)


if __name__ == "__main__":
    _setup_privateuseone_for_python_backend("python_device")
    torch.compile(torch.tan, backend="eager")(torch.ones(1))  # imports what the first compile imports
    threads = [threading.Thread(target=act, name=act.__name__) for act in (compiles, trains)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
