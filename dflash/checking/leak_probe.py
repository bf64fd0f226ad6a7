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
from collections.abc import Iterator

import numpy as np
import torch

from dflash.batch import LossSums, PackedBatch
from dflash.checking.bench import Bench, packed_stream
from dflash.checking.settings import Check, judged, unobserved
from dflash.checking.subject import Subject
from dflash.data.anchors import eligible_anchors
from dflash.data.packing import PackedStream
from dflash.modeling import masks
from dflash.modeling.tiles import TILE

TARGET_TOLERANCE = 0.02  # median relative change of a token's features; rounding in bf16 stays below


def probe(subject: Subject) -> Iterator[Check]:
    """Context, blocks, documents, labels, anchors, and the target's own packing."""
    if subject.missing:
        yield unobserved("leak.all", subject.missing)
        return
    with torch.no_grad():
        assert subject.shape is not None
        stream = packed_stream(subject.shape.block_size, subject.shape.vocab_size)
        yield from _anchor_checks(stream)
        bench = Bench(subject, stream)
        yield _context(bench)
        yield _blocks(bench)
        yield _documents(bench)
        yield _labels_in_document(bench)
        yield _label_places(bench)
        yield _target_documents(subject, bench)


def _context(bench: Bench) -> Check:
    place = torch.arange(bench.batch.input_ids.shape[1])
    leaks, blind = [], []
    for slot in bench.slots:
        anchor, (_, end) = bench.anchor(slot), bench.document(slot)
        _, features = bench.changed((place >= anchor) & (place < end))
        batch = bench.with_tokens((place > anchor) & (place < end))
        if not torch.equal(bench.block(slot, batch, features), bench.before[slot]):
            leaks.append(anchor)
        _, features = bench.changed(place == anchor - 1)
        if torch.equal(bench.block(slot, bench.batch, features), bench.before[slot]):
            blind.append(anchor)
    found = f"features and tokens at and after the anchor reach the block at {leaks}" if leaks else ""
    if blind:
        found += f"{'; ' if found else ''}features of anchor-1 do not reach the block at {blind}"
    good = f"{len(bench.slots)} blocks: bit-identical when features at, and tokens after, the anchor change; anchor-1 counts"
    fix = "the context must be strictly before the anchor (key < anchor): train again with a mask that says so"
    return judged("leak.context", not found, found or good, fix)


def _blocks(bench: Bench) -> Check:
    together = bench.logits(bench.batch, bench.features)
    leaks = [
        bench.anchor(slot)
        for slot in bench.slots
        if not torch.equal(bench.logits(bench.moved(slot), bench.features)[slot], together[slot])
    ]
    return _none_reaches("blocks", "other blocks of the row", bench, leaks)


def _documents(bench: Bench) -> Check:
    leaks = [
        bench.anchor(slot)
        for slot in bench.slots
        if not torch.equal(bench.block(slot, *bench.changed(bench.outside(slot))), bench.before[slot])
    ]
    return _none_reaches("documents", "other documents and padding", bench, leaks)


def _none_reaches(name: str, what: str, bench: Bench, leaks: list[int]) -> Check:
    found = f"{what} reach the block at {leaks}" if leaks else f"{len(bench.slots)} blocks: bit-identical when {what} change"
    return judged(f"leak.{name}", not leaks, found, f"keep {what} out of a block's mask, then train again")


def _labels_in_document(bench: Bench) -> Check:
    foreign = []
    for slot in bench.slots:
        other = bench.only(slot, bench.with_tokens(bench.outside(slot)))
        if not _same(bench.loss(other, bench.features), bench.loss(bench.only(slot, bench.batch), bench.features)):
            foreign.append(bench.anchor(slot))
    found = f"the loss of the block at {foreign} depends on tokens of other documents" if foreign else ""
    good = f"{len(bench.slots)} blocks: the loss is bit-identical when tokens of other documents change"
    fix = "a block near the end of a document has fewer labels: mask those beyond it, then train again"
    return judged("leak.labels-in-document", not foreign, found or good, fix)


def _label_places(bench: Bench) -> Check:
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
    query = torch.arange(layout.num_queries, layout.num_queries + TILE).view(1, 1, -1, 1)
    key = torch.arange(layout.num_keys + TILE).view(1, 1, 1, -1)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    try:
        seen = bool(masks.predicate(layout)(zero, zero, query, key).any())
    except (IndexError, RuntimeError) as error:
        found = f"the mask fails beyond the last block ({type(error).__name__}: {error}); a GPU would stop with a device assert"
        return judged("leak.clamp", good=False, found=found, fix="clamp the slot before reading its anchor")
    found = "a query beyond the last block sees something" if seen else "beyond the last block nothing is visible"
    return judged("leak.clamp", not seen, found, "make queries beyond the last slot see nothing")


def _target_documents(subject: Subject, bench: Bench) -> Check:
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
