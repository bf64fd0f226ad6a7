"""What a block may know: tokens and features of its own document, strictly before its anchor, and its anchor's token."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from modeling_batches import MASK, lively_drafter, packed_batch, random_tensor, tiny_shape
from torch import Tensor

from dflash.batch import PackedBatch
from dflash.modeling.drafter import Drafter, block_inputs
from dflash.modeling.masks import BlockLayout, dense_mask

BLOCK = 4
DOCUMENTS = [[11, 17]]
LENGTH = 32  # 4 tokens of padding
ANCHORS = [[5, 10, 11, 14, 27]]  # the last token of the first document, the first and the last of the second
BATCH = packed_batch(DOCUMENTS, length=LENGTH, anchors=ANCHORS, num_anchors=6)
EMBEDDING = random_tensor(512, 32, seed=7)
HEAD = random_tensor(512, 32, seed=8)


def logits(drafter: Drafter, batch: PackedBatch, features: Tensor) -> Tensor:
    """[slots, block, vocabulary] of the only row, through the training path."""
    ids, positions = block_inputs(batch, MASK, BLOCK)
    hidden = drafter(EMBEDDING[ids], positions, features, batch.positions, dense_mask(BlockLayout.of(batch, BLOCK)))
    return (hidden @ HEAD.T).view(-1, BLOCK, 512).detach()


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    return lively_drafter(tiny_shape(block_size=BLOCK))


FEATURES = random_tensor(1, LENGTH, 96)


def visible_places(slot: int) -> set[int]:
    """The context of a valid slot: places of its document before its anchor."""
    anchor = ANCHORS[0][slot]
    return {t for t in range(anchor) if int(BATCH.document_ids[0, t]) == int(BATCH.document_ids[0, anchor])}


@given(st.integers(0, 4), st.sets(st.integers(0, LENGTH - 1), min_size=1), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_only_features_before_the_anchor_and_in_its_document_change_a_block(
    drafter: Drafter, slot: int, touched: set[int], seed: int
) -> None:
    features = FEATURES.clone()
    features[0, sorted(touched)] += random_tensor(len(touched), 96, seed=1000 + seed)
    before, after = logits(drafter, BATCH, FEATURES)[slot], logits(drafter, BATCH, features)[slot]
    if touched & visible_places(slot):
        assert not torch.equal(before, after)
    else:
        assert torch.equal(before, after)


@pytest.mark.parametrize("slot", range(5))
def test_every_single_visible_place_matters(drafter: Drafter, slot: int) -> None:
    before = logits(drafter, BATCH, FEATURES)[slot]
    for place in range(LENGTH):
        features = FEATURES.clone()
        features[0, place] *= -1
        changed = not torch.equal(before, logits(drafter, BATCH, features)[slot])
        assert changed == (place in visible_places(slot)), place


@pytest.mark.parametrize("slot", range(5))
def test_of_all_tokens_only_the_anchors_own_reaches_a_block_directly(drafter: Drafter, slot: int) -> None:
    """Earlier tokens reach it through features alone; those at and after the anchor are what it has to predict."""
    before = logits(drafter, BATCH, FEATURES)[slot]
    for place in range(LENGTH):
        tokens = BATCH.input_ids.clone()
        tokens[0, place] = (tokens[0, place] + 1) % 500
        after = logits(drafter, dataclasses.replace(BATCH, input_ids=tokens), FEATURES)[slot]
        assert torch.equal(before, after) == (place != ANCHORS[0][slot]), place


def test_blocks_do_not_see_each_other(drafter: Drafter) -> None:
    """The first slot's block is the same whatever the other slots hold, and whether they are used."""
    before = logits(drafter, BATCH, FEATURES)[0]
    for others in ([6, 7, 8, 9, 10], [], [30]):
        batch = packed_batch(DOCUMENTS, length=LENGTH, anchors=[[5, *others]], num_anchors=6)
        assert torch.equal(before, logits(drafter, batch, FEATURES)[0])


def test_every_mask_of_a_block_sees_the_whole_block(drafter: Drafter) -> None:
    """In-block attention goes both ways: each of the B inputs changes each of the B outputs."""
    _, positions = block_inputs(BATCH, MASK, BLOCK)
    mask = dense_mask(BlockLayout.of(BATCH, BLOCK))
    embeds = random_tensor(1, 6 * BLOCK, 32)
    before = drafter(embeds, positions, FEATURES, BATCH.positions, mask)[0, :BLOCK]
    for place in range(BLOCK):
        changed = embeds.clone()
        changed[0, place] += 1
        after = drafter(changed, positions, FEATURES, BATCH.positions, mask)[0, :BLOCK]
        assert (before != after).any(-1).all()


def test_a_document_is_drafted_alike_wherever_it_is_packed(drafter: Drafter) -> None:
    """Positions and context are the document's own: moving it in the row changes nothing but rounding."""
    shift = DOCUMENTS[0][0]
    alone = packed_batch([[17]], length=17, anchors=[[3, 16]], num_anchors=2)
    alone = dataclasses.replace(alone, input_ids=BATCH.input_ids[:, shift : shift + 17])
    found = logits(drafter, alone, FEATURES[:, shift : shift + 17])
    torch.testing.assert_close(found, logits(drafter, BATCH, FEATURES)[3:5], atol=1e-4, rtol=1e-4)
