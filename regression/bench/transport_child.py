"""One of the two ranks of the bench `transport`; rank 0, the drafter, prints what it measured. Started by torchrun."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dflash.batch import PackedBatch, Position, TargetStates
from dflash.config import RunConfig, Topology
from dflash.engine.processes import Ranks, joined
from dflash.engine.transport import ReceivingQueue, SendingQueue, StatesShape
from regression.bench import settings as bench
from regression.bench.settings import Settings

_IN_FLIGHT = 2
_WARM_UP = 3  # transfers of each kind: connections are made by the first ones
_SLOTS = 3


def main() -> int:
    """Measure as the rank that torchrun says."""
    parser = argparse.ArgumentParser()
    bench.add_options(parser)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    settings = bench.from_options(options)
    config = _config(settings, options.output)
    with joined(config) as ranks:
        found = _measure(settings, config, ranks)
    if ranks.leads:
        sys.stdout.write(json.dumps(found) + "\n")
    return 0


def _config(settings: Settings, output: Path) -> RunConfig:
    devices = "cuda" if settings.device.type == "cuda" else "cpu"
    topology = str(Topology(1, 1))
    return dataclasses.replace(settings.config(), engine="processes", topology=topology, devices=devices, output=output)


def _measure(settings: Settings, config: RunConfig, ranks: Ranks) -> dict[str, Any]:
    shape = bench.drafter_shape(config)
    batch = bench.random_batch(config, shape.vocab_size)
    dtype = torch.float32 if ranks.device.type == "cpu" else torch.bfloat16
    wire_shape = StatesShape(
        features=(*batch.input_ids.shape, shape.num_features * shape.hidden_size), final_hidden=None, dtype=dtype
    )
    features = torch.randn(wire_shape.features, device=ranks.device).to(dtype)
    with ranks.doing.at("slow", "measuring the link"):
        link = _link(ranks, features, settings.rounds)
    with ranks.doing.at("slow", "measuring the transport"):
        transport = _transport(ranks, batch, features, wire_shape, settings.rounds)
    return {
        "bytes": features.numel() * features.element_size(),
        "link_seconds": link,
        "transport_seconds": transport,
        "devices": f"{config.devices}, {'NCCL' if ranks.device.type == 'cuda' else 'Gloo'}",
        "rounds": settings.rounds,
    }


def _link(ranks: Ranks, features: torch.Tensor, rounds: int) -> float:
    """Seconds of a transfer of one tensor, some in flight."""
    slots = [torch.empty_like(features) for _ in range(_IN_FLIGHT)] if ranks.leads else [features] * _IN_FLIGHT
    other = 1 - ranks.rank

    def begin(number: int) -> Callable[[], None]:
        slot = [slots[number % _IN_FLIGHT]]
        return ranks.receive_tensors(slot, other) if ranks.leads else ranks.send_tensors(slot, other)

    waiting: deque[Callable[[], None]] = deque()
    ends = []
    for number in range(_WARM_UP + rounds + 1):
        waiting.append(begin(number))
        if len(waiting) == _IN_FLIGHT:
            waiting.popleft()()
            ends.append(time.perf_counter())
    while waiting:
        waiting.popleft()()
    dist.barrier(group=ranks.control)
    return _each(ends[_WARM_UP - 1 :])


def _transport(ranks: Ranks, batch: PackedBatch, features: torch.Tensor, shape: StatesShape, rounds: int) -> float:
    """Seconds of a micro-batch that leaves the drafter's queue. On the target: 0."""
    end = _WARM_UP + rounds + 1

    def numbered(number: int) -> PackedBatch:
        return dataclasses.replace(batch, index=number, position=Position(epoch=0, batch=number))

    if not ranks.leads:
        sending = SendingQueue(ranks, ranks.roles, shape, first=0, end=end, checksums=False)
        while (number := sending.claim()) is not None:
            sending.put(number, TargetStates(batch=numbered(number), features=features))
        return 0.0
    numbers = ranks.roles.numbers_of_drafter(ranks.rank, 0, end)
    queue = ReceivingQueue(ranks, ranks.roles, shape, numbered, numbers=numbers, slots=_SLOTS, checksums=False)
    queue.start()
    ends = []
    while queue.get(before=end) is not None:
        ends.append(time.perf_counter())
    queue.close()
    return _each(ends[_WARM_UP:])


def _each(ends: list[float]) -> float:
    """The mean: what is ahead of its reader ends in bursts, of which a median sees the short waits only."""
    return (ends[-1] - ends[0]) / (len(ends) - 1)


if __name__ == "__main__":
    sys.exit(main())
