"""The drafter's loss: sums over block positions, with logits for a few rows at a time.

Legend: R rows, S tokens of a row, N anchor slots, B block size, H hidden size, V vocabulary, M = R*N*(B-1) predictions.

The prediction at index k of a block (1 <= k < B) is for the token at anchor + k; index 0 is the known anchor and is never
trained (reference 2.3). It counts when the token lies in the anchor's document and is marked by the loss mask. Objectives
(reference 2.5): `ce`, cross-entropy with weights exp(-(k-1)/gamma); `kl`, KL(target || drafter) against the target's
distribution at anchor+k-1, same weights; `dpace`, cross-entropy weighted by the chance that acceptance gets that far.

All logits of a step would take M*V numbers (7680 * 151936 * 4 bytes = 4.7 GB for one row of 512 anchors). The head is
frozen, so only the gradient by the hidden states is needed, and for one row of logits it is known as soon as the logits
are: it is computed chunk by chunk in the forward pass, and the logits are dropped. Chunks are equally long, because what scores
them may be compiled for one shape: the last one begins a little earlier and repeats some rows where they do not divide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash.batch import LossSums, PackedBatch
from dflash.config import ConfigError, LossConfig
from dflash.modeling.draft_collector import DraftCollector
from dflash.modeling.ends import FrozenEnds
from dflash.modeling.fp8_head import Fp8Head
from dflash.modeling.head_scores import Score, score

_PAPER_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


def default_gamma(block_size: int) -> float:
    """Decay of the position weights: 7, 5, 4 for B = 16, 10, 8 (DFlash paper, A.1), else B/2."""
    return _PAPER_GAMMA.get(block_size, block_size / 2)


def position_weights(block_size: int, gamma: float, device: torch.device | str = "cpu") -> Tensor:
    """exp(-(k-1)/gamma) for k = 1..B-1, [B-1] fp32."""
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32, device=device) / gamma)


def block_labels(batch: PackedBatch, block_size: int) -> tuple[Tensor, Tensor]:
    """What each block position should predict: labels [R, N, B-1] int64 and supervised [R, N, B-1] bool.

    The label of index k is the token at anchor + k. Supervised are positions of valid slots whose token lies in the row,
    in the anchor's document, and is marked by the loss mask. Labels of other positions are some valid token id.
    """
    length = batch.input_ids.shape[1]
    offsets = torch.arange(1, block_size, device=batch.anchors.device)
    index = batch.anchors.unsqueeze(-1) + offsets
    flat = index.clamp(max=length - 1).flatten(1)
    labels, loss_mask, document = (
        source.gather(1, flat).view_as(index) for source in (batch.input_ids, batch.loss_mask, batch.document_ids)
    )
    anchor_document = batch.document_ids.gather(1, batch.anchors).unsqueeze(-1)
    in_document = (index < length) & (document == anchor_document) & (anchor_document >= 0)
    return labels, in_document & loss_mask & batch.anchor_valid.unsqueeze(-1)


def draft_loss(
    hidden: Tensor,
    ends: FrozenEnds,
    batch: PackedBatch,
    config: LossConfig,
    block_size: int,
    final_hidden: Tensor | None = None,
    collector: DraftCollector | None = None,
    score: Score = score,
    fp8_head: Fp8Head | None = None,
) -> LossSums:
    """Loss sums of a micro-batch; `loss` carries the gradient by `hidden`.

    hidden [R, N*B, H] from the drafter; ends, batch and final_hidden (the target's head input [R, S, H], for kl only) on
    the same device. At most `config.chunk_tokens` rows of logits exist at one time (for kl, and as many of the target's).
    `collector` sees the logits, too; `score` stands in for that of `head_scores`, compiled. With `fp8_head`, which needs
    `score_for_fp8`, what is trained on (not what is only looked at) goes through the head in fp8.
    Raises ConfigError for kl without final_hidden.
    """
    if config.kind == "kl" and final_hidden is None:
        raise ConfigError("loss.kind is kl, but the target's final hidden states were not kept: keep them, or use ce or dpace")
    labels, supervised = block_labels(batch, block_size)
    grid = labels.shape
    rows = hidden.reshape(*grid[:2], block_size, -1)[:, :, 1:].flatten(0, 2)
    teacher = _teacher_index(batch, block_size) if config.kind == "kl" else None
    wants_gradient = torch.is_grad_enabled() and rows.requires_grad
    fp8_head = fp8_head if wants_gradient else None
    task = _HeadTask(
        ends, labels.flatten(), final_hidden, teacher, config.chunk_tokens, wants_gradient, collector, score, fp8_head
    )
    if collector is not None:
        collector.begin(labels)
    loss, log_likelihood, correct = _HeadLoss.apply(rows, task)  # type: ignore[no-untyped-call]  # untyped in torch
    if collector is not None:
        collector.finish(labels, supervised)
    if config.kind == "dpace":
        weights = _dpace_weights(log_likelihood.view(grid), supervised, config.dpace_alpha)
    else:
        gamma = default_gamma(block_size) if config.gamma is None else config.gamma
        weights = position_weights(block_size, gamma, hidden.device) * supervised
    hits = (correct.view(grid) & supervised).float()
    return LossSums(
        loss=(weights * loss.view(grid)).sum(),
        weight=weights.sum(),
        correct=hits.sum((0, 1)),
        counted=supervised.float().sum((0, 1)),
        accepted=hits.cumprod(-1).sum(),
        blocks=supervised.any(-1).float().sum(),
    )


def _teacher_index(batch: PackedBatch, block_size: int) -> Tensor:
    """Index [M] into flattened [R*S] of the token before each label: there the target predicts the label."""
    rows, length = batch.input_ids.shape
    offsets = torch.arange(block_size - 1, device=batch.anchors.device)
    index = (batch.anchors.unsqueeze(-1) + offsets).clamp(max=length - 1)
    start = torch.arange(rows, device=index.device).view(-1, 1, 1) * length
    return (start + index).flatten()


def _dpace_weights(log_likelihood: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """D-PACE (arXiv 2605.18810): how much of the expected accepted length hangs on each position, [R, N, B-1] fp32.

    s_k = (1-alpha) q_k + alpha with q_k the drafter's probability of the label (1 where unsupervised); P_k is the product
    of s_1..s_k; the weight of position k is the sum of the P_j of supervised j >= k.
    """
    smoothed = (1 - alpha) * log_likelihood.exp() + alpha
    survival = torch.where(supervised, smoothed, 1.0).cumprod(-1) * supervised
    return survival.flip(-1).cumsum(-1).flip(-1) * supervised


@dataclass(frozen=True)
class _HeadTask:
    """What `_HeadLoss` needs beside the hidden states. All tensors on their device."""

    ends: FrozenEnds
    labels: Tensor  # [M]
    final_hidden: Tensor | None  # [R, S, H]
    teacher_index: Tensor | None  # [M] into R*S; None: cross-entropy
    chunk_tokens: int
    wants_gradient: bool
    collector: DraftCollector | None
    score: Score
    fp8_head: Fp8Head | None


class _HeadLoss(torch.autograd.Function):
    """Rows [M, H] of hidden states under the frozen head -> loss and log-likelihood of the label [M] fp32, correct [M] bool."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, task: _HeadTask) -> tuple[Tensor, Tensor, Tensor]:
        loss, log_likelihood = (torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device) for _ in range(2))
        correct = torch.empty(rows.shape[0], dtype=torch.bool, device=rows.device)
        gradient = torch.empty_like(rows) if task.wants_gradient else None
        seen = 0
        for part in chunks(rows.shape[0], task.chunk_tokens):
            _head_chunk(task, part, rows, loss, log_likelihood, correct, gradient, seen=seen)
            seen = part.stop
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(log_likelihood, correct)
        return loss, log_likelihood, correct

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return (upstream[0].unsqueeze(-1) * gradient).to(gradient.dtype), None


def chunks(rows: int, most: int) -> list[slice]:
    """Slices of one length, at most `most`, that cover `rows` rows in order; the last one overlaps where they do not divide."""
    count = math.ceil(rows / most)
    length = math.ceil(rows / count)
    starts = [min(number * length, rows - length) for number in range(count)]
    return [slice(start, start + length) for start in starts]


def _head_chunk(
    task: _HeadTask,
    part: slice,
    rows: Tensor,
    loss: Tensor,
    log_likelihood: Tensor,
    correct: Tensor,
    gradient: Tensor | None,
    *,
    seen: int,
) -> None:
    """Fill the slice `part` of the outputs. Holds the only logits of this module; the collector has seen rows before `seen`."""
    labels, ends = task.labels[part].unsqueeze(-1), task.ends
    logits = ends.raw_logits(rows[part]) if task.fp8_head is None else task.fp8_head.logits(rows[part])
    if task.collector is not None:
        task.collector.look(seen, logits[seen - part.start :], ends.softcap)
    teacher = None
    if task.teacher_index is not None:
        assert task.final_hidden is not None
        teacher = ends.raw_logits(task.final_hidden.flatten(0, 1)[task.teacher_index[part]])
    scores = task.score(logits, labels, teacher, ends.softcap, gradient is not None)
    loss[part], log_likelihood[part], correct[part] = scores.loss, scores.log_likelihood, scores.correct
    if gradient is None:
        return
    assert scores.by_logits is not None
    if task.fp8_head is not None:
        assert scores.row_scale is not None
        at_label = scores.by_label * ends.head_weight[labels.squeeze(-1)]
        gradient[part] = task.fp8_head.by_hidden(scores.by_logits, scores.row_scale) + at_label
        return
    if teacher is None:
        scores.by_logits.scatter_(1, labels, scores.by_label.to(scores.by_logits.dtype))
    with torch.autocast(rows.device.type, enabled=False):
        gradient[part] = scores.by_logits @ ends.head_weight
