"""The `Wire` of the transport over torch.distributed: point to point, numbers by a Gloo group, tensors by a fast one.

A transfer is begun by the call and ended by what the call returns. Everything that torch.distributed raises when a connection
breaks becomes `PeerLost`, with the rank at the other end. Makes no groups: `dflash.engine.processes` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dflash.engine.watch import PeerLost


@dataclass(kw_only=True)
class GroupWire:
    """The wire of one rank; fields are filled when the groups are made."""

    device: torch.device
    control: Any  # Gloo, all ranks
    data: Any  # all ranks, NCCL where devices are GPUs

    def send_control(self, values: list[int], to: int, tag: int) -> Callable[[], None]:
        """See `dflash.engine.transport.Wire`."""
        tensor = torch.tensor(values, dtype=torch.int64)
        with talking(to):
            work = dist.isend(tensor, to, group=self.control, tag=tag)
        return _waiting([work], to, tensor)

    def receive_control(self, count: int, source: int, tag: int) -> Callable[[], list[int]]:
        """See `dflash.engine.transport.Wire`."""
        tensor = torch.empty(count, dtype=torch.int64)
        with talking(source):
            wait = _waiting([dist.irecv(tensor, source, group=self.control, tag=tag)], source)

        def values() -> list[int]:
            wait()
            result: list[int] = tensor.tolist()
            return result

        return values

    def send_tensors(self, tensors: list[Tensor], to: int) -> Callable[[], None]:
        """See `dflash.engine.transport.Wire`."""
        with talking(to):
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, t, to, self.data) for t in tensors])
        return _waiting(works, to, *tensors)

    def receive_tensors(self, tensors: list[Tensor], source: int) -> Callable[[], None]:
        """See `dflash.engine.transport.Wire`."""
        with talking(source):
            works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, t, source, self.data) for t in tensors])
        return _waiting(works, source, *tensors)


@contextlib.contextmanager
def talking(peer: int | None = None) -> Iterator[None]:
    """What torch.distributed raises when a connection breaks, as PeerLost."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(peer, error) from error


def _waiting(works: Sequence[Any], peer: int, *kept: Tensor) -> Callable[[], None]:
    """Wait for transfers, until tensors on a GPU are complete; `kept` stay alive until then."""

    def wait() -> None:
        with talking(peer):
            for work in works:
                work.wait()
            if any(tensor.is_cuda for tensor in kept):
                torch.cuda.current_stream().synchronize()

    return wait
