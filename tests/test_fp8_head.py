from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from modeling_batches import packed_batch, random_tensor
from torch import Tensor, nn

from dflash.config import ConfigError, LossConfig
from dflash.modeling.ends import FrozenEnds
from dflash.modeling.fp8_head import FP8, Fp8Head, check_device
from dflash.modeling.head_scores import score, score_for_fp8
from dflash.modeling.loss import draft_loss

HIDDEN, VOCABULARY, BLOCK = 64, 320, 4
BATCH = packed_batch([[20], [13]], length=20, anchors=[[0, 3, 9], [2]], num_anchors=3, vocabulary=VOCABULARY)


def deviation(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def drawn(seed: int, *, peaked: bool) -> tuple[Tensor, Tensor]:
    logits = (8 if peaked else 1) * random_tensor(12, VOCABULARY, seed=seed)
    labels = torch.randint(0, VOCABULARY, (12, 1), generator=torch.Generator().manual_seed(seed))
    labels[:6] = logits[:6].argmax(-1, keepdim=True)
    return logits.bfloat16(), labels


@pytest.mark.parametrize("softcap", [None, 6.0])
@pytest.mark.parametrize("peaked", [False, True])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_scores_are_exact_and_the_gradient_but_for_its_rounding(backend: str | None, peaked: bool, softcap: float | None) -> None:
    torch._dynamo.reset()
    scoring: Any = torch.compile(score_for_fp8, fullgraph=True, backend=backend) if backend else score_for_fp8
    for seed in range(3):
        logits, labels = drawn(seed, peaked=peaked)
        exact, found = score(logits.float(), labels, None, softcap, True), scoring(logits, labels, None, softcap, True)
        for name in ("loss", "log_likelihood", "correct", "by_label"):
            torch.testing.assert_close(getattr(found, name), getattr(exact, name))
        assert found.by_logits.dtype == FP8
        assert not found.by_logits.float().gather(1, labels).any()  # what cancels is kept apart
        assert found.by_logits.float().max() <= 448
        others = exact.by_logits.scatter(1, labels, 0.0)
        assert deviation(found.by_logits.float() * found.row_scale, others) < 0.04
        assert scoring(logits, labels, None, softcap, False).by_logits is None


def test_both_products_deviate_by_the_rounding_of_their_factors() -> None:
    weight, hidden = random_tensor(VOCABULARY, HIDDEN, seed=1).bfloat16(), 30 * random_tensor(10, HIDDEN, seed=2)
    head = Fp8Head(weight)
    assert 0.005 < deviation(head.logits(hidden), hidden.double() @ weight.double().t()) < 0.05
    by_logits, row_scale = random_tensor(10, VOCABULARY, seed=3).to(FP8), torch.linspace(0.1, 2, 10)[:, None]
    expected = (by_logits.double() * row_scale.double()) @ weight.double()
    assert deviation(head.by_hidden(by_logits, row_scale), expected) < 0.04


def test_a_hidden_state_has_the_logits_that_it_has_alone_whatever_stands_beside_it() -> None:
    head, hidden = Fp8Head(random_tensor(VOCABULARY, HIDDEN, seed=1).bfloat16()), random_tensor(4, HIDDEN, seed=2)
    alone = head.logits(hidden[:1])
    hidden[1:] *= torch.tensor([1e4, 1e-4, torch.nan])[:, None]
    together = head.logits(hidden)
    assert torch.equal(together[:1], alone)
    assert together[:3].isfinite().all()
    assert together[3].isnan().all()


@pytest.mark.parametrize("kind", ["ce", "dpace"])
def test_training_through_the_head_in_fp8_gives_nearly_the_same_gradients(kind: Any) -> None:
    ends = FrozenEnds(nn.Embedding(VOCABULARY, HIDDEN), random_tensor(VOCABULARY, HIDDEN, seed=3).bfloat16(), None)
    hidden = random_tensor(2, 3 * BLOCK, HIDDEN, seed=4) / 4
    gradients, losses = [], []
    for options in ({}, {"score": score_for_fp8, "fp8_head": Fp8Head(ends.head_weight)}):
        leaf = hidden.clone().requires_grad_()
        sums = draft_loss(leaf, ends, BATCH, LossConfig(kind=kind, chunk_tokens=7), BLOCK, **options)  # type: ignore[arg-type]
        gradients += torch.autograd.grad(sums.loss, leaf)
        losses.append(float(sums.loss.detach()))
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[1] != losses[0]
    assert deviation(gradients[1], gradients[0]) < 0.1


def test_what_is_only_looked_at_goes_through_the_exact_head() -> None:
    ends = FrozenEnds(nn.Embedding(VOCABULARY, HIDDEN), random_tensor(VOCABULARY, HIDDEN, seed=3).bfloat16(), None)
    hidden = random_tensor(2, 3 * BLOCK, HIDDEN, seed=4)
    with torch.no_grad():
        plain, found = (
            draft_loss(hidden, ends, BATCH, LossConfig(), BLOCK, score=scoring, fp8_head=head)
            for scoring, head in ((score, None), (score_for_fp8, Fp8Head(ends.head_weight)))
        )
    assert found.loss == plain.loss


def test_what_cannot_be_done_in_fp8_is_refused() -> None:
    with pytest.raises(ConfigError, match="320 x 60"):
        Fp8Head(torch.zeros(320, 60))
    with pytest.raises(ConfigError, match="not with kl"):
        LossConfig(kind="kl", fp8_head=True)
    with pytest.raises(ConfigError, match="for GPUs"):
        check_device(torch.device("cpu"))
