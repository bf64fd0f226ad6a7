"""Examples to batches of one declared shape, in an order that depends only on (seed, epoch).

Rows are planned once, from the lengths alone (`dflash.data.rows`). What changes from epoch to epoch is which of the
examples of equal length takes which place, and in which order the rows come. Every epoch therefore has the same number
of batches, and any batch is found from its number without walking through those before it: a resumed run needs only
the number. Both orders come from hashes of (seed, epoch, sample id), so they do not depend on the order of the files.

Documents are never split over rows, and every example that is not listed in `skipped` comes exactly once per epoch.
The last batch of an epoch may hold rows of nothing but padding.

Examples are read when they are needed, and about 30 bytes of each are kept (37 while they are opened): with a spool
(`dflash.data.spool`) the data may be larger than memory.

Known limits: examples of a length that no other example has keep their neighbours in every epoch; all examples are read once
before the first batch, to see which of them can be trained on.

Legend: R rows of a batch, S tokens of a row, N anchor slots of a row.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dflash.batch import Example, PackedBatch, Position
from dflash.config import DataConfig
from dflash.data.anchors import PlacedDocument, draw_anchors, eligible_anchors
from dflash.data.meta import DataError
from dflash.data.rows import epoch_keys, hash_id, order_within_lengths, plan_rows

PADDING_DOCUMENT = -1


class PackedStream:
    """An endless stream of packed batches over examples, with random access.

    `skipped` lists (sample id, reason) of what is never delivered, `truncated` the ids of examples cut to S tokens.
    Raises DataError when nothing is left, or when two examples share an id.
    """

    def __init__(self, examples: Sequence[Example], config: DataConfig, *, seed: int, pad_token_id: int) -> None:
        self.config = config
        self.seed = seed
        self.pad_token_id = pad_token_id
        admitted = _admit(examples, config)
        _require_unique_ids(examples, admitted)
        self.skipped = admitted.skipped
        self.truncated = admitted.truncated
        if len(admitted.numbers) == 0:
            raise DataError(_nothing_left(len(examples), self.skipped))
        self._source = examples
        self._numbers, self._lengths, self._hashes = _longest_first(admitted)
        del admitted  # what planning needs as well should not add to it
        self._plan = plan_rows(self._lengths, config.sequence_length, config.packing)
        self._recent_orders: tuple[_EpochOrder, ...] = ()

    @property
    def num_examples(self) -> int:
        """Examples delivered in every epoch."""
        return len(self._numbers)

    @property
    def examples(self) -> Iterator[Example]:
        """What is delivered in every epoch, from the longest to the shortest, cut to S tokens."""
        return (self._example(number) for number in range(self.num_examples))

    @property
    def num_rows(self) -> int:
        """Rows of an epoch that hold documents."""
        return len(self._plan.offsets) - 1

    def batches_per_epoch(self, epoch: int = 0) -> int:
        """Micro-batches of an epoch; the same in every epoch, because it depends on the lengths alone."""
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}: epochs count from 0")
        return -(-self.num_rows // self.config.rows_per_batch)

    def position(self, index: int) -> Position:
        """Epoch and place in it of the micro-batch number `index` since the start of the run."""
        if index < 0:
            raise ValueError(f"micro-batch number is {index}: it counts from 0")
        return Position(epoch=index // self.batches_per_epoch(), batch=index % self.batches_per_epoch())

    def batch(self, index: int) -> PackedBatch:
        """Micro-batch number `index` since the start of the run, on the CPU."""
        position = self.position(index)
        order = self._order(position.epoch)
        first = position.batch * self.config.rows_per_batch
        rows = [
            [self._example(int(order.example_of_place[place])) for place in self._plan.places(int(row))]
            for row in order.rows[first : first + self.config.rows_per_batch]
        ]
        rows += [[] for _ in range(self.config.rows_per_batch - len(rows))]
        return self._fill(rows, index, position)

    def _example(self, number: int) -> Example:
        """Number `number` from the longest to the shortest, cut to a row."""
        example = self._source[int(self._numbers[number])]
        length = self.config.sequence_length
        return Example(sample_id=example.sample_id, ids=example.ids[:length], loss_mask=example.loss_mask[:length])

    def _order(self, epoch: int) -> _EpochOrder:
        order = next((order for order in self._recent_orders if order.epoch == epoch), None)
        if order is None:
            row_hashes = np.arange(self.num_rows, dtype=np.uint64)
            order = _EpochOrder(
                epoch=epoch,
                example_of_place=order_within_lengths(self._lengths, self._hashes, self.seed, epoch),
                rows=np.argsort(epoch_keys(row_hashes, self.seed, epoch), kind="stable"),
            )
            # Two epochs, because workers that are a batch apart cross the end of an epoch one after the other. The tuple is
            # replaced, never edited: threads that race compute the same order twice, and that is all.
            self._recent_orders = (order, *self._recent_orders[:1])
        return order

    def _fill(self, rows: list[list[Example]], index: int, position: Position) -> PackedBatch:
        shape = (len(rows), self.config.sequence_length)
        input_ids = np.full(shape, self.pad_token_id, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        document_ids = np.full(shape, PADDING_DOCUMENT, dtype=np.int64)
        loss_mask = np.zeros(shape, dtype=np.bool_)
        anchors = np.zeros((len(rows), self.config.num_anchors), dtype=np.int64)
        anchor_valid = np.zeros(anchors.shape, dtype=np.bool_)
        num_tokens = 0
        for r, row in enumerate(rows):
            placed, start = [], 0
            for number, example in enumerate(row):
                here = slice(start, start + len(example.ids))
                input_ids[r, here] = example.ids
                positions[r, here] = np.arange(len(example.ids))
                document_ids[r, here] = number
                loss_mask[r, here] = example.loss_mask
                placed.append(PlacedDocument(sample_id=example.sample_id, start=start, loss_mask=example.loss_mask))
                start = here.stop
            positions[r, start:] = np.arange(self.config.sequence_length - start)
            anchors[r], anchor_valid[r] = draw_anchors(
                placed, num_anchors=self.config.num_anchors, seed=self.seed, epoch=position.epoch
            )
            num_tokens += start
        return PackedBatch(
            input_ids=torch.from_numpy(input_ids),
            positions=torch.from_numpy(positions),
            document_ids=torch.from_numpy(document_ids),
            loss_mask=torch.from_numpy(loss_mask),
            anchors=torch.from_numpy(anchors),
            anchor_valid=torch.from_numpy(anchor_valid),
            sample_ids=tuple(tuple(example.sample_id for example in row) for row in rows),
            index=index,
            position=position,
            num_tokens=num_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class _Admitted:
    """The examples that can be trained on, in the order of the source."""

    numbers: npt.NDArray[np.int32]  # [examples], in the source
    lengths: npt.NDArray[np.int32]  # [examples], tokens, at most S
    all_hashes: npt.NDArray[np.uint64]  # [examples of the source], of the sample ids
    skipped: list[tuple[str, str]]
    truncated: list[str]


@dataclass(frozen=True, kw_only=True)
class _EpochOrder:
    epoch: int
    example_of_place: npt.NDArray[np.int32]  # [places]
    rows: npt.NDArray[np.int64]  # [rows], a permutation


def _require_unique_ids(examples: Sequence[Example], admitted: _Admitted) -> None:
    hashes = np.sort(admitted.all_hashes)
    doubtful = np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
    if len(doubtful) == 0:
        return
    numbers = np.flatnonzero(np.isin(admitted.all_hashes, doubtful))
    counts = Counter(examples[int(number)].sample_id for number in numbers)
    repeated = [sample_id for sample_id, count in counts.items() if count > 1]
    if repeated:
        raise DataError(
            f"{len(repeated)} sample ids occur more than once, for example {repeated[0]!r}: give each example its own id"
        )


def _admit(examples: Sequence[Example], config: DataConfig) -> _Admitted:
    numbers, lengths, hashes = array("i"), array("i"), array("Q")
    skipped: list[tuple[str, str]] = []
    truncated: list[str] = []
    for number, example in enumerate(examples):
        hashes.append(hash_id(example.sample_id))
        cut = len(example.ids) > config.sequence_length
        reason = _reason_to_skip(example.loss_mask[: config.sequence_length], config.min_supervised_tokens, cut=cut)
        if reason is not None:
            skipped.append((example.sample_id, reason))
            continue
        if cut:
            truncated.append(example.sample_id)
        numbers.append(number)
        lengths.append(min(len(example.ids), config.sequence_length))
    return _Admitted(
        numbers=np.frombuffer(numbers, dtype=np.int32),
        lengths=np.frombuffer(lengths, dtype=np.int32),
        all_hashes=np.frombuffer(hashes, dtype=np.uint64),
        skipped=skipped,
        truncated=truncated,
    )


def _longest_first(
    admitted: _Admitted,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.uint64]]:
    """Numbers, lengths and hashes of the examples; those of equal length in the order of the source."""
    order = np.argsort(-admitted.lengths, kind="stable")
    numbers = admitted.numbers[order]
    return numbers, admitted.lengths[order], admitted.all_hashes[numbers]


def _reason_to_skip(loss_mask: npt.NDArray[np.bool_], minimum: int, *, cut: bool) -> str | None:
    supervised = int(loss_mask.sum())
    where = f" within the first {len(loss_mask)} tokens" if cut else ""
    if supervised == 0:
        return f"no supervised tokens{where}"
    if supervised < minimum:
        return f"fewer than {minimum} supervised tokens{where}"
    if not eligible_anchors(loss_mask).any():
        return f"no two supervised tokens in a row{where}"
    return None


def _nothing_left(num_examples: int, skipped: list[tuple[str, str]]) -> str:
    counts = Counter(reason for _, reason in skipped)
    reasons = "; ".join(f"{count} with {reason}" for reason, count in counts.most_common()) or "there are none"
    named = f", for example {', '.join(sample_id for sample_id, _ in skipped[:5])}" if skipped else ""
    return (
        f"none of {num_examples} examples can be trained on ({reasons}{named}): "
        "prepare more data, or change data.sequence-length or data.min-supervised-tokens"
    )
