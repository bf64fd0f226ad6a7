"""Which anchors a row of documents trains from.

A token may be an anchor when it and its successor belong to the same document and are both supervised: the anchor must be
a token that the target wrote, and at least its first label must count. (SpecForge's and DeepSpec's rule. At inference the
first anchor is likewise the first generated token, never the last one of the prompt.)

Every token of a document has a random key that depends on nothing but (seed, sample id, epoch, position in the document):
not on its neighbours in the row, not on the number of workers, not on where a run was resumed. A row takes the N smallest
keys of its eligible tokens. So the anchors of a document are always the first k of its own fixed order; neighbours can
change only k, and only in a row with more eligible tokens than slots.

Legend: N anchor slots of a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class PlacedDocument:
    """One document of a row, where it stands."""

    sample_id: str
    start: int  # index in the row of its first token
    loss_mask: npt.NDArray[np.bool_]  # [tokens]


def token_keys(seed: int, sample_id: str, epoch: int, num_tokens: int) -> npt.NDArray[np.uint64]:
    """Random keys [num_tokens] of the tokens of one document; a longer document begins with the keys of a shorter one."""
    text = f"{seed}\0{epoch}\0{sample_id}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(text, digest_size=16, person=b"dflash-anchors").digest()
    generator = np.random.Philox(key=int.from_bytes(digest, "little"))
    return np.asarray(generator.random_raw(num_tokens), dtype=np.uint64)


def eligible_anchors(loss_mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Which tokens of one document [tokens] may be an anchor: supervised, with a supervised successor."""
    eligible = np.zeros(len(loss_mask), dtype=np.bool_)
    eligible[:-1] = loss_mask[:-1] & loss_mask[1:]
    return eligible


def draw_anchors(
    documents: Sequence[PlacedDocument], *, num_anchors: int, seed: int, epoch: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Draw the anchors of one row.

    Returns the row indices [N] int64, ascending, unused slots 0 and last, and which slots are used [N] bool.
    """
    positions = [np.zeros(0, dtype=np.int64)]
    keys = [np.zeros(0, dtype=np.uint64)]
    for document in documents:
        (eligible,) = np.nonzero(eligible_anchors(document.loss_mask))
        positions.append(document.start + eligible)
        keys.append(token_keys(seed, document.sample_id, epoch, len(document.loss_mask))[eligible])
    candidates = np.concatenate(positions)
    smallest = np.argsort(np.concatenate(keys), kind="stable")[:num_anchors]
    drawn = np.sort(candidates[smallest])

    anchors = np.zeros(num_anchors, dtype=np.int64)
    anchors[: len(drawn)] = drawn
    return anchors, np.arange(num_anchors) < len(drawn)
