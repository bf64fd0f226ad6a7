"""Numbers on their way from a device to the host: reading them waits for what they come from, not for what was queued since."""

from __future__ import annotations

import torch
from torch import Tensor


class Arriving:
    """A copy of a small tensor, queued on the current stream."""

    def __init__(self, values: Tensor) -> None:
        values = values.detach()
        self._event: torch.cuda.Event | None = None
        self._host = values
        if values.device.type == "cuda":
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch does not annotate it
            self._event.record(torch.cuda.current_stream(values.device))

    def read(self) -> Tensor:
        """The values on the CPU."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
