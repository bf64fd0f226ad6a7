"""What a row of logits says of its label, and the gradient of its loss: all that the loss needs of logits, in one function.

Written for `torch.compile`: compiled it is one kernel over bf16 logits (maximum, sum and arg-max, then the gradient), which
makes no fp32 copy of them. Uncompiled it is the slow reference, and the way on CPUs.

Legend: C rows of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.modeling.fp8_head import FP8, LARGEST


class Scores(NamedTuple):
    """Of C rows; fp32 unless said otherwise."""

    loss: Tensor  # [C]
    log_likelihood: Tensor  # [C], of the label
    correct: Tensor  # [C] bool: the label is the likeliest token
    by_logits: (
        Tensor | None
    )  # [C, V] in the logits' dtype: gradient of the loss by the logits, but that of the label is not one less
    by_label: Tensor  # [C, 1]: the gradient at the label
    row_scale: Tensor | None = None  # [C, 1]: what fp8 `by_logits` count; they are zero at the label


Score = Callable[[Tensor, Tensor, Tensor | None, "float | None", bool], Scores]


def score(logits: Tensor, labels: Tensor, teacher: Tensor | None, softcap: float | None, wants_gradient: bool) -> Scores:
    """Score logits [C, V] as the head gives them, before any soft cap; fp32 logits are overwritten.

    labels [C, 1] int64. Without `teacher` the loss is cross-entropy; with the target's logits [C, V] it is KL(target || drafter).
    """
    wide = capped(logits, softcap)
    normalizer = wide.logsumexp(-1, keepdim=True)
    at_label = wide.gather(1, labels)
    log_likelihood = at_label - normalizer
    correct = wide.argmax(-1, keepdim=True).eq(labels)
    slope = None if softcap is None or not wants_gradient else 1.0 - (wide / softcap).square()
    log_q = wide.sub_(normalizer)
    if teacher is None:
        loss, log_p = -log_likelihood, None
    else:
        log_p = capped(teacher, softcap).log_softmax(-1)
        loss = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1, keepdim=True)
    by_label = log_likelihood.exp() - 1.0
    if softcap is not None:
        by_label = by_label * (1.0 - (at_label / softcap).square())
    by_logits = _gradient(log_q, log_p, slope).to(logits.dtype) if wants_gradient else None
    return Scores(loss.squeeze(-1), log_likelihood.squeeze(-1), correct.squeeze(-1), by_logits, by_label)


def score_for_fp8(logits: Tensor, labels: Tensor, _teacher: Tensor | None, softcap: float | None, wants_gradient: bool) -> Scores:
    """As `score` without a teacher, with a gradient in fp8 for `fp8_head`."""
    exact = score(logits, labels, None, softcap, False)
    if not wants_gradient:
        return exact
    wide = capped(logits, softcap)
    peak = wide.amax(-1, keepdim=True)
    slope = 1.0 if softcap is None else 1.0 - (wide / softcap).square()
    relative = (wide - peak).exp() * slope
    others = torch.arange(logits.shape[-1], device=logits.device) != labels
    likelihood = exact.log_likelihood.unsqueeze(-1)
    row_scale = (peak - wide.gather(1, labels) + likelihood).exp() / LARGEST  # the likeliest token's probability
    by_logits = (relative * others * LARGEST).to(FP8)
    return Scores(
        exact.loss, exact.log_likelihood, exact.correct, by_logits, exact.by_label, row_scale
    )  # Dynamo knows no _replace


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits in fp32, soft-capped as the target does."""
    wide = logits.float()
    return wide if softcap is None else softcap * torch.tanh(wide / softcap)


def _gradient(log_q: Tensor, log_p: Tensor | None, slope: Tensor | None) -> Tensor:
    found = log_q.exp_()
    if log_p is not None:
        found.sub_(log_p.exp_())
    return found if slope is None else found.mul_(slope)
