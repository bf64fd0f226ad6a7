"""Which worker runs where. Nothing is moved to another device silently: what does not fit is refused."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from dflash.config import ConfigError, RunConfig, Topology


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A device for every worker, targets first in `devices` of the configuration."""

    targets: tuple[torch.device, ...]
    drafters: tuple[torch.device, ...]

    @property
    def num_devices(self) -> int:
        """GPUs in use, or on a CPU the worker threads: there every thread counts as a device."""
        used = [*self.targets, *self.drafters]
        return len(set(used)) if used[0].type == "cuda" else len(used)


def place(config: RunConfig) -> Placement:
    """Devices for the topology of `config`. Raises ConfigError when they do not exist or do not suffice."""
    topology = Topology.parse(config.topology)
    workers = topology.targets + topology.drafters
    if config.devices == "cpu":
        names = ["cpu"] * workers
    elif config.devices == "cuda":
        names = [f"cuda:{i}" for i in range(workers)]
        _require_gpus(workers, f"topology {topology} needs {workers} GPUs")
    else:
        names = [name.strip() for name in config.devices.split(",")]
        if len(names) != workers:
            raise ConfigError(
                f"devices {config.devices!r} names {len(names)} devices, topology {topology} has {workers} workers: "
                f"name one device a worker, targets first"
            )
    devices = tuple(_device(name) for name in names)
    if len({device.type for device in devices}) > 1:
        raise ConfigError(f"devices {config.devices!r} mix CPU and GPU: use one kind for all workers")
    for device in devices:
        if device.type == "cuda":
            _require_gpus(device.index + 1, f"device {device} needs {device.index + 1} GPUs")
    return Placement(targets=devices[: topology.targets], drafters=devices[topology.targets :])


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not known to torch: use cpu or cuda:INDEX") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported: use cpu or cuda:INDEX")
    if device.type == "cuda" and device.index is None:
        raise ConfigError(f"device {name!r} names no GPU: write cuda:0")
    return device


def _require_gpus(needed: int, what: str) -> None:
    found = torch.cuda.device_count()
    if found < needed:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise ConfigError(
            f"{what}, found {found} (CUDA_VISIBLE_DEVICES {visible}): choose a smaller --topology, let workers share GPUs with "
            f"--devices cuda:0,cuda:0,... or use --devices cpu"
        )
