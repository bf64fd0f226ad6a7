"""Which worker runs where. Nothing is moved to another device silently: what does not fit is refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dflash.config import ConfigError, RunConfig, Topology
from dflash.device import parse_device, require_gpus
from dflash.modeling.fp8_head import check_device


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A device for every worker of this process, targets first in `devices` of the configuration."""

    targets: tuple[torch.device, ...]
    drafters: tuple[torch.device, ...]
    first_target: int = 0  # number of the first of them, where others run in other processes
    first_drafter: int = 0

    @property
    def num_devices(self) -> int:
        """GPUs in use, or on a CPU the worker threads: there every thread counts as a device."""
        used = [*self.targets, *self.drafters]
        return len(set(used)) if used[0].type == "cuda" else len(used)


def place(config: RunConfig) -> Placement:
    """Devices for the topology of `config`. Raises ConfigError when they do not exist, do not suffice, or cannot do it."""
    topology = Topology.parse(config.topology)
    workers = topology.targets + topology.drafters
    if config.devices == "cpu":
        names = ["cpu"] * workers
    elif config.devices == "cuda":
        names = [f"cuda:{i}" for i in range(workers)]
        require_gpus(workers, f"topology {topology}")
    else:
        names = [name.strip() for name in config.devices.split(",")]
        if len(names) != workers:
            raise ConfigError(
                f"devices {config.devices!r} names {len(names)} devices, topology {topology} has {workers} workers: "
                f"name one device a worker, targets first"
            )
    if len({name.partition(":")[0] for name in names}) > 1:
        raise ConfigError(f"devices {config.devices!r} mix CPU and GPU: use one kind for all workers")
    if "cuda" in names:
        raise ConfigError("device 'cuda' names no GPU: write cuda:0")
    devices = tuple(parse_device(name) for name in names)
    check_abilities(config, devices[topology.targets :])
    return Placement(targets=devices[: topology.targets], drafters=devices[topology.targets :])


def check_abilities(config: RunConfig, drafters: Iterable[torch.device]) -> None:
    """Raise ConfigError, naming all of them, for settings that these devices of drafters cannot have."""
    found = []
    kinds = {device.type for device in drafters}
    if "cpu" in kinds:
        if config.drafter.attention == "flex":
            found.append(
                "drafter.attention is flex, but torch cannot train flex_attention on a CPU: use --drafter.attention sdpa"
            )
        if config.loss.fp8_head:
            found.append("loss.fp8-head is for GPUs, drafters are on a CPU: leave it out")
        if config.optim.bf16_copies:
            found.append("optim.bf16-copies is for GPUs, drafters on a CPU train in fp32: leave it out")
    elif config.loss.fp8_head:
        for device in drafters:
            check_device(device)
    if found:
        raise ConfigError("; ".join(found))
