"""Laws of the drafter: its weights, positions and forward, against the reference's formula, decoding and transformers."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from modeling_batches import MASK, lively_drafter, packed_batch, random_tensor, tiny_shape
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from dflash.batch import PackedBatch
from dflash.modeling.attention import Mask, build_mask
from dflash.modeling.drafter import Drafter, DrafterShape, block_inputs
from dflash.modeling.masks import BlockLayout, dense_mask
from dflash.modeling.rope import RotaryEmbedding, rotate


def test_weight_names_and_shapes_are_z_labs() -> None:
    shape = tiny_shape()
    hidden, heads, groups = 32, 4 * 16, 2 * 16
    expected = {"fc.weight": (hidden, 3 * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(shape.num_layers):
        expected |= {
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
            f"layers.{i}.self_attn.q_proj.weight": (heads, hidden),
            f"layers.{i}.self_attn.k_proj.weight": (groups, hidden),
            f"layers.{i}.self_attn.v_proj.weight": (groups, hidden),
            f"layers.{i}.self_attn.o_proj.weight": (hidden, heads),
            f"layers.{i}.self_attn.q_norm.weight": (16,),
            f"layers.{i}.self_attn.k_norm.weight": (16,),
            f"layers.{i}.mlp.gate_proj.weight": (48, hidden),
            f"layers.{i}.mlp.up_proj.weight": (48, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, 48),
        }
    found = {name: tuple(weight.shape) for name, weight in Drafter(shape).state_dict().items()}
    assert found == expected
    assert len(found) == 3 + 11 * shape.num_layers


def test_weights_depend_on_the_generator_alone() -> None:
    torch.manual_seed(1)
    first = Drafter(tiny_shape(), generator=torch.Generator().manual_seed(5)).state_dict()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = Drafter(tiny_shape(), generator=torch.Generator().manual_seed(5)).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = Drafter(tiny_shape(), generator=torch.Generator().manual_seed(6)).state_dict()
    for name, weight in first.items():
        if weight.ndim == 1:
            assert (weight == 1).all()
        else:
            assert not torch.equal(weight, other[name])
            assert weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_rope_frequencies_stay_exact_under_every_cast_and_move() -> None:
    exact = torch.tensor([1e4 ** (-i / 16) for i in range(0, 16, 2)])
    drafter = Drafter(tiny_shape())
    with torch.device("meta"):
        empty = Drafter(tiny_shape()).to_empty(device="cpu")
    for module in (
        drafter,
        drafter.to(torch.bfloat16),
        copy.deepcopy(drafter).half(),
        empty,
        Drafter(tiny_shape()).double().float(),
    ):
        assert module.rotary.inv_freq.dtype == torch.float32
        torch.testing.assert_close(module.rotary.inv_freq, exact, rtol=1e-6, atol=0)
    assert not any("inv_freq" in name for name in drafter.state_dict())


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_rotation_is_that_of_transformers(rope: dict[str, Any]) -> None:
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=256, rope_parameters=dict(rope)
    )
    positions = torch.arange(0, 250, 7)[None]
    cos, sin = RotaryEmbedding(rope, 16, 256)(positions)
    expected_cos, expected_sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    torch.testing.assert_close(cos[:, 0], expected_cos)
    torch.testing.assert_close(sin[:, 0], expected_sin)


def test_without_context_the_layers_are_those_of_qwen3_that_see_both_ways() -> None:
    shape = tiny_shape()
    drafter = lively_drafter(shape)
    config = Qwen3Config(
        vocab_size=8, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, rms_norm_eps=1e-6, rope_parameters=dict(shape.rope_parameters), pad_token_id=0,
    )  # fmt: skip
    qwen3 = Qwen3Model(config).eval()
    weights = {name: weight for name, weight in drafter.state_dict().items() if name not in {"fc.weight", "hidden_norm.weight"}}
    missing, unexpected = qwen3.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["embed_tokens.weight"], [])
    embeds, positions = random_tensor(2, 7, 32), torch.arange(3, 10).expand(2, -1)
    everything = {"full_attention": torch.ones(2, 1, 7, 7, dtype=torch.bool)}
    nothing = drafter.project_context(torch.zeros(2, 0, 96), torch.zeros(2, 0, dtype=torch.int64))
    with torch.no_grad():
        expected = qwen3(
            inputs_embeds=embeds, position_ids=positions, attention_mask=everything, use_cache=False
        ).last_hidden_state
        found = drafter.block_forward(embeds, positions, nothing, None)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_forward_is_the_formula_of_the_reference() -> None:
    drafter, shape = lively_drafter(tiny_shape()), tiny_shape()
    embeds, features = random_tensor(1, 8, 32), random_tensor(1, 11, 96, seed=1)
    block_positions, positions = torch.arange(20, 28)[None], torch.arange(11)[None] + 2
    mask = random_tensor(1, 1, 8, 19, seed=2) > 0
    mask[..., 11] = True
    found = drafter(embeds, block_positions, features, positions, mask)
    expected = written_out(drafter, shape, embeds[0], block_positions[0], features[0], positions[0], mask[0, 0])
    torch.testing.assert_close(found[0], expected.float(), atol=2e-5, rtol=2e-5)


def written_out(
    drafter: Drafter,
    shape: DrafterShape,
    embeds: Tensor,
    block_positions: Tensor,
    features: Tensor,
    positions: Tensor,
    mask: Tensor,
) -> Tensor:
    """Reference 1.2 and 1.3 in fp64 with one loop a head and a query."""
    weights = {name: weight.double() for name, weight in drafter.state_dict().items()}
    size, group = shape.head_dim, shape.num_attention_heads // shape.num_key_value_heads

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + shape.rms_norm_eps).sqrt() * weights[f"{name}.weight"]

    def turn(x: Tensor, position: int) -> Tensor:
        out = torch.empty_like(x)
        for i in range(size // 2):
            angle = position * shape.rope_parameters["rope_theta"] ** (-2 * i / size)
            out[i] = x[i] * math.cos(angle) - x[i + size // 2] * math.sin(angle)
            out[i + size // 2] = x[i + size // 2] * math.cos(angle) + x[i] * math.sin(angle)
        return out

    context = norm(features.double() @ weights["fc.weight"].T, "hidden_norm")
    everywhere = torch.cat((positions, block_positions)).tolist()
    x = embeds.double()
    for i in range(shape.num_layers):
        attn = f"layers.{i}.self_attn"
        normed = norm(x, f"layers.{i}.input_layernorm")
        rows = torch.cat((context, normed))
        heads = []
        for h in range(shape.num_attention_heads):
            own, shared = slice(h * size, (h + 1) * size), slice(h // group * size, (h // group + 1) * size)
            q = norm(normed @ weights[f"{attn}.q_proj.weight"][own].T, f"{attn}.q_norm")
            k = norm(rows @ weights[f"{attn}.k_proj.weight"][shared].T, f"{attn}.k_norm")
            v = rows @ weights[f"{attn}.v_proj.weight"][shared].T
            keys = torch.stack([turn(key, position) for key, position in zip(k, everywhere, strict=True)])
            outputs = []
            for query, position, visible in zip(q, block_positions.tolist(), mask, strict=True):
                scores = keys @ turn(query, position) / math.sqrt(size)
                outputs.append(scores.masked_fill(~visible, -torch.inf).softmax(0) @ v)
            heads.append(torch.stack(outputs))
        x = x + torch.cat(heads, -1) @ weights[f"{attn}.o_proj.weight"].T
        normed = norm(x, f"layers.{i}.post_attention_layernorm")
        gate, up = (normed @ weights[f"layers.{i}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ weights[f"layers.{i}.mlp.down_proj.weight"].T
    return norm(x, "norm")


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 100))
@settings(max_examples=20, deadline=None)
def test_training_equals_decoding_with_the_context_appended_in_pieces(pieces: list[int], seed: int) -> None:
    drafter, shape = lively_drafter(tiny_shape()), tiny_shape()
    first = 7  # a document before ours in the row
    batch = packed_batch(
        [[first, 40]], length=50, anchors=[[3, first + sum(pieces), first + sum(pieces) + 1]], num_anchors=4, seed=seed
    )
    features, embeds = random_tensor(1, 50, 96, seed=seed), random_tensor(1, 16, 32, seed=seed + 1)
    trained = forward(drafter, shape, batch, features, embeds, dense_mask(BlockLayout.of(batch, 4)))[:, 4:8]
    context = drafter.project_context(features[:, :0], batch.positions[:, :0])
    start = first
    for piece in pieces:
        new = drafter.project_context(features[:, start : start + piece], batch.positions[:, start : start + piece])
        context = tuple(
            (torch.cat((k, new_k), 2), torch.cat((v, new_v), 2)) for (k, v), (new_k, new_v) in zip(context, new, strict=True)
        )
        start += piece
    decoded = drafter.block_forward(embeds[:, 4:8], sum(pieces) + torch.arange(4)[None], context, None)
    torch.testing.assert_close(trained, decoded, atol=1e-5, rtol=1e-5)


def test_blocks_are_the_anchor_and_masks_at_positions_of_the_document() -> None:
    batch = packed_batch([[5, 6], [10]], length=12, anchors=[[2, 7], [4]], num_anchors=3)
    ids, positions = block_inputs(batch, MASK, 3)
    tokens = batch.input_ids
    assert ids.tolist() == [
        [int(tokens[0, 2]), MASK, MASK, int(tokens[0, 7]), MASK, MASK, MASK, MASK, MASK],
        [int(tokens[1, 4]), MASK, MASK, MASK, MASK, MASK, MASK, MASK, MASK],
    ]
    assert positions[:, :6].tolist() == [[2, 3, 4, 2, 3, 4], [4, 5, 6, 0, 1, 2]]


def test_norms_and_rotation_of_bf16_compute_in_fp32_and_round_once() -> None:
    x = random_tensor(1, 2, 50, 16).bfloat16()
    norm = lively_drafter(tiny_shape()).layers[0].self_attn.q_norm
    assert torch.equal(norm(x), norm(x.float()).bfloat16())
    cos, sin = RotaryEmbedding({"rope_theta": 1e4}, 16, 4096)(torch.arange(4000, 4050)[None])
    assert torch.equal(rotate(x, cos, sin), rotate(x.float(), cos, sin).bfloat16())


def test_autocast_computes_in_bf16_and_leaves_fp32_gradients() -> None:
    drafter, shape = lively_drafter(tiny_shape()), tiny_shape()
    batch, features, embeds, mask = inputs(shape)
    exact = forward(drafter, shape, batch, features, embeds, mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = forward(drafter, shape, batch, features.bfloat16(), embeds.bfloat16(), mask)
    assert found.dtype == torch.bfloat16
    assert (found.float() - exact).abs().mean() < 0.05 * exact.abs().mean()
    found.float().square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in drafter.parameters())
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in drafter.parameters())


def test_a_bf16_drafter_stays_close_to_its_fp32_self() -> None:
    drafter, shape = lively_drafter(tiny_shape()), tiny_shape()
    batch, features, embeds, mask = inputs(shape)
    exact = forward(drafter, shape, batch, features, embeds, mask)
    found = forward(drafter.bfloat16(), shape, batch, features.bfloat16(), embeds.bfloat16(), mask)
    assert found.dtype == torch.bfloat16
    assert (found.float() - exact).abs().mean() < 0.05 * exact.abs().mean()


def test_compiled_as_one_graph_it_equals_eager_forward_and_backward() -> None:
    shape = tiny_shape(num_layers=1)
    batch, features, embeds, mask = inputs(shape)
    gradients = []
    outputs = []
    for compiled in (False, True):
        drafter = lively_drafter(shape)
        module: Any = torch.compile(drafter, fullgraph=True, dynamic=False, backend="aot_eager") if compiled else drafter
        outputs.append(forward(module, shape, batch, features, embeds, mask))
        outputs[-1].square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in drafter.named_parameters()})
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("backend", ["flex", "sdpa"])
def test_new_batches_of_one_shape_compile_once(backend: Any) -> None:
    shape, counter = tiny_shape(), CompileCounter()
    drafter = lively_drafter(shape)
    compiled: Any = torch.compile(drafter, fullgraph=True, dynamic=False, backend=counter)
    with torch.no_grad():
        for seed, anchors in enumerate(([[3, 20, 30], [5]], [[1, 2], [8, 9, 10, 11]], [[], []])):
            batch = packed_batch([[12, 20], [33]], length=40, anchors=anchors, num_anchors=5, seed=seed)
            features, embeds = random_tensor(2, 40, 96, seed=seed), random_tensor(2, 20, 32, seed=seed)
            mask = build_mask(BlockLayout.of(batch, 4), backend, "cpu")
            found = forward(compiled, shape, batch, features, embeds, mask)
            expected = forward(drafter, shape, batch, features, embeds, dense_mask(BlockLayout.of(batch, 4)))
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    assert counter.frame_count == 1


def inputs(shape: DrafterShape) -> tuple[PackedBatch, Tensor, Tensor, Tensor]:
    batch = packed_batch([[12, 20], [33]], length=40, anchors=[[3, 20, 30], [5]], num_anchors=5)
    features = random_tensor(2, 40, shape.num_features * shape.hidden_size)
    embeds = random_tensor(2, 5 * shape.block_size, shape.hidden_size, seed=1)
    return batch, features, embeds, dense_mask(BlockLayout.of(batch, shape.block_size))


def forward(drafter: Any, shape: DrafterShape, batch: PackedBatch, features: Tensor, embeds: Tensor, mask: Mask) -> Tensor:
    _, block_positions = block_inputs(batch, shape.mask_token_id, shape.block_size)
    hidden: Tensor = drafter(embeds, block_positions, features, batch.positions, mask)
    return hidden
