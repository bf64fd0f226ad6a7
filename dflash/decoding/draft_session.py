"""The drafter during some requests decoded together: keys and values of the context, which grows by what the target accepts.

A row of padded tables for each request, with room that doubles when it runs out. With one request there is no padding and
the drafter needs no mask; with several, a block sees the first columns of its row and itself.

Legend: N requests, A new tokens of the request that got most, B block size, K features, H hidden size, V vocabulary,
g key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash.modeling.drafter import ContextPairs, Drafter
from dflash.modeling.target import FrozenEnds

_FIRST_ROOM = 256  # columns


class DraftSession:
    """The drafter of `requests` requests; on the drafter's device."""

    def __init__(self, drafter: Drafter, ends: FrozenEnds, requests: int) -> None:
        self._drafter = drafter
        self._ends = ends
        self._dtype, self._device = drafter.fc.weight.dtype, drafter.fc.weight.device
        self._context: ContextPairs = ()  # of each layer: keys and values, [N, g, columns, d]
        self.rows = list(range(requests))  # the requests that are still decoded, by their number in this session
        self.lengths = [0] * requests  # context tokens of each of them
        self.block_size = drafter.shape.block_size

    def extend(self, features: Tensor, counts: Sequence[int]) -> None:
        """Append to each request the first `counts[row]` tokens of `features` [N, A, K*H]."""
        lengths, offsets = torch.tensor(self.lengths, device=self._device), torch.arange(features.shape[1], device=self._device)
        new = self._drafter.project_context(features.to(self._dtype), lengths[:, None] + offsets)
        self._make_room(new, max(length + count for length, count in zip(self.lengths, counts, strict=True)))
        rows, tokens = (offsets < torch.tensor(counts, device=self._device)[:, None]).nonzero(as_tuple=True)
        columns = lengths[rows] + tokens
        for tables, pieces in zip(self._context, new, strict=True):
            for table, piece in zip(tables, pieces, strict=True):
                table[rows, :, columns] = piece[rows, :, tokens]
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def logits(self, bonuses: Sequence[int]) -> Tensor:
        """Logits [N, B-1, V] of the tokens after each bonus, which itself follows its context."""
        block = torch.full((len(bonuses), self.block_size), self._drafter.shape.mask_token_id, dtype=torch.int64)
        block[:, 0] = torch.tensor(bonuses)
        lengths, columns = torch.tensor(self.lengths, device=self._device), max(self.lengths)
        positions = lengths[:, None] + torch.arange(self.block_size, device=self._device)
        context = tuple((keys[:, :, :columns], values[:, :, :columns]) for keys, values in self._context)
        embeds = self._ends.embed(block.to(self._device)).to(self._dtype)
        hidden = self._drafter.block_forward(embeds, positions, context, self._mask(lengths, columns))
        return self._ends.logits(hidden[:, 1:])

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with some of the requests."""
        index = torch.tensor(rows, device=self._device)
        self._context = tuple((keys[index], values[index]) for keys, values in self._context)
        self.rows, self.lengths = [self.rows[row] for row in rows], [self.lengths[row] for row in rows]

    def _mask(self, lengths: Tensor, columns: int) -> Tensor | None:
        """[N, 1, B, columns + B] bool, True where visible; None if everything is."""
        if len(lengths) == 1:
            return None
        own = torch.arange(columns, device=self._device) < lengths[:, None]
        seen = torch.cat((own, own.new_ones(len(lengths), self.block_size)), dim=1)
        return seen[:, None, None].expand(-1, 1, self.block_size, -1)

    def _make_room(self, new: ContextPairs, columns: int) -> None:
        room = self._context[0][0].shape[2] if self._context else 0
        if columns <= room:
            return
        room = max(_FIRST_ROOM, columns, 2 * room)
        pairs = self._context or tuple((keys[:, :, :0], values[:, :, :0]) for keys, values in new)
        self._context = tuple((_wider(keys, room), _wider(values, room)) for keys, values in pairs)


def _wider(table: Tensor, columns: int) -> Tensor:
    """A copy with as many columns [N, g, columns, d]; the new ones are zero, as what is masked must be finite."""
    wide = table.new_zeros(*table.shape[:2], columns, table.shape[3])
    wide[:, :, : table.shape[2]] = table
    return wide
