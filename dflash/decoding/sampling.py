"""The next token, from the target's logits: arg-max at temperature 0, else sampled by key.

The random number of output position i depends on (seed, request, i) alone, and a token is the inverse of the cumulative
distribution at that number. So a request decodes to the same tokens whatever drafts were verified along the way, in a chain
or in a tree, and with whatever other requests: speculative and plain sampling agree token for token (up to rounding of the
logits), which is stronger than the agreement in distribution that is needed, and which `evaluate` can check. It does not
favour a draft either: the drafter proposes without seeing the numbers.

Only the temperature shapes the distribution: top-k, top-p and penalties of the target's generation config do not apply.

Legend: N requests decoded together, Q tokens of a forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dflash.config import ConfigError

_PROBABILITIES = 2**24  # computed at one time, in float64: 128 MiB for each of a few temporary tensors


class TokenChooser:
    """Chooses the tokens of some requests; `count` is the number of output positions that may be asked for."""

    def __init__(self, *, temperature: float, seed: int, requests: Sequence[int], count: int, device: torch.device) -> None:
        if temperature < 0:
            raise ConfigError(f"temperature is {temperature}: use 0 (greedy) or a positive number")
        self._temperature = temperature
        self._numbers: Tensor | None = None  # [N, count] float64 in [0, 1), on `device`
        if temperature > 0:
            self._numbers = torch.from_numpy(np.stack([_numbers(seed, request, count) for request in requests])).to(device)

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with some of the requests; `rows` int64, on the device."""
        if self._numbers is not None:
            self._numbers = self._numbers[rows]

    def __call__(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Tokens [N, Q] int64 of the output positions [N, Q] int64, from `logits` [N, Q, V] of any float type."""
        if self._numbers is None:
            return logits.argmax(dim=-1)
        rows, numbers = logits.flatten(0, 1), self._numbers.gather(1, positions).view(-1, 1)
        size = max(1, _PROBABILITIES // rows.shape[-1])
        pieces = [self._sample(rows[i : i + size], numbers[i : i + size]) for i in range(0, len(rows), size)]
        return torch.cat(pieces).view(positions.shape)

    def _sample(self, logits: Tensor, numbers: Tensor) -> Tensor:
        cumulative = torch.softmax(logits.double() / self._temperature, dim=-1).cumsum(dim=-1)
        # right=True: the first token whose cumulative probability exceeds the number, so never one of probability 0.
        return torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True).squeeze(-1)


def _numbers(seed: int, request: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    key = np.random.SeedSequence([seed % 2**64, request])
    return np.random.Generator(np.random.Philox(key)).random(count)  # a larger count extends a smaller one
