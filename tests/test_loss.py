from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from modeling_batches import packed_batch, random_tensor
from torch import Tensor, nn

from dflash.batch import LossSums, PackedBatch
from dflash.config import ConfigError, LossConfig
from dflash.modeling.ends import FrozenEnds
from dflash.modeling.loss import block_labels, default_gamma, draft_loss, position_weights

HIDDEN, VOCABULARY = 8, 40
KINDS = ("ce", "dpace", "kl")


def make_ends(softcap: float | None = None, seed: int = 3) -> FrozenEnds:
    embedding = nn.Embedding(VOCABULARY, HIDDEN)
    return FrozenEnds(embedding, random_tensor(VOCABULARY, HIDDEN, seed=seed), softcap)


@st.composite
def batches(draw: st.DrawFn) -> PackedBatch:
    length = draw(st.integers(4, 20))
    first = draw(st.integers(1, length - 1))
    second = draw(st.integers(0, length - first))
    documents = [[n for n in (first, second) if n], [draw(st.integers(1, length))]]
    slots = draw(st.integers(1, 4))
    anchors = [sorted(draw(st.lists(st.integers(0, length - 1), max_size=slots))) for _ in range(2)]
    batch = packed_batch(
        documents, length=length, anchors=anchors, num_anchors=slots, seed=draw(st.integers(0, 99)), vocabulary=VOCABULARY
    )
    kept = torch.tensor(draw(st.lists(st.booleans(), min_size=2 * length, max_size=2 * length))).view(2, length)
    return dataclasses.replace(batch, loss_mask=batch.loss_mask & kept)


def naive(
    hidden: Tensor, ends: FrozenEnds, batch: PackedBatch, config: LossConfig, block_size: int, final_hidden: Tensor
) -> dict[str, Tensor]:
    """Full logits, plain autograd, one Python loop over rows, slots and indices (reference 2.3 and 2.5)."""
    logits = ends.logits(hidden).view(*batch.anchors.shape, block_size, VOCABULARY)
    teacher = ends.logits(final_hidden)
    gamma = config.gamma or {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, block_size / 2)
    loss, weight_sum, accepted, blocks = (torch.zeros(()) for _ in range(4))
    correct, counted = torch.zeros(block_size - 1), torch.zeros(block_size - 1)
    for row, anchors in enumerate(batch.anchors.tolist()):
        for slot, anchor in enumerate(anchors):
            terms, likelihoods, supervised, hits = [], [], [], []
            for k in range(1, block_size):
                place = anchor + k
                inside = place < batch.input_ids.shape[1] and bool(batch.anchor_valid[row, slot])
                inside = inside and int(batch.document_ids[row, anchor]) >= 0
                inside = inside and int(batch.document_ids[row, place]) == int(batch.document_ids[row, anchor])
                supervised.append(inside and bool(batch.loss_mask[row, place]))
                if not supervised[-1]:
                    terms.append(torch.zeros(()))
                    likelihoods.append(1.0)
                    hits.append(False)
                    continue
                log_q = logits[row, slot, k].log_softmax(-1)
                label = int(batch.input_ids[row, place])
                likelihoods.append(log_q[label].exp().item())
                hits.append(int(log_q.argmax()) == label)
                log_p = teacher[row, place - 1].log_softmax(-1)
                terms.append((log_p.exp() * (log_p - log_q)).sum() if config.kind == "kl" else -log_q[label])
            weights = [math.exp(-(k - 1) / gamma) for k in range(1, block_size)]
            if config.kind == "dpace":
                smoothed = [
                    (1 - config.dpace_alpha) * q + config.dpace_alpha if s else 1.0
                    for q, s in zip(likelihoods, supervised, strict=True)
                ]
                survival = [math.prod(smoothed[: j + 1]) for j in range(block_size - 1)]
                weights = [sum(survival[j] for j in range(k, block_size - 1) if supervised[j]) for k in range(block_size - 1)]
            for index, (term, weight, s) in enumerate(zip(terms, weights, supervised, strict=True)):
                loss = loss + weight * term
                weight_sum = weight_sum + weight * s
                counted[index] += s
                correct[index] += hits[index]
            blocks += any(supervised)
            accepted += next((i for i, hit in enumerate(hits) if not hit), block_size - 1)
    return {"loss": loss, "weight": weight_sum, "correct": correct, "counted": counted, "accepted": accepted, "blocks": blocks}


def gradient_of(loss: Tensor, hidden: Tensor) -> Tensor:
    return torch.autograd.grad(loss, hidden, allow_unused=True)[0] if loss.requires_grad else torch.zeros_like(hidden)


def compare(sums: LossSums, expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(
            getattr(sums, name), value, atol=1e-4, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("softcap", [None, 2.0])
@given(
    batch=batches(), block_size=st.integers(2, 6), chunk=st.integers(1, 50), seed=st.integers(0, 99),
    gamma=st.sampled_from([None, 1.5]), alpha=st.sampled_from([0.5, 0.3, 1.0]),
)  # fmt: skip
@settings(max_examples=12, deadline=None)
def test_loss_and_gradient_equal_full_logits_with_plain_autograd(
    kind: Any,
    softcap: float | None,
    batch: PackedBatch,
    block_size: int,
    chunk: int,
    seed: int,
    gamma: float | None,
    alpha: float,
) -> None:
    gamma = None if kind == "dpace" else gamma  # it weighs positions itself
    ends, config = make_ends(softcap), LossConfig(kind=kind, chunk_tokens=chunk, gamma=gamma, dpace_alpha=alpha)
    rows, slots = batch.anchors.shape
    hidden = random_tensor(rows, slots * block_size, HIDDEN, seed=seed).requires_grad_()
    final_hidden = random_tensor(*batch.input_ids.shape, HIDDEN, seed=seed + 1)
    sums = draft_loss(hidden, ends, batch, config, block_size, final_hidden)
    expected = naive(hidden, ends, batch, config, block_size, final_hidden)
    compare(sums, expected)
    (found,) = torch.autograd.grad(3.0 * sums.loss, hidden)  # the factor: an upstream gradient other than 1
    reference = gradient_of(3.0 * expected["loss"], hidden)
    torch.testing.assert_close(found, reference, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_change_nothing(kind: Any) -> None:
    batch = packed_batch([[30], [30]], length=32, anchors=[[1, 5, 28], [3]], num_anchors=4, vocabulary=VOCABULARY)
    hidden, final_hidden = random_tensor(2, 16, HIDDEN).requires_grad_(), random_tensor(2, 32, HIDDEN, seed=1)
    results = []
    for chunk in (1, 2, 3, 7, 23, 24, 1000):
        sums = draft_loss(hidden, make_ends(), batch, LossConfig(kind=kind, chunk_tokens=chunk), 4, final_hidden)
        results.append((sums.loss.detach(), gradient_of(sums.loss, hidden)))
    for loss, gradient in results[1:]:
        torch.testing.assert_close(loss, results[0][0])
        torch.testing.assert_close(gradient, results[0][1])


@pytest.mark.parametrize("kind", KINDS)
def test_never_more_rows_of_logits_than_one_chunk(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = packed_batch([[30], [30]], length=32, anchors=[[1, 5, 28], [3]], num_anchors=4, vocabulary=VOCABULARY)
    hidden, final_hidden = random_tensor(2, 16, HIDDEN).requires_grad_(), random_tensor(2, 32, HIDDEN, seed=1)
    rows: list[int] = []
    exact = FrozenEnds.raw_logits

    def counted(self: FrozenEnds, states: Tensor) -> Tensor:
        rows.append(states.shape[0])
        return exact(self, states)

    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    monkeypatch.setattr(FrozenEnds, "raw_logits", counted)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        sums = draft_loss(hidden, make_ends(), batch, LossConfig(kind=kind, chunk_tokens=5), 4, final_hidden)
    chunks = [5, 5, 5, 5, 5]  # of 24 rows: equally long, one row twice
    assert rows == (chunks if kind != "kl" else [size for size in chunks for _ in ("drafter", "target")])
    assert max(kept) <= hidden.numel()  # nothing of the size of the logits waits for backward
    sums.loss.backward()
    assert len(rows) == (10 if kind == "kl" else 5)  # and backward recomputes none


def test_index_0_of_a_block_is_never_trained() -> None:
    batch = packed_batch([[30]], length=32, anchors=[[1, 5, 20]], num_anchors=4, vocabulary=VOCABULARY)
    for kind in KINDS:
        hidden = random_tensor(1, 16, HIDDEN).requires_grad_()
        draft_loss(hidden, make_ends(), batch, LossConfig(kind=kind), 4, random_tensor(1, 32, HIDDEN)).loss.backward()
        assert hidden.grad is not None
        by_index = hidden.grad.view(4, 4, HIDDEN).abs().sum(-1)
        assert (by_index[:, 0] == 0).all()
        assert (by_index[:3, 1:] > 0).all()
        assert (by_index[3] == 0).all()  # the unused slot


def test_labels_end_with_the_document_and_the_row() -> None:
    batch = packed_batch([[6, 4]], length=12, anchors=[[4, 7, 9]], num_anchors=4)
    labels, supervised = block_labels(batch, 4)
    tokens = batch.input_ids[0]
    assert labels[0, 0, 0] == tokens[5]
    assert labels[0, 1].tolist() == tokens[8:11].tolist()
    assert supervised[0].tolist() == [
        [True, False, False],  # tokens 6 and 7 are the next document's
        [True, True, False],  # token 10 is padding
        [False, False, False],
        [False, False, False],  # unused slot
    ]
    batch = packed_batch([[12]], length=12, anchors=[[10, 11]], num_anchors=2)
    assert block_labels(batch, 4)[1][0].tolist() == [[True, False, False], [False, False, False]]


def test_unmarked_tokens_are_not_trained_and_later_ones_still_are() -> None:
    batch = packed_batch([[12]], length=12, anchors=[[2]], num_anchors=1)
    loss_mask = batch.loss_mask.clone()
    loss_mask[0, 4] = False
    _, supervised = block_labels(dataclasses.replace(batch, loss_mask=loss_mask), 4)
    assert supervised[0, 0].tolist() == [True, False, True]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_supervision_gives_zero_loss_weight_and_gradient(kind: Any) -> None:
    batch = packed_batch([[12]], length=12, anchors=[[]], num_anchors=3, vocabulary=VOCABULARY)
    hidden = random_tensor(1, 12, HIDDEN).requires_grad_()
    sums = draft_loss(hidden, make_ends(), batch, LossConfig(kind=kind), 4, random_tensor(1, 12, HIDDEN, seed=1))
    sums.loss.backward()
    assert (sums.loss.item(), sums.weight.item(), sums.blocks.item(), sums.accepted.item()) == (0, 0, 0, 0)
    assert hidden.grad is not None
    assert (hidden.grad == 0).all()


def test_a_drafter_that_knows_the_text_is_accepted_whole() -> None:
    batch = packed_batch([[20]], length=20, anchors=[[1, 8, 18]], num_anchors=3, vocabulary=VOCABULARY)
    head = F.normalize(random_tensor(VOCABULARY, HIDDEN, seed=3), dim=-1)
    ends = FrozenEnds(nn.Embedding(VOCABULARY, HIDDEN), head, None)
    labels, supervised = block_labels(batch, 4)
    hidden = torch.zeros(1, 3, 4, HIDDEN)
    hidden[:, :, 1:] = 200 * head[labels]
    sums = draft_loss(hidden.flatten(1, 2), ends, batch, LossConfig(), 4)
    assert sums.accepted.item() == 3 + 3 + 1
    assert sums.blocks.item() == 3
    assert torch.equal(sums.correct, sums.counted)
    assert torch.equal(sums.counted, supervised.float().sum((0, 1)))


def test_kl_against_itself_is_zero_with_zero_gradient() -> None:
    """The teacher of index k is the target's state at anchor + k - 1: a drafter with those states has nothing to learn."""
    batch = packed_batch([[20]], length=20, anchors=[[1, 8]], num_anchors=2, vocabulary=VOCABULARY)
    final_hidden = random_tensor(1, 20, HIDDEN)
    hidden = torch.zeros(1, 2, 4, HIDDEN)
    for slot, anchor in enumerate((1, 8)):
        for k in range(1, 4):
            hidden[0, slot, k] = final_hidden[0, anchor + k - 1]
    hidden = hidden.flatten(1, 2).requires_grad_()
    sums = draft_loss(hidden, make_ends(), batch, LossConfig(kind="kl"), 4, final_hidden)
    torch.testing.assert_close(sums.loss, torch.zeros(()), atol=1e-5, rtol=0)
    torch.testing.assert_close(gradient_of(sums.loss, hidden), torch.zeros_like(hidden), atol=1e-5, rtol=0)


def test_kl_without_final_hidden_states_is_refused() -> None:
    batch = packed_batch([[12]], length=12, anchors=[[2]], num_anchors=1)
    with pytest.raises(ConfigError, match="final hidden"):
        draft_loss(random_tensor(1, 4, HIDDEN), make_ends(), batch, LossConfig(kind="kl"), 4, None)


def test_bf16_states_and_head_stay_close_to_fp32_and_keep_their_dtype_also_under_autocast() -> None:
    batch = packed_batch([[30]], length=32, anchors=[[1, 5, 20]], num_anchors=4, vocabulary=VOCABULARY)
    hidden = random_tensor(1, 16, HIDDEN).requires_grad_()
    exact = draft_loss(hidden, make_ends(), batch, LossConfig(), 4)
    low = hidden.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = draft_loss(low, make_ends().bfloat16(), batch, LossConfig(), 4)
        again = draft_loss(hidden, make_ends(), batch, LossConfig(), 4)
    assert sums.loss.dtype == torch.float32
    assert sums.loss.item() == pytest.approx(exact.loss.item(), rel=0.02)
    assert torch.equal(again.loss, exact.loss)
    gradient, exact_gradient = gradient_of(sums.loss, low), gradient_of(exact.loss, hidden)
    assert torch.equal(gradient_of(again.loss, hidden), exact_gradient)
    assert gradient.dtype == torch.bfloat16
    assert (gradient.float() - exact_gradient).norm() < 0.02 * exact_gradient.norm()


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (6, 3.0)])
def test_default_decay_is_the_papers(block_size: int, gamma: float) -> None:
    assert default_gamma(block_size) == gamma


def test_position_weights_are_those_of_the_reference() -> None:
    expected = [1, 0.867, 0.751, 0.651, 0.565, 0.490, 0.424, 0.368, 0.319, 0.276, 0.240, 0.208, 0.180, 0.156, 0.135]
    torch.testing.assert_close(position_weights(16, 7.0), torch.tensor(expected), atol=6e-4, rtol=0)
    assert position_weights(8, 4.0).sum().item() == pytest.approx(3.74, abs=0.01)


def test_a_decay_that_dpace_would_not_look_at_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gamma is 4\.0, but dpace weighs positions itself"):
        LossConfig(kind="dpace", gamma=4.0)
