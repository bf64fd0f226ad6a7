"""The drafter's loss: sums over block positions, with logits for a few rows at a time.

Legend: R rows, S tokens of a row, N anchor slots, B block size, H hidden size, V vocabulary, M = R*N*(B-1) predictions.

The prediction at index k of a block (1 <= k < B) is for the token at anchor + k; index 0 is the known anchor and is never
trained (reference 2.3). It counts when the token lies in the anchor's document and is marked by the loss mask. Objectives
(reference 2.5): `ce`, cross-entropy with weights exp(-(k-1)/gamma); `kl`, KL(target || drafter) against the target's
distribution at anchor+k-1, same weights; `dpace`, cross-entropy weighted by the chance that acceptance gets that far.

All logits of a step would take M*V numbers (7680 * 151936 * 4 bytes = 4.7 GB for one row of 512 anchors). The head is
frozen, so only the gradient by the hidden states is needed, and for one row of logits it is known as soon as the logits
are: it is computed chunk by chunk in the forward pass, and the logits are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.batch import LossSums, PackedBatch
from dflash.config import ConfigError, LossConfig
from dflash.modeling.draft_collector import DraftCollector
from dflash.modeling.ends import FrozenEnds

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
) -> LossSums:
    """Loss sums of a micro-batch; `loss` carries the gradient by `hidden`.

    hidden [R, N*B, H] from the drafter; ends, batch and final_hidden (the target's head input [R, S, H], for kl only) on
    the same device. At most `config.chunk_tokens` rows of logits exist at one time (for kl, and as many of the target's).
    `collector` sees the logits, too. Raises ConfigError for kl without final_hidden.
    """
    if config.kind == "kl" and final_hidden is None:
        raise ConfigError("loss.kind is kl, but the target's final hidden states were not kept: keep them, or use ce or dpace")
    labels, supervised = block_labels(batch, block_size)
    grid = labels.shape
    rows = hidden.reshape(*grid[:2], block_size, -1)[:, :, 1:].flatten(0, 2)
    teacher = _teacher_index(batch, block_size) if config.kind == "kl" else None
    wants_gradient = torch.is_grad_enabled() and rows.requires_grad
    task = _HeadTask(ends, labels.flatten(), final_hidden, teacher, config.chunk_tokens, wants_gradient, collector)
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


class _HeadLoss(torch.autograd.Function):
    """Rows [M, H] of hidden states under the frozen head -> loss and log-likelihood of the label [M] fp32, correct [M] bool."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, task: _HeadTask) -> tuple[Tensor, Tensor, Tensor]:
        loss, log_likelihood = (torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device) for _ in range(2))
        correct = torch.empty(rows.shape[0], dtype=torch.bool, device=rows.device)
        gradient = torch.empty_like(rows) if task.wants_gradient else None
        for start in range(0, rows.shape[0], task.chunk_tokens):
            part = slice(start, start + task.chunk_tokens)
            _head_chunk(task, part, rows, loss, log_likelihood, correct, gradient)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(log_likelihood, correct)
        return loss, log_likelihood, correct

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return (upstream[0].unsqueeze(-1) * gradient).to(gradient.dtype), None


def _head_chunk(
    task: _HeadTask, part: slice, rows: Tensor, loss: Tensor, log_likelihood: Tensor, correct: Tensor, gradient: Tensor | None
) -> None:
    """Fill the slice `part` of the outputs. Holds the only logits of this module."""
    labels = task.labels[part].unsqueeze(-1)
    logits = task.ends.logits(rows[part])
    if task.collector is not None:
        task.collector.look(part.start, logits)
    normalizer = logits.logsumexp(-1, keepdim=True)
    log_likelihood[part] = (logits.gather(1, labels) - normalizer).squeeze(-1)
    correct[part] = logits.argmax(-1, keepdim=True).eq(labels).squeeze(-1)
    slope = None if gradient is None else task.ends.softcap_slope(logits)
    log_q = logits.sub_(normalizer)
    teacher = _teacher_log_probabilities(task, part)
    if teacher is None:
        loss[part] = -log_likelihood[part]
    else:
        loss[part] = F.kl_div(log_q, teacher, reduction="none", log_target=True).sum(-1)
    if gradient is not None:
        by_logits = log_q.exp_()
        if teacher is None:
            by_logits.scatter_add_(1, labels, torch.full_like(by_logits[:, :1], -1.0))
        else:
            by_logits.sub_(teacher.exp_())
        if slope is not None:
            by_logits.mul_(slope)
        weight = task.ends.head_weight
        with torch.autocast(rows.device.type, enabled=False):
            gradient[part] = by_logits.to(weight.dtype) @ weight


def _teacher_log_probabilities(task: _HeadTask, part: slice) -> Tensor | None:
    if task.teacher_index is None:
        return None
    assert task.final_hidden is not None
    return task.ends.logits(task.final_hidden.flatten(0, 1)[task.teacher_index[part]]).log_softmax(-1)
