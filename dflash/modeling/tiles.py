"""Which tiles of a flex mask are full, partial or empty: from anchors and documents alone, on the CPU.

A flex mask is made of lists of tiles (128 queries x 128 keys) with something visible in them. They follow from the anchors, so
they can be made beside the target's forward; made on a GPU, they are a hundred small launches for which it waits.

The tokens of a document before position p are counted once at the ends of tiles: a slot sees of a tile what its document has
before the tile's end and before its anchor, less what it has before the tile's begin.

Legend: R rows, S context tokens of a row, N anchor slots, B block size, Tq and Tk tiles of queries and of keys.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dflash.batch import PackedBatch, TileLists

# Flex kernels work on tiles of this many queries and keys. A smaller tile, such as the block size, is refused by the kernels.
TILE = 128

_Counts = npt.NDArray[np.int64]


def tile_lists(batch: PackedBatch, block_size: int) -> TileLists:
    """The lists of the mask of `dflash.modeling.masks.predicate`, from a batch on any device; on the CPU."""
    anchors, valid, documents = (x.cpu().numpy() for x in (batch.anchors, batch.anchor_valid, batch.document_ids))
    return lists_of(anchors, valid, documents, block_size)


def lists_of(
    anchors: npt.NDArray[np.int64], anchor_valid: npt.NDArray[np.bool_], document_ids: npt.NDArray[np.int64], block_size: int
) -> TileLists:
    """Shapes: anchors and anchor_valid [R, N], document_ids [R, S]; see PackedBatch."""
    rows = zip(anchors, anchor_valid, document_ids, strict=True)
    pairs = np.stack([_visible_pairs(*row, block_size) for row in rows])[:, None]  # [R, 1, Tq, Tk]
    full = pairs == TILE * TILE
    partial = (pairs > 0) & ~full
    by_query, by_query_full = _ordered(partial), _ordered(full)
    by_key, by_key_full = _ordered(partial.swapaxes(-1, -2)), _ordered(full.swapaxes(-1, -2))
    return TileLists(
        kv_num_blocks=by_query[0],
        kv_indices=by_query[1],
        full_kv_num_blocks=by_query_full[0],
        full_kv_indices=by_query_full[1],
        q_num_blocks=by_key[0],
        q_indices=by_key[1],
        full_q_num_blocks=by_key_full[0],
        full_q_indices=by_key_full[1],
    )


def _visible_pairs(
    anchors: npt.NDArray[np.int64], valid: npt.NDArray[np.bool_], documents: npt.NDArray[np.int64], block_size: int
) -> _Counts:
    """Visible pairs in every tile of a row, [Tq, Tk]."""
    context, slots = len(documents), np.arange(len(anchors))
    first_query = slots * block_size
    query_tiles, key_tiles = _tiles(len(slots) * block_size), _tiles(context + len(slots) * block_size)
    of_slot = _context_seen(anchors, valid, documents, key_tiles)
    # All queries of a block see the same: what the slot sees counts once for each of its queries in a tile.
    own = _overlap(context + first_query, block_size, key_tiles)
    queries = _overlap(first_query, block_size, query_tiles)
    exact = queries.T.astype(np.float64) @ (of_slot + own).astype(np.float64)  # whole numbers far below 2**53
    return exact.astype(np.int64)


def _context_seen(
    anchors: npt.NDArray[np.int64], valid: npt.NDArray[np.bool_], documents: npt.NDArray[np.int64], key_tiles: _Counts
) -> _Counts:
    """Context tokens that each slot sees in each tile of keys, [N, Tk]."""
    names, number = np.unique(documents, return_inverse=True)
    ends = np.minimum(np.append(key_tiles * TILE, (len(key_tiles)) * TILE), len(documents))
    before = np.zeros((len(names), len(documents) + 1), dtype=np.int64)  # tokens of each document before each position
    before[:, 1:] = np.cumsum(number == np.arange(len(names))[:, None], axis=1)
    place = anchors.clip(0, len(documents) - 1)
    mine = number[place]
    seen = np.minimum(before[:, ends][mine], before[mine, place][:, None])
    seen[~valid | (documents[place] < 0)] = 0
    in_tile: _Counts = np.diff(seen, axis=1)
    return in_tile


def _tiles(length: int) -> _Counts:
    return np.arange(-(-length // TILE))


def _overlap(starts: _Counts, length: int, tiles: _Counts) -> _Counts:
    """How many of the `length` places from each start lie in each tile, [starts, tiles]."""
    first = starts[:, None]
    shared: _Counts = np.minimum(first + length, (tiles + 1) * TILE) - np.maximum(first, tiles * TILE)
    return shared.clip(min=0)


def _ordered(tiles: npt.NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
    """Number of chosen tiles of every line, and all tiles of the line with the chosen ones first, int32."""
    order = np.argsort(~tiles, axis=-1, kind="stable")
    return torch.from_numpy(tiles.sum(-1, dtype=np.int32)), torch.from_numpy(order.astype(np.int32))
