"""Which examples share a row: planned from the lengths alone, and the order of an epoch by key.

Best fit, longest first: an example goes to the row with the least room that still holds it. (First fit, longest first, takes
the first such row; both fill alike, and this one finds its row in constant time.) Places are numbered from the longest
example to the shortest. What changes from epoch to epoch is which of the examples of equal length takes which place.

All of it is arrays of a few bytes an example, for data sets of tens of millions.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

_AT_A_TIME = 1 << 16  # lengths that are Python numbers at one time


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """Row r holds the places `flat[offsets[r] : offsets[r + 1]]`."""

    flat: npt.NDArray[np.int32]  # [places]
    offsets: npt.NDArray[np.int64]  # [rows + 1]

    def places(self, row: int) -> npt.NDArray[np.int32]:
        """The places of one row, longest first."""
        return self.flat[self.offsets[row] : self.offsets[row + 1]]


def plan_rows(lengths: npt.NDArray[np.int32], capacity: int, packing: Literal["documents", "none"]) -> RowPlan:
    """Best fit over `lengths` [places], which descend and are at most `capacity`."""
    if packing == "none":
        return RowPlan(flat=np.arange(len(lengths), dtype=np.int32), offsets=np.arange(len(lengths) + 1))
    shortest = int(lengths[-1]) if len(lengths) else 1
    rows_with_room: dict[int, list[int]] = {}
    rooms = 0  # bit n is set when some row has room for exactly n tokens
    row_of_place = np.empty(len(lengths), dtype=np.int32)
    num_rows = 0
    for first in range(0, len(lengths), _AT_A_TIME):
        for place, length in enumerate(lengths[first : first + _AT_A_TIME].tolist(), start=first):
            fitting = rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                row = rows_with_room[room].pop()
                if not rows_with_room[room]:
                    rooms ^= 1 << room
            else:
                room, row = capacity, num_rows
                num_rows += 1
            row_of_place[place] = row
            if room - length >= shortest:  # else nothing fits there any more
                rows_with_room.setdefault(room - length, []).append(row)
                rooms |= 1 << (room - length)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(row_of_place, minlength=num_rows))])
    return RowPlan(flat=np.argsort(row_of_place, kind="stable").astype(np.int32), offsets=offsets)


def hash_id(sample_id: str) -> int:
    """64 bits that stand for a sample id."""
    digest = hashlib.blake2b(sample_id.encode("utf-8", "surrogatepass"), digest_size=8, person=b"dflash-order").digest()
    return int.from_bytes(digest, "little")


def order_within_lengths(
    lengths: npt.NDArray[np.int32], hashes: npt.NDArray[np.uint64], seed: int, epoch: int
) -> npt.NDArray[np.int32]:
    """Which example takes which place [places]: by key among the examples of equal length; `lengths` descend."""
    order = np.empty(len(lengths), dtype=np.int32)
    edges = np.concatenate([[0], np.flatnonzero(np.diff(lengths)) + 1, [len(lengths)]])
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        order[start:stop] = start + np.argsort(epoch_keys(hashes[start:stop], seed, epoch), kind="stable")
    return order


def epoch_keys(hashes: npt.NDArray[np.uint64], seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    """Mix hashes [items] with (seed, epoch); the finalizer of splitmix64, which is a bijection: no new ties."""
    digest = hashlib.blake2b(f"{seed}\0{epoch}".encode(), digest_size=8, person=b"dflash-epoch").digest()
    x = hashes ^ np.uint64(int.from_bytes(digest, "little"))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
