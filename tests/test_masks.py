from __future__ import annotations

import dataclasses
import warnings
from typing import cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from modeling_batches import packed_batch, random_tensor
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from dflash.batch import PackedBatch
from dflash.compile_policy import CompilePolicy
from dflash.config import CompileConfig, ConfigError
from dflash.data.packing import PackedStream
from dflash.modeling import tiles
from dflash.modeling.attention import attend, build_mask
from dflash.modeling.masks import BlockLayout, dense_mask, flex_mask, predicate
from dflash.modeling.target import TargetRunner
from dflash.modeling.tiles import TILE, tile_lists
from dflash.worker import TargetModelWorker


def visible(layout: BlockLayout, row: int, query: int, key: int) -> bool:
    """The rule of the reference (2.4) in plain Python."""
    block_size, num_context = layout.block_size, layout.document_ids.shape[1]
    num_slots = layout.anchors.shape[1]
    slot = query // block_size
    if slot >= num_slots:
        return False
    if key >= num_context:
        return (key - num_context) // block_size == slot
    anchor = int(layout.anchors[row, slot])
    document = int(layout.document_ids[row, anchor])
    same_document = int(layout.document_ids[row, key]) == document and document != -1
    return bool(layout.anchor_valid[row, slot]) and key < anchor and same_document


def brute_force(layout: BlockLayout, queries: int, keys: int) -> Tensor:
    rows = layout.document_ids.shape[0]
    table = [[[visible(layout, r, q, t) for t in range(keys)] for q in range(queries)] for r in range(rows)]
    return torch.tensor(table).view(rows, 1, queries, keys)


@st.composite
def layouts(draw: st.DrawFn, *, max_context: int = 40, max_slots: int = 6, max_block: int = 9) -> BlockLayout:
    rows = draw(st.integers(1, 2))
    length = draw(st.integers(2, max_context))
    slots = draw(st.integers(1, max_slots))
    document_ids = torch.full((rows, length), -1)
    for row in range(rows):
        tokens = draw(st.integers(1, length))
        document_ids[row, :tokens] = torch.tensor(sorted(draw(st.lists(st.integers(0, 3), min_size=tokens, max_size=tokens))))
    anchors = torch.tensor(
        [sorted(draw(st.lists(st.integers(0, length - 1), min_size=slots, max_size=slots))) for _ in range(rows)]
    )
    valid = torch.tensor([draw(st.lists(st.booleans(), min_size=slots, max_size=slots)) for _ in range(rows)])
    return BlockLayout(anchors, valid, document_ids, draw(st.integers(2, max_block)))


@st.composite
def large_layouts(draw: st.DrawFn) -> BlockLayout:
    """Several tiles of queries and keys, with long runs of one document, so that full, partial and empty tiles occur."""
    length = draw(st.integers(1, 500))
    slots = draw(st.integers(1, 40))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.rand(draw(st.integers(0, 3)), generator=generator).mul(length).long()
    document_ids = (torch.arange(length)[None] >= cuts[:, None]).sum(0)
    document_ids[length - draw(st.integers(0, length // 2)) :] = -1
    anchors = torch.randint(0, length, (2, slots), generator=generator).sort(-1).values
    valid = torch.rand(2, slots, generator=generator) < draw(st.sampled_from([0.5, 1.0]))
    return BlockLayout(anchors, valid, document_ids.expand(2, -1), draw(st.sampled_from([2, 7, 16, 40])))


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_dense_mask_is_the_rule_of_the_reference(layout: BlockLayout) -> None:
    mask = dense_mask(layout)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, brute_force(layout, layout.num_queries, layout.num_keys))


@given(layouts(max_context=20, max_slots=4, max_block=5))
@settings(max_examples=15, deadline=None)
def test_predicate_is_the_rule_of_the_reference_up_to_whole_tiles(layout: BlockLayout) -> None:
    queries, keys = (-(-n // TILE) * TILE for n in (layout.num_queries, layout.num_keys))
    row, query, key = torch.meshgrid(torch.arange(len(layout.anchors)), torch.arange(queries), torch.arange(keys), indexing="ij")
    answer = flex_mask(layout).mask_mod(row, torch.zeros_like(row), query, key).unsqueeze(1)
    expected = torch.zeros_like(answer)
    expected[:, :, : layout.num_queries, : layout.num_keys] = brute_force(layout, layout.num_queries, layout.num_keys)
    assert torch.equal(answer, expected)


@given(large_layouts())
@settings(max_examples=20, deadline=None)
def test_flex_mask_has_the_tiles_that_torch_finds_by_evaluating_every_pair(layout: BlockLayout) -> None:
    ours = flex_mask(layout)
    theirs = create_block_mask(predicate(layout), 2, None, layout.num_queries, layout.num_keys, device="cpu", BLOCK_SIZE=TILE)
    assert ours.seq_lengths == theirs.seq_lengths
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for count, index in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices"),
                         ("q_num_blocks", "q_indices"), ("full_q_num_blocks", "full_q_indices")):  # fmt: skip
        assert torch.equal(getattr(ours, count), getattr(theirs, count)), count
        assert getattr(ours, index).dtype == getattr(theirs, index).dtype
        chosen = torch.arange(getattr(ours, index).shape[-1]) < getattr(ours, count).unsqueeze(-1)
        assert torch.equal(getattr(ours, index)[chosen], getattr(theirs, index)[chosen]), index


@given(large_layouts())
@settings(max_examples=20, deadline=None)
def test_the_visible_pairs_of_every_tile_are_counted_exactly(layout: BlockLayout) -> None:
    seen = dense_mask(layout)[:, 0].double()
    seen = F.pad(seen, (0, -seen.shape[2] % TILE, 0, -seen.shape[1] % TILE))
    expected = seen.unflatten(2, (-1, TILE)).unflatten(1, (-1, TILE)).sum((2, 4))
    rows = zip(layout.anchors.numpy(), layout.anchor_valid.numpy(), layout.document_ids.numpy(), strict=True)
    found = [tiles._visible_pairs(*row, layout.block_size) for row in rows]
    assert np.array_equal(found, expected.numpy())


def test_a_mask_takes_the_tiles_that_its_batch_brings() -> None:
    batch = packed_batch([[90, 200], [128]], length=300, anchors=[[3, 89, 90, 250], [127]], num_anchors=4)
    lists = tile_lists(batch, 16)
    made = flex_mask(BlockLayout.of(batch, 16))
    carried = flex_mask(BlockLayout.of(dataclasses.replace(batch, tiles=lists), 16).to("cpu"))
    for name, tensor in vars(lists).items():
        assert torch.equal(getattr(made, name), tensor), name
        assert getattr(carried, name) is tensor, name


class NoTarget:
    """Stands in for a target's runner."""

    def run(self, batch: PackedBatch) -> tuple[Tensor, None]:
        return torch.zeros(*batch.input_ids.shape, 2), None


@pytest.mark.parametrize("tiles_of", [None, 16])
def test_a_target_makes_the_tiles_of_its_drafters_masks(tiles_of: int | None) -> None:
    batch = packed_batch([[90, 200]], length=300, anchors=[[3, 89]], num_anchors=4)
    policy = CompilePolicy(CompileConfig(policy="none"), num_drafters=1)
    runner, stream = cast("TargetRunner", NoTarget()), cast("PackedStream", None)
    worker = TargetModelWorker("target-0", runner, stream, torch.device("cpu"), policy, tiles_of=tiles_of)
    found = worker.run(batch).batch.tiles
    assert (found is None) == (tiles_of is None)
    if found is not None:
        expected = vars(tile_lists(batch, 16))
        assert all(torch.equal(tensor, expected[name]) for name, tensor in vars(found).items())


def test_flex_mask_of_a_long_document_has_full_partial_and_empty_tiles() -> None:
    layout = BlockLayout(
        torch.arange(300, 316)[None], torch.ones(1, 16, dtype=torch.bool), torch.zeros(1, 512, dtype=torch.int64), 16
    )
    mask = flex_mask(layout)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks.tolist() == [[[2, 2]]]  # keys 0-255
    assert mask.kv_num_blocks.tolist() == [[[2, 2]]]  # keys 256-383, and the tile of the blocks themselves


def test_context_is_strictly_before_the_anchor() -> None:
    layout = BlockLayout(torch.tensor([[5]]), torch.tensor([[True]]), torch.zeros(1, 12, dtype=torch.int64), 2)
    assert dense_mask(layout)[0, 0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 12, 13]


def test_every_query_sees_something_also_in_unused_slots() -> None:
    layout = BlockLayout(torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.bool), torch.full((1, 8), -1), 4)
    assert dense_mask(layout).any(-1).all()


LAYOUT = BlockLayout(
    torch.tensor([[9, 60, 71, 120, 0], [0, 0, 150, 155, 159]]),
    torch.tensor([[True, True, True, True, False], [True, True, True, True, True]]),
    torch.tensor([[0] * 70 + [1] * 80 + [-1] * 10, [0] * 160]),
    7,
)


def test_flex_and_sdpa_attention_agree() -> None:
    q, k, v = attention_inputs(LAYOUT, 0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        flex = attend(q, k, v, build_mask(LAYOUT, "flex", "cpu"))
    torch.testing.assert_close(flex, attend(q, k, v, build_mask(LAYOUT, "sdpa", "cpu")), atol=1e-5, rtol=1e-5)


def test_flex_attention_compiles_as_one_graph_and_agrees() -> None:
    """Inductor's own CPU kernel agrees too, but compiles for more than 20 seconds on one core."""
    q, k, v = attention_inputs(LAYOUT, 1)
    compiled = torch.compile(attend, fullgraph=True, dynamic=False, backend="aot_eager")
    with torch.no_grad():
        flex = compiled(q, k, v, build_mask(LAYOUT, "flex", "cpu"))
    torch.testing.assert_close(flex, attend(q, k, v, build_mask(LAYOUT, "sdpa", "cpu")), atol=1e-5, rtol=1e-5)


def test_attention_equals_a_softmax_written_out() -> None:
    q, k, v = random_tensor(2, 4, 5, 8), random_tensor(2, 2, 9, 8, seed=1), random_tensor(2, 2, 9, 8, seed=2)
    mask = random_tensor(2, 1, 5, 9, seed=3) > 0
    mask[..., 0] = True
    for row in range(2):
        for head in range(4):
            scores = q[row, head] @ k[row, head // 2].T / 8**0.5
            for visible_pairs in (None, mask):
                expected = scores if visible_pairs is None else scores.masked_fill(~visible_pairs[row, 0], -torch.inf)
                found = attend(q, k, v, visible_pairs)[row, head]
                torch.testing.assert_close(found, expected.softmax(-1) @ v[row, head // 2])


def test_flex_mask_with_gradients_on_a_cpu_is_refused() -> None:
    layout = BlockLayout(torch.tensor([[1]]), torch.tensor([[True]]), torch.zeros(1, 4, dtype=torch.int64), 2)
    with pytest.raises(ConfigError, match="attention sdpa"):
        build_mask(layout, "flex", "cpu")
    with torch.no_grad():
        assert isinstance(build_mask(layout, "flex", "cpu"), BlockMask)
    with pytest.raises(ConfigError, match="'eager'"):
        build_mask(layout, "eager", "cpu")  # type: ignore[arg-type]  # what a user might write


def attention_inputs(layout: BlockLayout, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = len(layout.anchors)
    return (
        random_tensor(rows, 4, layout.num_queries, 16, seed=seed),
        random_tensor(rows, 2, layout.num_keys, 16, seed=seed + 1),
        random_tensor(rows, 2, layout.num_keys, 16, seed=seed + 2),
    )
