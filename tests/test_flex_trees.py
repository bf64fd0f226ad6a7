"""Laws of the trees' mask for flex_attention: the same rule as for SDPA, in few graphs, and refused where it cannot work.

On CPUs flex_attention runs uncompiled, or compiled by a backend that only counts; compiled by Inductor it runs in gpu_trees.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_decoding import drafter_for, knowing, prompt_of, random_rule, target
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import BlockMask

from dflash.command_config import EvaluateConfig
from dflash.config import ConfigError
from dflash.decoding import flex_trees
from dflash.decoding.chain import plain
from dflash.decoding.flex_trees import attend_compiled, attending, block_mask, check_flex
from dflash.decoding.rounds import Drafting, Wanted, decode
from dflash.decoding.visibility import visible
from dflash.modeling.tiles import TILE

unfused = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
sizes = {
    "requests": st.integers(1, 3),
    "columns": st.integers(1, 600),
    "nodes": st.integers(2, 150),
    "window": st.none() | st.integers(1, 300),
    "seed": st.integers(0, 10**6),
}


def pairs_of(mask: BlockMask) -> Tensor:
    """The mask_mod asked about every pair, [N, Q, T]."""
    axes = (torch.arange(size) for size in (mask.kv_num_blocks.shape[0], *mask.seq_lengths))
    row, query, key = torch.meshgrid(*axes, indexing="ij")
    return mask.mask_mod(row, torch.zeros_like(row), query, key)


def tiles_of(counts: Tensor | None, indices: Tensor | None, tiles: int) -> Tensor:
    """Lists of tiles as a table [N, lines, tiles] bool."""
    assert counts is not None
    assert indices is not None
    table = torch.zeros(*indices.shape[:3], tiles, dtype=torch.bool)
    for place in torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist():
        table[tuple(place)][indices[tuple(place)][: int(counts[tuple(place)])].long()] = True
    return table[:, 0]


@settings(max_examples=25, deadline=None)
@given(**sizes)
def test_the_rule_is_that_of_sdpa_for_every_pair(requests: int, columns: int, nodes: int, window: int | None, seed: int) -> None:
    rule = random_rule(requests, columns, nodes, seed)
    assert torch.equal(pairs_of(block_mask(*rule, window)), visible(*rule, window))


@settings(max_examples=25, deadline=None)
@given(**sizes)
def test_whole_tiles_are_seen_by_all_and_unlisted_ones_by_nobody(
    requests: int, columns: int, nodes: int, window: int | None, seed: int
) -> None:
    rule = random_rule(requests, columns, nodes, seed)
    mask, seen = block_mask(*rule, window), visible(*rule, window)
    tiles = -(-seen.shape[2] // TILE)
    part, whole = (
        tiles_of(mask.kv_num_blocks, mask.kv_indices, tiles),
        tiles_of(mask.full_kv_num_blocks, mask.full_kv_indices, tiles),
    )
    assert not (part & whole).any()
    for line in range(-(-nodes // TILE)):
        for tile in range(tiles):
            pairs = seen[:, line * TILE : (line + 1) * TILE, tile * TILE : (tile + 1) * TILE].flatten(1)
            assert pairs[whole[:, line, tile]].all()
            assert not pairs[~(part | whole)[:, line, tile]].any()


def test_tiles_of_a_long_context_are_whole_and_those_behind_a_window_or_of_longer_requests_are_left_out() -> None:
    """The gain of flex: of 10 tiles, the rule is asked in those with the end of the context and in those of the nodes."""
    positions = torch.tensor([[1200] * 20, [300] * 20])
    rule = (torch.tensor([1200, 300]), 1200, positions, torch.eye(20, dtype=torch.bool).expand(2, -1, -1))
    mask, windowed = block_mask(*rule, None), block_mask(*rule, 200)
    found = [
        (one.kv_num_blocks[:, 0, 0].tolist(), one.full_kv_num_blocks[:, 0, 0].tolist())  # type: ignore[union-attr]
        for one in (mask, windowed)
    ]
    assert found == [([1, 2], [9, 2]), ([2, 3], [1, 1])]


@unfused
@pytest.mark.parametrize("scaling", [None, 0.1])
def test_the_targets_attention_by_flex_is_that_by_sdpa(scaling: float | None) -> None:
    rule = random_rule(2, 150, 9, 0)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 16, generator=generator) for heads, length in ((4, 9), (2, 159), (2, 159)))
    found, _ = flex_trees._attention(None, q, k, v, block_mask(*rule, 30), scaling)
    expected = F.scaled_dot_product_attention(q, k, v, visible(*rule, 30)[:, None], scale=scaling, enable_gqa=True)
    torch.testing.assert_close(found.transpose(1, 2), expected, atol=1e-5, rtol=1e-5)


@unfused
def test_trees_by_flex_decode_to_the_tokens_of_plain_decoding_and_accept_what_sdpa_accepts() -> None:
    """gemma3 has layers with a window of 8 tokens."""
    model, ends = target("gemma3")
    before = model.config._attn_implementation
    prompts = [prompt_of(length, length) for length in (4, 125)]
    free = [plain(model, prompt, max_new_tokens=16).tokens for prompt in prompts]
    accepted, masks = {}, []
    real = flex_trees._attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            flex_trees.AttentionInterface._global_mapping,
            flex_trees.NAME,
            lambda *a, **k: masks.append(a[4]) or real(*a, **k),  # type: ignore[func-returns-value]
        )
        for attention in ("sdpa", "flex"):
            drafting = Drafting(drafter=drafter_for("gemma3", 5), ends=ends, budget=20, tree_attention=attention)  # type: ignore[arg-type]
            with knowing(prompts, free, errors=0.5, seed=2):
                got = decode(model, prompts, Wanted(max_new_tokens=10), drafting=drafting)
            assert [g.tokens for g in got] == [tokens[:10] for tokens in free]
            accepted[attention] = [[r.accepted for r in g.rounds] for g in got]
            assert bool(masks) == (attention == "flex")
    assert accepted["flex"] == accepted["sdpa"]
    assert max(map(max, accepted["flex"])) > 1
    assert all(isinstance(mask, BlockMask) for mask in masks)
    assert model.config._attn_implementation == before


def test_two_graphs_serve_all_lengths_windows_tree_sizes_and_numbers_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that equal other sizes by chance (heads, tiles, each other) make no graph of their own either."""
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(flex_trees, "BACKEND", counter)
    flex_trees._compiled.cache_clear()
    try:
        for requests, columns, nodes, window in [
            (2, 5, 16, None),
            (3, 112, 17, None),
            (3, 130, 130, 8),
            (2, 700, 300, None),
            (1, 16, 17, None),
            (1, 600, 257, 40),
        ]:
            rule = random_rule(requests, columns, nodes, 0)
            q, k, v = (torch.randn(requests, h, s, 16) for h, s in ((4, nodes), (2, columns + nodes), (2, columns + nodes)))
            with torch.inference_mode():
                found = attend_compiled(q, k, v, block_mask(*rule, window))
                expected = F.scaled_dot_product_attention(q, k, v, visible(*rule, window)[:, None], enable_gqa=True)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    finally:
        flex_trees._compiled.cache_clear()
    assert counter.frame_count == 2


# Refusals


def test_the_targets_own_attention_comes_back_after_an_error() -> None:
    model, _ = target("qwen3")
    before = model.config._attn_implementation
    seen = []
    with pytest.raises(ZeroDivisionError), attending(model):
        seen.append(model.config._attn_implementation) or 1 / 0
    assert seen == [flex_trees.NAME]
    assert model.config._attn_implementation == before


def test_an_attention_with_a_soft_cap_is_refused() -> None:
    q = torch.zeros(1, 1, 1, 16)
    with pytest.raises(ConfigError, match="the target's attention has softcap, which is not in the flex kernel"):
        flex_trees._attention(None, q, q, q, None, softcap=30.0)


@pytest.mark.parametrize(
    ("supports", "head_dim", "message"),
    [
        (False, 64, "does not support flex_attention .*verify trees with tree-attention sdpa"),
        (True, 8, "heads have 8 dimensions, flex_attention needs at least 16"),
    ],
)
def test_a_target_that_cannot_attend_by_flex_is_refused_before_it_runs(supports: bool, head_dim: int, message: str) -> None:
    text = SimpleNamespace(head_dim=head_dim)
    config = SimpleNamespace(get_text_config=lambda **_arguments: text)
    with pytest.raises(ConfigError, match=message):
        check_flex(SimpleNamespace(config=config, _supports_flex_attn=supports))
    assert check_flex(target("llama")[0]) is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"budgets": (16,)}, "compiled for GPUs only, and device is cpu: use --tree-attention sdpa or --device cuda"),
        ({"device": "cuda"}, "no tree is decoded: name --budgets"),
    ],
)
def test_evaluate_refuses_flex_without_a_gpu_and_without_trees(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EvaluateConfig(run=Path("run"), tree_attention="flex", **fields)
    EvaluateConfig(run=Path("run"), tree_attention="flex", budgets=(16,), device="cuda:0")
