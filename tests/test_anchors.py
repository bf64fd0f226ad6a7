"""Laws of drawing anchors."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash.data.anchors import PlacedDocument, draw_anchors, eligible_anchors, token_keys

masks = st.lists(st.booleans(), min_size=1, max_size=24)
rows = st.lists(masks, max_size=5)


def place(row: list[list[bool]], names: list[str] | None = None) -> list[PlacedDocument]:
    documents, start = [], 0
    for number, mask in enumerate(row):
        name = names[number] if names else f"doc{number}"
        documents.append(PlacedDocument(sample_id=name, start=start, loss_mask=np.array(mask, dtype=np.bool_)))
        start += len(mask)
    return documents


def drawn(documents: list[PlacedDocument], num_anchors: int, *, seed: int = 0, epoch: int = 0) -> list[int]:
    anchors, valid = draw_anchors(documents, num_anchors=num_anchors, seed=seed, epoch=epoch)
    return [int(anchor) for anchor in anchors[valid]]


def relative(anchors: list[int], document: PlacedDocument) -> list[int]:
    return [a - document.start for a in anchors if document.start <= a < document.start + len(document.loss_mask)]


@given(masks)
def test_an_anchor_and_its_successor_are_supervised_tokens_of_one_document(mask: list[bool]) -> None:
    expected = [i for i in range(len(mask) - 1) if mask[i] and mask[i + 1]]
    assert np.flatnonzero(eligible_anchors(np.array(mask, dtype=np.bool_))).tolist() == expected


def test_the_last_token_of_a_document_is_no_anchor_even_if_the_next_document_begins_supervised() -> None:
    assert drawn(place([[True, True], [True, True]]), 8) == [0, 2]


@given(rows, st.integers(1, 12), st.integers(0, 3), st.integers(0, 3))
def test_anchors_are_sorted_unique_eligible_and_as_many_as_fit(row: list[list[bool]], slots: int, seed: int, epoch: int) -> None:
    anchors, valid = draw_anchors(place(row), num_anchors=slots, seed=seed, epoch=epoch)
    flat = [d.start + i for d in place(row) for i in range(len(d.loss_mask) - 1) if d.loss_mask[i] and d.loss_mask[i + 1]]
    used = anchors[valid].tolist()
    assert anchors.shape == valid.shape == (slots,)
    assert used == sorted(set(used))
    assert set(used) <= set(flat)
    assert len(used) == min(slots, len(flat))
    assert not anchors[len(used) :].any()
    assert valid.tolist() == [True] * len(used) + [False] * (slots - len(used))


@given(rows, st.integers(1, 12))
def test_the_smallest_keys_of_the_row_win(row: list[list[bool]], slots: int) -> None:
    documents = place(row)
    keyed = sorted(
        (int(token_keys(0, d.sample_id, 0, len(d.loss_mask))[i]), d.start + i)
        for d in documents
        for i in np.flatnonzero(eligible_anchors(d.loss_mask)).tolist()
    )
    assert drawn(documents, slots) == sorted(position for _, position in keyed[:slots])


@given(masks, rows, rows, st.integers(1, 12))
def test_row_mates_change_only_how_many_of_its_own_fixed_order_a_document_gets(
    mask: list[bool], before: list[list[bool]], after: list[list[bool]], slots: int
) -> None:
    names = ["mine" if i == len(before) else f"mate{i}" for i in range(len(before) + 1 + len(after))]
    documents = place([*before, mask, *after], names)
    mine = documents[len(before)]
    got = relative(drawn(documents, slots), mine)
    alone = place([mask], ["mine"])
    assert got == drawn(alone, max(len(got), 1))[: len(got)]
    total = sum(int(eligible_anchors(d.loss_mask).sum()) for d in documents)
    if total <= slots:
        assert got == drawn(alone, slots)


def test_anchors_change_with_epoch_seed_and_sample_id_and_with_nothing_else() -> None:
    mask = [True] * 200
    first = drawn(place([mask], ["a"]), 16, seed=1, epoch=0)
    assert drawn(place([mask], ["a"]), 16, seed=1, epoch=0) == first
    assert drawn(place([mask], ["a"]), 16, seed=1, epoch=1) != first
    assert drawn(place([mask], ["a"]), 16, seed=2, epoch=0) != first
    assert drawn(place([mask], ["b"]), 16, seed=1, epoch=0) != first


def test_the_keys_of_a_longer_document_begin_with_those_of_its_beginning() -> None:
    assert token_keys(3, "x", 2, 50)[:20].tolist() == token_keys(3, "x", 2, 20).tolist()


def test_keys_are_the_same_on_every_machine_and_version() -> None:
    assert token_keys(0, "sample", 0, 3).tolist() == [4703162624704540081, 8952406988357220601, 16680108587675354452]


def test_every_eligible_token_is_drawn_equally_often() -> None:
    counts = np.zeros(32, dtype=int)
    for epoch in range(400):
        for anchor in drawn(place([[True] * 33]), 8, epoch=epoch):
            counts[anchor] += 1
    expected = 400 * 8 / 32
    assert ((counts - expected) ** 2 / (expected * (1 - 8 / 32))).sum() < 62  # chi-square, 31 degrees: p < 0.001
