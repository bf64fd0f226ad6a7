"""A small packed row, and what the trainer's own code makes of it when single tokens or features change.

Two documents and padding share a row of random tokens. In each document one block has half a document of context, and one
reaches over the document's end.

Legend: S tokens of the row, B block size, K features, H hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from dflash.batch import Example, LossSums, PackedBatch, TargetStates
from dflash.checking.subject import Subject
from dflash.config import DataConfig
from dflash.data.packing import PackedStream
from dflash.worker import DrafterModelWorker


def packed_stream(block_size: int, vocabulary: int) -> PackedStream:
    """A stream whose batches hold one row: a document of 3 B tokens, one of 2 B + 3, and padding."""
    generator = np.random.default_rng(0)
    examples = [
        Example(
            sample_id=f"document-{length}",
            ids=generator.integers(0, vocabulary, length).astype(np.int32),
            loss_mask=np.arange(length) >= 2,
        )
        for length in (3 * block_size, 2 * block_size + 3)
    ]
    config = DataConfig(sequence_length=6 * block_size + 3, rows_per_batch=1, num_anchors=4 * block_size)
    return PackedStream(examples, config, seed=0, pad_token_id=0)


class Bench:
    """A batch with chosen anchors, its features, and the trainer's answers to changes of both."""

    def __init__(self, subject: Subject, stream: PackedStream) -> None:
        assert subject.shape is not None
        self.block_size = subject.shape.block_size
        self.vocabulary = subject.shape.vocab_size
        self.worker: DrafterModelWorker = subject.worker
        batch = stream.batch(0)
        batch = dataclasses.replace(batch, loss_mask=batch.document_ids >= 0)  # whatever comes after a document is supervised
        document = batch.document_ids[0]
        self.bounds = [_bounds(document, number) for number in range(int(document.max()) + 1)]
        # In each document: a block with half a document of context, and one that reaches over the document's end.
        chosen = [place for start, end in self.bounds for place in ((start + end - self.block_size) // 2, end - 2)]
        anchors = torch.tensor([[*chosen, 0]])
        self.batch = dataclasses.replace(batch, anchors=anchors, anchor_valid=torch.arange(len(chosen) + 1)[None] < len(chosen))
        self.slots = range(len(chosen))
        width = subject.shape.num_features * subject.shape.hidden_size
        self.features = torch.randn(1, document.shape[0], width, generator=torch.Generator().manual_seed(1))
        self.before = [self.block(slot, self.batch, self.features) for slot in self.slots]

    def anchor(self, slot: int) -> int:
        """Place of the slot's anchor in the row."""
        return int(self.batch.anchors[0, slot])

    def document(self, slot: int) -> tuple[int, int]:
        """First and one past the last place of the slot's document."""
        return next((start, end) for start, end in self.bounds if start <= self.anchor(slot) < end)

    def states(self, batch: PackedBatch, features: Tensor) -> TargetStates:
        """On the worker's device."""
        return TargetStates(batch=batch, features=features).to(self.worker.device)

    def logits(self, batch: PackedBatch, features: Tensor) -> Tensor:
        """[slots, B-1, V] of the row, through the trainer's path."""
        hidden = self.worker.block_states(self.states(batch, features))
        return self.worker.ends.logits(hidden).view(-1, self.block_size, self.vocabulary)[:, 1:]

    def block(self, slot: int, batch: PackedBatch, features: Tensor) -> Tensor:
        """Logits [B-1, V] of a slot while all others are unused: their inputs are masks, whatever the tokens are."""
        return self.logits(self.only(slot, batch), features)[slot]

    def loss(self, batch: PackedBatch, features: Tensor) -> LossSums:
        """The trainer's loss sums."""
        return self.worker.loss(self.states(batch, features))

    def changed(self, places: Tensor) -> tuple[PackedBatch, Tensor]:
        """Batch and features with other tokens and other features at the places (bool [S])."""
        return self.with_tokens(places), torch.where(places[None, :, None], -2 * self.features.roll(1, -1), self.features)

    def with_tokens(self, places: Tensor) -> PackedBatch:
        """The batch with other tokens at the places (bool [S])."""
        other = (self.batch.input_ids + 1) % self.vocabulary
        return dataclasses.replace(self.batch, input_ids=torch.where(places[None], other, self.batch.input_ids))

    def only(self, slot: int, batch: PackedBatch) -> PackedBatch:
        """The batch with one valid slot."""
        return dataclasses.replace(batch, anchor_valid=torch.arange(batch.anchors.shape[1])[None] == slot)

    def moved(self, slot: int) -> PackedBatch:
        """The batch with every other slot hung somewhere else, half of them unused."""
        own = torch.arange(self.batch.anchors.shape[1])[None] == slot
        moved = torch.where(own, self.batch.anchors, (self.batch.anchors + 1) % self.batch.input_ids.shape[1])
        valid = own | (torch.arange(own.shape[1])[None] % 2 == 0)
        return dataclasses.replace(self.batch, anchors=moved, anchor_valid=valid)

    def outside(self, slot: int) -> Tensor:
        """The places outside the slot's document, bool [S]."""
        start, end = self.document(slot)
        place = torch.arange(self.batch.input_ids.shape[1])
        return (place < start) | (place >= end)


def _bounds(document_ids: Tensor, number: int) -> tuple[int, int]:
    (places,) = torch.nonzero(document_ids == number, as_tuple=True)
    return int(places[0]), int(places[-1]) + 1
