from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import config as dynamo

from dflash.modeling.head_scores import score
from dflash.modeling.loss import chunks

ROWS, VOCABULARY = 6, 300


def draw(seed: int, dtype: torch.dtype, teacher: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    logits, other = (3 * torch.randn(ROWS, VOCABULARY, generator=generator) for _ in range(2))
    labels = torch.randint(0, VOCABULARY, (ROWS, 1), generator=generator)
    labels[0] = logits[0].argmax()  # one that is correct
    return logits.to(dtype), labels, other.to(dtype) if teacher else None


def exact(logits: Tensor, labels: Tensor, teacher: Tensor | None, softcap: float | None) -> dict[str, Tensor]:
    """Plain autograd in float64."""
    leaf = logits.double().requires_grad_()
    log_q, log_p = (
        None if x is None else (x if softcap is None else softcap * torch.tanh(x / softcap)).log_softmax(-1)
        for x in (leaf, None if teacher is None else teacher.double())
    )
    assert log_q is not None
    likelihood = log_q.gather(1, labels).squeeze(-1)
    loss = -likelihood if log_p is None else (log_p.exp() * (log_p - log_q)).sum(-1)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return {"loss": loss.detach(), "likelihood": likelihood.detach(), "gradient": gradient}


@pytest.fixture(scope="module")
def compiled() -> Iterator[Any]:
    with dynamo.patch(recompile_limit=64):  # one a case, and those of other tests in this process
        yield torch.compile(score, fullgraph=True, dynamic=False, backend="aot_eager")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("teacher", [False, True], ids=["ce", "kl"])
@pytest.mark.parametrize("is_compiled", [False, True], ids=["plain", "compiled"])
def test_scores_and_gradient_equal_autograd_in_fp64(
    compiled: Any, is_compiled: bool, teacher: bool, softcap: float | None, dtype: torch.dtype
) -> None:
    for seed in range(3):
        logits, labels, target = draw(seed, dtype, teacher)
        expected = exact(logits, labels, target, softcap)
        right = logits.float().argmax(-1, keepdim=True).eq(labels).squeeze(-1)
        found = (compiled if is_compiled else score)(logits.clone(), labels, target, softcap, True)
        assert found.by_logits.dtype == dtype
        gradient = found.by_logits
        if target is None:
            gradient = gradient.scatter(1, labels, found.by_label.to(dtype))
        torch.testing.assert_close(found.loss.double(), expected["loss"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.log_likelihood.double(), expected["likelihood"], rtol=1e-5, atol=1e-5)
        assert torch.equal(found.correct, right)
        assert right[0]
        error = (gradient.double() - expected["gradient"]).norm() / expected["gradient"].norm()
        assert error < (4e-3 if dtype == torch.bfloat16 else 1e-5)  # the rounding of the result, no more
        assert score(logits.clone(), labels, target, softcap, False).by_logits is None


@pytest.mark.parametrize(("rows", "most"), [(24, 5), (24, 24), (24, 100), (7680, 2048), (1, 1), (7, 2)])
def test_chunks_are_equally_long_and_cover_all_rows_in_order(rows: int, most: int) -> None:
    found = chunks(rows, most)
    assert len({part.stop - part.start for part in found}) == 1
    assert found[0].stop - found[0].start <= most
    assert {row for part in found for row in range(part.start, part.stop)} == set(range(rows))
    assert all(one.start < two.start <= one.stop for one, two in itertools.pairwise(found))
    assert sum(part.stop - part.start for part in found) < rows + len(found)
