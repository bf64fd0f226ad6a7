"""Laws of the packed stream."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from helpers_data import example, random_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.batch import Example, PackedBatch, Position
from dflash.config import DataConfig
from dflash.data.anchors import PlacedDocument, draw_anchors
from dflash.data.examples import DataError
from dflash.data.packing import PackedStream

PAD = 7


def stream(examples: list[Example], seed: int = 0, **changes: Any) -> PackedStream:
    config = DataConfig(**{"sequence_length": 64, "rows_per_batch": 3, "num_anchors": 16, **changes})
    return PackedStream(examples, config, seed=seed, pad_token_id=PAD)


def epoch_batches(packed: PackedStream, epoch: int = 0) -> list[PackedBatch]:
    per_epoch = packed.batches_per_epoch(epoch)
    return [packed.batch(epoch * per_epoch + i) for i in range(per_epoch)]


def delivered(batches: list[PackedBatch]) -> Counter[str]:
    return Counter(name for batch in batches for row in batch.sample_ids for name in row)


def same(a: PackedBatch, b: PackedBatch) -> bool:
    return all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in ((getattr(a, name), getattr(b, name)) for name in a.__dataclass_fields__)
    )


lengths = st.lists(st.integers(2, 80), min_size=1, max_size=40)


def all_supervised(sizes: list[int]) -> list[Example]:
    return [example(f"s{i}", [True] * size) for i, size in enumerate(sizes)]


@settings(max_examples=30, deadline=None)
@given(lengths, st.integers(0, 2), st.sampled_from(["documents", "none"]))
def test_every_example_comes_exactly_once_per_epoch(sizes: list[int], epoch: int, packing: str) -> None:
    packed = stream(all_supervised(sizes), packing=packing)
    assert delivered(epoch_batches(packed, epoch)) == Counter(f"s{i}" for i in range(len(sizes)))


@settings(max_examples=30, deadline=None)
@given(lengths)
def test_a_row_holds_its_documents_whole_one_after_the_other(sizes: list[int]) -> None:
    examples = {e.sample_id: e for e in all_supervised(sizes)}
    for batch in epoch_batches(stream(list(examples.values()))):
        for r, names in enumerate(batch.sample_ids):
            start = 0
            for number, name in enumerate(names):
                ids = examples[name].ids[:64]
                here = slice(start, start + len(ids))
                assert batch.input_ids[r, here].tolist() == ids.tolist()
                assert batch.positions[r, here].tolist() == list(range(len(ids)))
                assert batch.document_ids[r, here].tolist() == [number] * len(ids)
                assert batch.loss_mask[r, here].tolist() == examples[name].loss_mask[:64].tolist()
                start = here.stop
            assert batch.input_ids[r, start:].tolist() == [PAD] * (64 - start)
            assert batch.positions[r, start:].tolist() == list(range(64 - start))
            assert batch.document_ids[r, start:].tolist() == [-1] * (64 - start)
            assert not batch.loss_mask[r, start:].any()


def test_every_batch_has_the_declared_shapes_and_types() -> None:
    packed = stream(random_examples(50))
    for batch in epoch_batches(packed):
        for name in ("input_ids", "positions", "document_ids", "loss_mask"):
            assert getattr(batch, name).shape == (3, 64)
        assert batch.anchors.shape == batch.anchor_valid.shape == (3, 16)
        assert batch.input_ids.dtype == batch.positions.dtype == batch.document_ids.dtype == batch.anchors.dtype == torch.int64
        assert batch.loss_mask.dtype == batch.anchor_valid.dtype == torch.bool
        assert len(batch.sample_ids) == 3
        assert batch.num_tokens == int((batch.document_ids >= 0).sum())
        assert batch.num_padding_tokens == 3 * 64 - batch.num_tokens


def test_an_anchor_and_its_first_label_are_supervised_tokens_of_one_document() -> None:
    checked = 0
    for batch in epoch_batches(stream(random_examples(60))):
        for r in range(3):
            anchors = batch.anchors[r][batch.anchor_valid[r]]
            checked += len(anchors)
            assert batch.loss_mask[r, anchors].all()
            assert batch.loss_mask[r, anchors + 1].all()
            assert torch.equal(batch.document_ids[r, anchors], batch.document_ids[r, anchors + 1])
            assert (batch.document_ids[r, anchors] >= 0).all()
    assert checked > 300


def test_anchors_of_a_row_are_those_of_its_documents_drawn_for_the_epoch() -> None:
    examples = {e.sample_id: e for e in random_examples(40)}
    batch = epoch_batches(stream(list(examples.values()), seed=5), epoch=2)[0]
    for r, names in enumerate(batch.sample_ids):
        placed, start = [], 0
        for name in names:
            placed.append(PlacedDocument(sample_id=name, start=start, loss_mask=examples[name].loss_mask))
            start += len(examples[name].ids)
        anchors, valid = draw_anchors(placed, num_anchors=16, seed=5, epoch=2)
        assert batch.anchors[r].tolist() == anchors.tolist()
        assert batch.anchor_valid[r].tolist() == valid.tolist()


def test_the_same_seed_and_epoch_give_the_same_batches_whatever_the_order_of_the_examples() -> None:
    examples = random_examples(50)
    shuffled = random.Random(3).sample(examples, len(examples))
    assert all(same(a, b) for a, b in zip(epoch_batches(stream(examples), 1), epoch_batches(stream(shuffled), 1), strict=True))


@pytest.mark.parametrize("packing", ["documents", "none"])
def test_another_epoch_or_seed_gives_another_order_and_other_anchors(packing: str) -> None:
    examples = random_examples(50)
    packed = stream(examples, packing=packing)

    def order(batches: list[PackedBatch]) -> list[tuple[tuple[str, ...], ...]]:
        return [batch.sample_ids for batch in batches]

    def anchors(batches: list[PackedBatch]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for batch in batches:
            for r, names in enumerate(batch.sample_ids):
                used = batch.anchors[r][batch.anchor_valid[r]]
                for number, name in enumerate(names):
                    found[name] = batch.positions[r, used[batch.document_ids[r, used] == number]].tolist()
        return found

    first = epoch_batches(packed, 0)
    for other in (epoch_batches(packed, 1), epoch_batches(stream(examples, seed=1, packing=packing), 0)):
        assert order(other) != order(first)
        assert anchors(other) != anchors(first)


def test_rows_come_in_another_order_in_another_epoch() -> None:
    packed = stream([example(f"s{length}", [True] * length) for length in range(33, 64)])
    orders = [[row for batch in epoch_batches(packed, epoch) for row in batch.sample_ids if row] for epoch in (0, 1)]
    assert orders[0] != orders[1]
    assert set(orders[0]) == set(orders[1])


def test_examples_of_equal_length_meet_other_neighbours_in_another_epoch() -> None:
    packed = stream([example(f"s{i}", [True] * 30) for i in range(40)])
    neighbours = [{frozenset(row) for batch in epoch_batches(packed, epoch) for row in batch.sample_ids} for epoch in (0, 1)]
    assert len(neighbours[0] & neighbours[1]) < 5


def test_a_batch_is_found_from_its_number_as_if_all_before_had_been_read() -> None:
    examples = random_examples(40)
    packed = stream(examples)
    total = 3 * packed.batches_per_epoch(0)
    sequential = [packed.batch(i) for i in range(total)]
    for index in random.Random(0).sample(range(total), total):
        assert same(stream(examples).batch(index), sequential[index])
        assert same(packed.batch(index), sequential[index])


def test_a_batch_number_is_an_epoch_and_a_place_in_it() -> None:
    packed = stream(random_examples(40))
    per_epoch = packed.batches_per_epoch(0)
    assert per_epoch > 2
    batch = packed.batch(2 * per_epoch + 1)
    assert (batch.index, batch.position) == (2 * per_epoch + 1, Position(epoch=2, batch=1))
    with pytest.raises(ValueError, match="counts from 0"):
        packed.batch(-1)


def test_skipped_examples_are_listed_with_the_reason_and_never_delivered() -> None:
    examples = [
        example("good", "..##"),
        example("prompt only", "...."),
        example("one token", "..#"),
        example("apart", "#.#.#"),
        example("too far", "." * 64 + "####"),
        example("cut too short", "." * 63 + "####"),
        example("cut", "." * 60 + "#" * 10),
    ]
    packed = stream(examples)
    assert dict(packed.skipped) == {
        "prompt only": "no supervised tokens",
        "one token": "fewer than 2 supervised tokens",
        "apart": "no two supervised tokens in a row",
        "too far": "no supervised tokens within the first 64 tokens",
        "cut too short": "fewer than 2 supervised tokens within the first 64 tokens",
    }
    assert packed.truncated == ["cut"]
    assert packed.num_examples == 2
    assert delivered(epoch_batches(packed)) == Counter(["good", "cut"])


def test_no_usable_example_is_an_error_that_counts_the_reasons() -> None:
    with pytest.raises(DataError, match=r"none of 2 examples.*2 with no supervised tokens"):
        stream([example("a", "..."), example("b", "....")])
    with pytest.raises(DataError, match="there are none"):
        stream([])


def test_two_examples_with_one_id_are_refused() -> None:
    with pytest.raises(DataError, match=r"more than once, for example 'a'"):
        stream([example("a", "##"), example("a", "###")])


def test_without_packing_a_row_holds_one_document() -> None:
    packed = stream(random_examples(20), packing="none")
    rows = [row for batch in epoch_batches(packed) for row in batch.sample_ids]
    assert Counter(map(len, rows)) == Counter({1: 20, 0: 1})


def test_the_last_batch_of_an_epoch_is_filled_up_with_rows_of_padding() -> None:
    packed = stream([example(f"s{i}", "#" * 60) for i in range(4)])
    batches = epoch_batches(packed)
    assert [sum(bool(row) for row in batch.sample_ids) for batch in batches] == [3, 1]
    empty = batches[1]
    assert (empty.document_ids[1:] == -1).all()
    assert not empty.anchor_valid[1:].any()
    assert empty.num_tokens == 60


@settings(max_examples=30, deadline=None)
@given(lengths)
def test_rows_are_those_of_best_fit_with_the_longest_first(sizes: list[int]) -> None:
    rows: list[int] = []
    for size in sorted((min(size, 64) for size in sizes), reverse=True):
        fitting = [i for i, filled in enumerate(rows) if filled + size <= 64]
        if fitting:
            rows[max(fitting, key=lambda i: rows[i])] += size
        else:
            rows.append(size)
    packed = stream(all_supervised(sizes))
    fills = [int((batch.document_ids[r] >= 0).sum()) for batch in epoch_batches(packed) for r in range(3) if batch.sample_ids[r]]
    assert sorted(fills) == sorted(rows)
    assert packed.num_rows == len(rows)
