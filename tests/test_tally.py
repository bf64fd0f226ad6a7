"""Laws of dflash.tally."""

from __future__ import annotations

import math

import pytest
import torch

from dflash.batch import BatchSummary, LossSums
from dflash.tally import Tally, step_stats


def sums(loss: float, weight: float) -> LossSums:
    """Of blocks of 3: two positions after the anchor, the second one never supervised."""
    return LossSums.of_vector(torch.tensor([loss, weight, 1.0, 0.0, 4.0, 0.0, 1.0, 4.0]))


def test_the_loss_of_a_run_is_that_of_its_last_steps() -> None:
    tally = Tally(recent_steps=2)
    assert math.isnan(tally.recent_loss)
    batch = BatchSummary(index=0, sample_ids=(("a", "b"),), num_tokens=30, num_padding_tokens=2)
    for step, loss in enumerate((100.0, 4.0, 8.0)):
        tally.add(step_stats(step, sums(loss, 2.0), batches=(batch, batch)))
    assert tally.recent_loss == pytest.approx((2.0 + 4.0) / 2)
    assert (tally.tokens, tally.padding_tokens) == (3 * 60, 3 * 4)


def test_a_step_without_weight_has_no_loss_and_is_no_division_by_zero() -> None:
    assert math.isnan(step_stats(4, sums(0.0, 0.0)).loss)
    found = step_stats(4, sums(6.0, 2.0))
    assert (found.step, found.loss, found.teacher_forced_acceptance, found.accuracy) == (5, 3.0, 1.25, (0.25, None))
