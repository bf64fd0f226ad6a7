"""The next token, from the target's logits: arg-max at temperature 0, else sampled by key.

The random number of output position i depends on (seed, request, i) alone, and a token is the inverse of the cumulative
distribution at that number. So a request decodes to the same tokens whatever drafts were verified along the way:
speculative and plain sampling agree token for token (up to rounding of the logits), which is stronger than the
agreement in distribution that is needed, and which `evaluate` can check. It does not favour a draft either: the drafter
proposes without seeing the numbers.

Only the temperature shapes the distribution: top-k, top-p and penalties of the target's generation config do not apply.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dflash.config import ConfigError


class TokenChooser:
    """Chooses the tokens of one request; `count` is the number of output positions that may be asked for."""

    def __init__(self, *, temperature: float, seed: int, request: int, count: int, device: torch.device) -> None:
        if temperature < 0:
            raise ConfigError(f"temperature is {temperature}: use 0 (greedy) or a positive number")
        self._temperature = temperature
        self._numbers: Tensor | None = None  # [count] float64 in [0, 1), on `device`
        if temperature > 0:
            key = np.random.SeedSequence([seed % 2**64, request])
            numbers = np.random.Generator(np.random.Philox(key)).random(count)  # a larger count extends a smaller one
            self._numbers = torch.from_numpy(numbers).to(device)

    def __call__(self, logits: Tensor, first: int) -> Tensor:
        """Tokens [Q] int64 of the output positions first..first+Q-1, from `logits` [Q, V] of any float type."""
        if self._numbers is None:
            return logits.argmax(dim=-1)
        cumulative = torch.softmax(logits.double() / self._temperature, dim=-1).cumsum(dim=-1)
        numbers = self._numbers[first : first + len(logits), None]
        # right=True: the first token whose cumulative probability exceeds the number, so never one of probability 0.
        return torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True).squeeze(-1)
