"""What a step, and what a run so far, has come to, as plain numbers on the host."""

from __future__ import annotations

import math
from collections import deque

from dflash.batch import BatchSummary, LossSums, StepStats


class Tally:
    """Counts and seconds of this start of a run. The trainer adds to it; a resumed run begins with nothing."""

    def __init__(self, *, recent_steps: int) -> None:
        """`recent_steps`: over how many of the last steps the loss is averaged."""
        self.tokens = 0  # context tokens, all drafters
        self.padding_tokens = 0
        self.empty_steps = 0  # without a supervised position in any block
        self.warmup_seconds = 0.0
        self.wall_seconds = 0.0  # from the first step to the end of the last one, with what lies between them
        self.checkpoint_seconds = 0.0  # of these, saving and validating
        self._losses: deque[float] = deque(maxlen=recent_steps)

    def add(self, stats: StepStats) -> None:
        """Count one step."""
        self.tokens += stats.tokens
        self.padding_tokens += stats.padding_tokens
        self._losses.append(stats.loss)

    @property
    def recent_loss(self) -> float:
        """Mean of the last steps; NaN before the first one."""
        return sum(self._losses) / len(self._losses) if self._losses else math.nan


def step_stats(
    step: int,
    sums: LossSums,
    gradient_norm: float = 0.0,
    learning_rate: float = 0.0,
    *,
    seconds: float = 0.0,
    batches: tuple[BatchSummary, ...] = (),
) -> StepStats:
    """Sums as plain numbers: divided once, here, over all drafters and micro-batches. `step` counts from 0."""
    weight, blocks = float(sums.weight), float(sums.blocks)
    counted, correct = sums.counted.tolist(), sums.correct.tolist()
    return StepStats(
        step=step + 1,
        loss=float(sums.loss) / weight if weight else math.nan,
        learning_rate=learning_rate,
        gradient_norm=gradient_norm,
        tokens=sum(batch.num_tokens for batch in batches),
        padding_tokens=sum(batch.num_padding_tokens for batch in batches),
        seconds=seconds,
        teacher_forced_acceptance=1 + float(sums.accepted) / blocks if blocks else math.nan,
        accuracy=tuple(c / n if n else None for c, n in zip(correct, counted, strict=True)),
        sample_ids=tuple(sample for batch in batches for row in batch.sample_ids for sample in row),
    )
