"""Laws of dflash.modeling that only a GPU can show. Not collected by name; run it with

python -m pytest tests/gpu_modeling.py --gpus 1

Compiled flex attention and its backward are compared with dense masks: wrong or NaN gradients of keys and values have
been reported for masks of this kind (pytorch issue 158212).
"""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import torch
from modeling_batches import lively_drafter, packed_batch, random_tensor, tiny_shape
from torch import Tensor

from dflash.batch import PackedBatch
from dflash.config import LossConfig, TargetConfig
from dflash.modeling.attention import build_mask
from dflash.modeling.drafter import block_inputs
from dflash.modeling.ends import FrozenEnds
from dflash.modeling.loss import draft_loss
from dflash.modeling.masks import BlockLayout, flex_mask
from dflash.modeling.target import TargetRunner, load_target

pytestmark = pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # exact fp32 is what is compared

CUDA = torch.device("cuda")
SHAPE = tiny_shape(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64, block_size=16
)
CASES = {
    "one document": packed_batch([[1000]], length=1024, anchors=[list(range(100, 980, 9))], num_anchors=100),
    "several documents, unused slots": packed_batch(
        [[301, 400, 200], [1000]],
        length=1001,
        anchors=[[0, 5, 300, 301, 302, 690, 701, 800], list(range(1, 999, 50))],
        num_anchors=37,
    ),
    "no anchor at all": packed_batch([[500]], length=512, anchors=[[]], num_anchors=9),
}


def step(batch: PackedBatch, backend: Any, *, compiled: bool, autocast: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states and gradients of a step whose loss is the states against a fixed direction."""
    batch = batch.to(CUDA)
    drafter = lively_drafter(SHAPE).to(CUDA)
    module: Any = torch.compile(drafter, fullgraph=True, dynamic=False) if compiled else drafter
    rows, slots = batch.anchors.shape
    features = random_tensor(rows, batch.input_ids.shape[1], 3 * 256).to(CUDA)
    embeds = random_tensor(rows, slots * 16, 256, seed=1).to(CUDA)
    mask = build_mask(BlockLayout.of(batch, 16), backend, CUDA)
    _, block_positions = block_inputs(batch, 511, 16)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        hidden = module(embeds, block_positions, features, batch.positions, mask)
    (hidden.float() * random_tensor(*hidden.shape, seed=2).to(CUDA)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in drafter.named_parameters() if parameter.grad is not None}
    return hidden.detach().float(), gradients


def deviation(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-12)).item()


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_compiled_flex_equals_dense_attention_forward_and_backward(case: str, autocast: bool) -> None:
    exact, exact_gradients = step(CASES[case], "sdpa", compiled=False, autocast=False)
    found, gradients = step(CASES[case], "flex", compiled=True, autocast=autocast)
    tolerance = 0.05 if autocast else 2e-3
    assert torch.isfinite(found).all()
    assert deviation(found, exact) < tolerance
    for name, expected in exact_gradients.items():
        assert torch.isfinite(gradients[name]).all(), name
        if expected.norm() > 1e-6:  # without any context the fusing weights have no gradient
            assert deviation(gradients[name], expected) < 3 * tolerance, name


@pytest.mark.parametrize("kind", ["ce", "dpace", "kl"])
def test_loss_in_bf16_stays_close_to_fp32(kind: Any) -> None:
    batch = CASES["several documents, unused slots"].to(CUDA)
    rows, slots = batch.anchors.shape
    embedding = torch.nn.Embedding(512, 256)
    ends = FrozenEnds(embedding, random_tensor(512, 256, seed=5) * 0.1, None).to(CUDA)
    hidden, final_hidden = random_tensor(rows, slots * 16, 256).to(CUDA), random_tensor(rows, 1001, 256, seed=3).to(CUDA)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        leaf = hidden.detach().clone().to(dtype).requires_grad_()
        sums = draft_loss(leaf, ends.to(dtype), batch, LossConfig(kind=kind, chunk_tokens=300), 16, final_hidden.to(dtype))
        sums.loss.backward()
        assert leaf.grad is not None
        results.append((sums.loss.detach(), leaf.grad))
    assert deviation(results[1][0], results[0][0]) < 0.02
    assert deviation(results[1][1], results[0][1]) < 0.05


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_moe", "gemma3"])
def test_packed_documents_equal_documents_run_alone_in_bf16(name: str) -> None:
    model, _ = load_target(TargetConfig(path=f"random:{name}"), device=CUDA)
    runner = TargetRunner(model, (1, 3, 5), keep_final_hidden=False)
    batch = packed_batch([[40, 56]], length=128, anchors=[[]], num_anchors=1).to(CUDA)
    packed, _ = runner.run(batch)
    alone = packed_batch([[56]], length=56, anchors=[[]], num_anchors=1).to(CUDA)
    alone.input_ids.copy_(batch.input_ids[:, 40:96])
    assert deviation(packed[:, 40:96], runner.run(alone)[0]) < 0.03


def test_the_mask_of_a_production_row_takes_no_memory_of_its_size() -> None:
    """4096 tokens, 512 anchors of 16: all pairs would be 100 million."""
    batch = packed_batch([[4000]], length=4096, anchors=[list(range(10, 3594, 7))], num_anchors=512)
    layout = BlockLayout.of(batch, 16).to(CUDA)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flex_mask(layout)
    assert torch.cuda.max_memory_allocated() - before < 64e6


def test_an_8b_target_is_built_on_the_gpu_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    started = time.perf_counter()
    model, _ = load_target(TargetConfig(path="random:qwen3-8b"), device=CUDA)
    ends = FrozenEnds.from_model(model, CUDA, torch.bfloat16)
    runner = TargetRunner(model, (1, 9, 17, 25, 33), keep_final_hidden=False)
    torch.cuda.synchronize()
    built_seconds = time.perf_counter() - started
    features, _ = runner.run(packed_batch([[2000, 2000]], length=4096, anchors=[[]], num_anchors=1).to(CUDA))
    assert features.shape == (1, 4096, 5 * 4096)
    assert torch.isfinite(features).all()
    assert ends.head_weight.shape == (151_936, 4096)
    with capsys.disabled():
        sys.stderr.write(
            f"\n8B target, ends and packing trial: {built_seconds:.1f} s, {torch.cuda.memory_allocated() / 1e9:.1f} GB held\n"
        )
