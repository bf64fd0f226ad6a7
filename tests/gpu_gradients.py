"""Gradients of the two compiled kernels that training leans on, at sizes where many tiles are partial. Not collected by name; run

python -m pytest tests/gpu_gradients.py --gpus 1

Wrong gradients of keys and values have been reported for compiled flex attention under masks of several parts, as ours are
(pytorch issue 158212): they are compared with dense attention in fp32, for fresh random inputs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from modeling_batches import packed_batch
from torch import Tensor

from dflash.batch import PackedBatch
from dflash.modeling.attention import attend, build_mask
from dflash.modeling.fp8_head import Fp8Head
from dflash.modeling.head_scores import score, score_for_fp8
from dflash.modeling.masks import BlockLayout

pytestmark = [
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),  # exact fp32 is what is compared
    pytest.mark.filterwarnings("ignore:(?s).*Online softmax is disabled:UserWarning"),  # few rows: their reduction is split
]

CUDA = torch.device("cuda")
HEADS, GROUPS, SIZE, BLOCK = 8, 2, 128, 16
CASES = {
    "one document": packed_batch([[2048]], length=2048, anchors=[list(range(3, 2035, 8))], num_anchors=256),
    "documents that end inside tiles": packed_batch(
        [[301, 700, 45, 500]], length=2000, anchors=[sorted({*range(0, 1546, 13), 299, 300, 301, 1001})], num_anchors=130
    ),
    "two rows, one almost empty": packed_batch(
        [[1500], [20]], length=1536, anchors=[list(range(0, 1400, 11)), [5]], num_anchors=140
    ),
}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    """All cases compile one function; Dynamo keeps only a few versions of it."""
    torch._dynamo.reset()


def gradients(batch: PackedBatch, inputs: list[Tensor], backend: Any, function: Any) -> list[Tensor]:
    """Output of attention and the gradients of queries, keys and values, for a fixed direction of the output."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
    mask = build_mask(BlockLayout.of(batch, BLOCK), backend, inputs[0].device)
    output = function(*leaves, mask)
    (output.float() * inputs[3]).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def random_inputs(batch: PackedBatch, seed: int, device: torch.device) -> list[Tensor]:
    rows, queries = batch.anchors.shape[0], batch.anchors.shape[1] * BLOCK
    keys = batch.input_ids.shape[1] + queries
    generator = torch.Generator(device).manual_seed(seed)
    shapes = [(HEADS, queries), (GROUPS, keys), (GROUPS, keys), (HEADS, queries)]
    return [torch.randn(rows, heads, tokens, SIZE, device=device, generator=generator) for heads, tokens in shapes]


def deviation(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_compiled_flex_gives_the_gradients_of_dense_attention_also_for_keys_and_values(case: str, dtype: torch.dtype) -> None:
    batch = CASES[case].to(CUDA)
    compiled = torch.compile(attend, fullgraph=True, dynamic=False)
    for seed in range(3):
        inputs = random_inputs(batch, seed, CUDA)
        rounded = [x.to(dtype) for x in inputs[:3]]
        expected = gradients(batch, [*(x.float() for x in rounded), inputs[3]], "sdpa", attend)
        found = gradients(batch, [*rounded, inputs[3]], "flex", compiled)
        for name, one, other in zip(("output", "queries", "keys", "values"), found, expected, strict=True):
            assert torch.isfinite(one).all(), name
            assert deviation(one, other) < (1e-2 if dtype == torch.bfloat16 else 2e-3), name


@pytest.mark.parametrize("teacher", [False, True], ids=["ce", "kl"])
def test_compiled_scores_of_a_real_vocabulary_equal_fp64(teacher: bool) -> None:
    compiled = torch.compile(score, fullgraph=True, dynamic=False)
    for seed in range(3):
        generator = torch.Generator(CUDA).manual_seed(seed)
        logits, other = (2 * torch.randn(96, 151_936, device=CUDA, generator=generator).bfloat16() for _ in range(2))
        labels = torch.randint(0, 151_936, (96, 1), device=CUDA, generator=generator)
        labels[0] = logits[0].float().argmax()
        leaf = logits.double().requires_grad_()
        log_q, log_p = leaf.log_softmax(-1), other.double().log_softmax(-1)
        expected = (log_p.exp() * (log_p - log_q)).sum(-1) if teacher else -log_q.gather(1, labels).squeeze(-1)
        (by_logits,) = torch.autograd.grad(expected.sum(), leaf)
        found = compiled(logits, labels, other if teacher else None, None, True)
        gradient = found.by_logits if teacher else found.by_logits.scatter(1, labels, found.by_label.bfloat16())
        torch.testing.assert_close(found.loss.double(), expected.detach(), rtol=1e-5, atol=1e-4)
        assert found.correct[0]
        assert deviation(gradient, by_logits) < 4e-3


def test_the_head_in_fp8_deviates_by_rounding_only_at_a_real_size() -> None:
    """4 % of what logits spread over; the gradient by its own rounding and that of the head, however flat or peaked a row is."""
    compiled = torch.compile(score_for_fp8, fullgraph=True, dynamic=False)
    generator = torch.Generator(CUDA).manual_seed(0)
    weight = (0.02 * torch.randn(151_936, 4096, device=CUDA, generator=generator)).bfloat16()
    hidden = torch.randn(256, 4096, device=CUDA, generator=generator).bfloat16()
    labels = torch.randint(0, 151_936, (256, 1), device=CUDA, generator=generator)
    head, exact = Fp8Head(weight), hidden.double() @ weight.double().t()
    assert deviation(head.logits(hidden), exact) < 0.05
    for sharpness in (0.1, 1.0, 10.0):
        logits = (sharpness * exact).bfloat16()
        found = compiled(logits, labels, None, None, True)
        by_logits = logits.double().softmax(-1).scatter(1, labels, 0.0)
        gradient = head.by_hidden(found.by_logits, found.row_scale)
        assert deviation(gradient, by_logits @ weight.double()) < 0.06, sharpness
