"""Names of devices, checked against this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from dflash.config import ConfigError


def parse_device(name: str) -> torch.device:
    """`cpu` or `cuda:INDEX` as a device. Raises ConfigError on other names, and on a GPU that this process does not see."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not known to torch: use cpu or cuda:INDEX") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported: use cpu or cuda:INDEX")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        require_gpus(device.index + 1, f"device {device}")
    return device


def require_gpus(needed: int, who: str) -> None:
    """Raise ConfigError where fewer than `needed` GPUs are visible; `who` needs them."""
    found = torch.cuda.device_count()
    if found < needed:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise ConfigError(
            f"{who} needs {needed} GPUs, found {found} (CUDA_VISIBLE_DEVICES {visible}): name another device, let workers share "
            f"one (--devices cuda:0,cuda:0,...), or use cpu"
        )


def usable_cores() -> int:
    """Logical cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def intra_op_threads(devices: str, count: int) -> Iterator[None]:
    """Intra-op threads of each worker inside the block; only where the workers are CPU threads (`devices` is "cpu")."""
    before = torch.get_num_threads()
    if devices == "cpu":
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
