"""What may a block know, and what is it trained on? Asked of the trainer's own code, with this checkpoint's weights.

Two documents and padding share a row. Tokens and features are changed in one place after the other; a block's logits must
stay bit-identical when the place is none of its business, and must change when it is. The same is asked of the loss, which
may only depend on the labels anchor+1 to anchor+B-1 inside the document. What differs in kind: features of a packed row
come from the target, whose kernels may round differently for other neighbours, so there a tolerance applies.

Known limits: the mask is given to scaled_dot_product_attention; flex_attention stores the same predicate, and is not run.

Legend: R rows (1), S tokens of the row, B block size, K features, H hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from dflash.batch import Example, LossSums, PackedBatch, TargetStates
from dflash.checking.settings import Check, judged, unobserved
from dflash.checking.subject import Subject
from dflash.config import DataConfig
from dflash.data.anchors import eligible_anchors
from dflash.data.packing import PackedStream
from dflash.modeling import masks
from dflash.worker import DrafterModelWorker

TARGET_TOLERANCE = 0.02  # median relative change of a token's features; rounding in bf16 stays below


def probe(subject: Subject) -> Iterator[Check]:
    """Context, blocks, documents, labels, anchors, and the target's own packing."""
    if subject.missing:
        yield unobserved("leak.all", subject.missing)
        return
    with torch.no_grad():
        assert subject.shape is not None
        stream = _stream(subject.shape.block_size, subject.shape.vocab_size)
        yield from _anchor_checks(stream)
        bench = _Bench(subject, stream)
        yield _context(bench)
        yield _elsewhere(bench, "blocks", "other blocks of the row", bench.without_other_blocks)
        yield _elsewhere(bench, "documents", "other documents and padding", bench.with_other_documents)
        yield _labels_in_document(bench)
        yield _label_places(bench)
        yield _target_documents(subject, bench)


def _stream(block_size: int, vocabulary: int) -> PackedStream:
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


class _Bench:
    """A batch with chosen anchors, its features, and the trainer's answers to changes of both."""

    def __init__(self, subject: Subject, stream: PackedStream) -> None:
        assert subject.shape is not None
        self.block_size = subject.shape.block_size
        self.vocabulary = subject.shape.vocab_size
        self.worker: DrafterModelWorker = subject.worker
        batch = stream.batch(0)
        document = batch.document_ids[0]
        self.bounds = [_bounds(document, number) for number in range(int(document.max()) + 1)]
        # In each document: a block with half a document of context, and one that reaches over the document's end.
        chosen = [place for start, end in self.bounds for place in ((start + end - self.block_size) // 2, end - 2)]
        anchors = torch.tensor([[*chosen, 0]])
        self.batch = dataclasses.replace(batch, anchors=anchors, anchor_valid=torch.arange(len(chosen) + 1)[None] < len(chosen))
        self.slots = range(len(chosen))
        width = subject.shape.num_features * subject.shape.hidden_size
        self.features = torch.randn(1, document.shape[0], width, generator=torch.Generator().manual_seed(1))
        self.before = self.logits(self.batch, self.features)

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

    def without_other_blocks(self, slot: int) -> tuple[PackedBatch, Tensor]:
        """All other slots hang somewhere else, half of them unused."""
        own = torch.arange(self.batch.anchors.shape[1])[None] == slot
        moved = torch.where(own, self.batch.anchors, (self.batch.anchors + 1) % self.batch.input_ids.shape[1])
        valid = own | (torch.arange(own.shape[1])[None] % 2 == 0)
        return dataclasses.replace(self.batch, anchors=moved, anchor_valid=valid), self.features

    def with_other_documents(self, slot: int) -> tuple[PackedBatch, Tensor]:
        """Everything outside the slot's document is different."""
        start, end = self.document(slot)
        place = torch.arange(self.batch.input_ids.shape[1])
        return self.changed((place < start) | (place >= end))


def _bounds(document_ids: Tensor, number: int) -> tuple[int, int]:
    (places,) = torch.nonzero(document_ids == number, as_tuple=True)
    return int(places[0]), int(places[-1]) + 1


def _context(bench: _Bench) -> Check:
    place = torch.arange(bench.batch.input_ids.shape[1])
    leaks, blind = [], []
    for slot in bench.slots:
        anchor, (_, end) = bench.anchor(slot), bench.document(slot)
        _, features = bench.changed((place >= anchor) & (place < end))
        batch = bench.with_tokens((place > anchor) & (place < end))
        if not torch.equal(bench.logits(batch, features)[slot], bench.before[slot]):
            leaks.append(anchor)
        _, features = bench.changed(place == anchor - 1)
        if torch.equal(bench.logits(bench.batch, features)[slot], bench.before[slot]):
            blind.append(anchor)
    found = f"features and tokens at and after the anchor reach the block at {leaks}" if leaks else ""
    if blind:
        found += f"{'; ' if found else ''}features of anchor-1 do not reach the block at {blind}"
    good = f"{len(bench.slots)} blocks: bit-identical when features at, and tokens after, the anchor change; anchor-1 counts"
    fix = "the context must be strictly before the anchor (key < anchor): train again with a mask that says so"
    return judged("leak.context", not found, found or good, fix)


def _elsewhere(bench: _Bench, name: str, what: str, change: Callable[[int], tuple[PackedBatch, Tensor]]) -> Check:
    leaks = [bench.anchor(slot) for slot in bench.slots if not torch.equal(bench.logits(*change(slot))[slot], bench.before[slot])]
    found = f"{what} reach the block at {leaks}" if leaks else f"{len(bench.slots)} blocks: bit-identical when {what} change"
    return judged(f"leak.{name}", not leaks, found, f"keep {what} out of a block's mask, then train again")


def _labels_in_document(bench: _Bench) -> Check:
    foreign = []
    for slot in bench.slots:
        start, end = bench.document(slot)
        place = torch.arange(bench.batch.input_ids.shape[1])
        other = bench.only(slot, bench.with_tokens((place < start) | (place >= end)))
        if not _same(bench.loss(other, bench.features), bench.loss(bench.only(slot, bench.batch), bench.features)):
            foreign.append(bench.anchor(slot))
    found = f"the loss of the block at {foreign} depends on tokens of other documents" if foreign else ""
    good = f"{len(bench.slots)} blocks: the loss is bit-identical when tokens of other documents change"
    fix = "a block near the end of a document has fewer labels: mask those beyond it, then train again"
    return judged("leak.labels-in-document", not foreign, found or good, fix)


def _label_places(bench: _Bench) -> Check:
    """Which tokens the loss of a whole block depends on, as offsets from its anchor."""
    slot = next(slot for slot in bench.slots if bench.anchor(slot) + bench.block_size + 1 < bench.document(slot)[1])
    alone = bench.only(slot, bench.batch)
    before = bench.loss(alone, bench.features)
    found = []
    for offset in range(1, bench.block_size + 2):
        place = torch.arange(bench.batch.input_ids.shape[1]) == bench.anchor(slot) + offset
        if not _same(bench.loss(bench.only(slot, bench.with_tokens(place)), bench.features), before):
            found.append(offset)
    expected = list(range(1, bench.block_size))
    text = f"a block of {bench.block_size} is trained on the tokens at anchor + {_range(found)}"
    fix = "index k must be trained on the token at anchor + k, k = 1 to B-1: train again with unshifted labels"
    return judged("leak.labels", found == expected, text, fix)


def _range(numbers: list[int]) -> str:
    whole = len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]} to {numbers[-1]}" if whole else f"{numbers}"


def _same(one: LossSums, other: LossSums) -> bool:
    names = [field.name for field in dataclasses.fields(LossSums)]
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


def _anchor_checks(stream: PackedStream) -> Iterator[Check]:
    batch = stream.batch(0)
    used = batch.anchors[0][batch.anchor_valid[0]].tolist()
    problems = []
    if used != sorted(set(used)):
        problems.append("not ascending")
    if batch.anchor_valid[0].tolist() != [True] * len(used) + [False] * (batch.anchors.shape[1] - len(used)):
        problems.append("unused slots before used ones")
    document, loss_mask = batch.document_ids[0].numpy(), batch.loss_mask[0].numpy()
    good = np.concatenate([eligible_anchors(loss_mask[document == number]) for number in range(document.max() + 1)])
    wrong = [place for place in used if not (place < len(good) and good[place])]
    if wrong:
        problems.append(f"{len(wrong)} where the anchor and its successor are not both supervised, for example {wrong[0]}")
    text = f"{len(used)} anchors of a packed row: " + ("; ".join(problems) or "ascending, all eligible")
    yield judged("leak.anchors", not problems, text, "draw anchors among supervised tokens with a supervised successor, sorted")
    yield _tile_overhang(batch)


def _tile_overhang(batch: PackedBatch) -> Check:
    """Kernels ask the mask about queries and keys up to the next multiple of a tile: beyond the last, nothing is visible."""
    layout = masks.BlockLayout(batch.anchors, batch.anchor_valid, batch.document_ids, block_size=3)
    query = torch.arange(layout.num_queries, layout.num_queries + masks.TILE).view(1, 1, -1, 1)
    key = torch.arange(layout.num_keys + masks.TILE).view(1, 1, 1, -1)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    try:
        seen = bool(masks.predicate(layout)(zero, zero, query, key).any())
    except (IndexError, RuntimeError) as error:
        found = f"the mask fails beyond the last block ({type(error).__name__}: {error}); a GPU would stop with a device assert"
        return judged("leak.clamp", good=False, found=found, fix="clamp the slot before reading its anchor")
    found = "a query beyond the last block sees something" if seen else "beyond the last block nothing is visible"
    return judged("leak.clamp", not seen, found, "make queries beyond the last slot see nothing")


def _target_documents(subject: Subject, bench: _Bench) -> Check:
    name = "leak.target-documents"
    if not subject.packs:
        return unobserved(name, "the target cannot separate packed documents: the trainer refuses such rows")
    (start, end), *_ = reversed(bench.bounds)
    place = torch.arange(bench.batch.input_ids.shape[1])
    other = bench.with_tokens((place < start) | (place >= end))
    device = subject.device
    before, after = (subject.runner.run(batch.to(device))[0][0, start:end].float() for batch in (bench.batch, other))
    change = ((after - before).norm(dim=-1) / before.norm(dim=-1).clamp_min(1e-30)).median().item()
    found = f"features of the second document change by {change:.1e} when the first does (at most {TARGET_TOLERANCE:.0e})"
    return judged(name, change <= TARGET_TOLERANCE, found, "use --data.packing none with this target")
