"""Marginals for `dflash.modeling.tree_estimate`, taken from the logits that the loss computes anyway.

The loss shows its logits chunk by chunk; of some blocks, spread evenly over the micro-batch, the likeliest tokens are kept. Which
blocks depends on their number alone, so the counts are the same for any number of drafters.

Legend: R rows, N anchor slots, D = B-1 draft positions, V vocabulary, n chosen blocks, k kept tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash.modeling.head_scores import capped
from dflash.modeling.tree_estimate import DraftCounts, count_drafts, top_marginals


class DraftCollector:
    """For one call of `draft_loss`; afterwards `counts` holds what about `blocks` blocks say."""

    def __init__(self, *, budget: int, blocks: int) -> None:
        self.counts: DraftCounts | None = None
        self._budget, self._blocks = budget, blocks
        self._chosen = self._rows = torch.empty(0, dtype=torch.int64)  # numbers of blocks [n]; of their rows of logits [n*D]
        self._kept: list[tuple[Tensor, Tensor]] = []

    def begin(self, labels: Tensor) -> None:
        """Choose among the blocks of `labels` [R, N, D]."""
        total, positions = labels.shape[0] * labels.shape[1], labels.shape[2]
        step = max(1, total // self._blocks)
        self._chosen = torch.arange(step // 2, total, step)[: self._blocks]
        self._rows = (self._chosen[:, None] * positions + torch.arange(positions)).flatten()
        self._kept = []

    def look(self, start: int, logits: Tensor, softcap: float | None) -> None:
        """Keep what is wanted of uncapped `logits` [rows, V], whose first row has the number `start`. In order, under no_grad."""
        first, end = torch.searchsorted(self._rows, torch.tensor([start, start + len(logits)])).tolist()
        if end > first:
            rows = (self._rows[first:end] - start).to(logits.device)
            self._kept.append(top_marginals(capped(logits[rows], softcap), self._budget))

    def finish(self, labels: Tensor, supervised: Tensor) -> None:
        """Count, by the labels and their supervision [R, N, D]."""
        positions = labels.shape[2]
        kept = [torch.cat(parts) for parts in zip(*self._kept, strict=True)]
        log_probabilities, tokens = (part.view(-1, positions, part.shape[-1]) for part in kept)
        chosen = self._chosen.to(labels.device)
        self.counts = count_drafts(
            log_probabilities, tokens, labels.flatten(0, 1)[chosen], supervised.flatten(0, 1)[chosen], self._budget
        )
        self._kept = []
