"""Who sees whom in a training step: every block sees the context before its anchor, and itself.

Legend: R rows, S context tokens of a row, N anchor slots of a row, B block size, Q = N*B block tokens, T = S + N*B keys.
Keys are laid out as [S context tokens | block 0 | block 1 | ...], queries as [block 0 | block 1 | ...].

One predicate decides (reference 2.4); the dense mask and the flex mask are two ways to store its answer. A context token is
visible when it lies strictly before the anchor and in the anchor's document: at inference the target has not yet seen the
anchor's token, so no features exist there. Inside its own block a query sees everything. A slot without an anchor keeps its
own block, because a row of a softmax that sees nothing is NaN in some kernels and a NaN times zero is still NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dflash.batch import PackedBatch, TileLists
from dflash.modeling.tiles import TILE, lists_of

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class BlockLayout:
    """Where the blocks of a micro-batch hang in their rows. All tensors live on one device."""

    anchors: Tensor  # [R, N] int64, index in the row; anything in unused slots
    anchor_valid: Tensor  # [R, N] bool
    document_ids: Tensor  # [R, S] int64, -1 on padding
    block_size: int  # B, the anchor included
    tiles: TileLists | None = None  # made ahead for this layout

    @classmethod
    def of(cls, batch: PackedBatch, block_size: int) -> BlockLayout:
        """The layout of a packed batch, on the batch's device. Tiles that it carries are of the run's one block size."""
        return cls(batch.anchors, batch.anchor_valid, batch.document_ids, block_size, batch.tiles)

    def to(self, device: torch.device | str) -> BlockLayout:
        """The same layout on `device`."""
        device = torch.device(device)
        tiles = None if self.tiles is None else self.tiles.to(device)
        moved = self.anchors.to(device), self.anchor_valid.to(device), self.document_ids.to(device)
        return BlockLayout(*moved, self.block_size, tiles)

    @property
    def num_queries(self) -> int:
        """Q = N*B block tokens of a row."""
        return self.anchors.shape[1] * self.block_size

    @property
    def num_keys(self) -> int:
        """S + N*B keys of a row."""
        return self.document_ids.shape[1] + self.num_queries


def predicate(layout: BlockLayout) -> MaskMod:
    """The rule as a flex `mask_mod(row, head, query, key)` -> bool tensor of the broadcast shape of its arguments.

    Indices past the last query or key are allowed (flex rounds lengths up to tiles): such a pair is not visible.
    """
    num_context = layout.document_ids.shape[1]
    num_slots, block_size = layout.anchors.shape[1], layout.block_size
    document_ids = layout.document_ids
    anchor_document = document_ids.gather(1, layout.anchors.clamp(0, num_context - 1))
    has_context = layout.anchor_valid & (anchor_document >= 0)
    context_end = torch.where(has_context, layout.anchors, 0)

    def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001 - flex passes the head
        slot = query // block_size
        known_slot = slot.clamp(max=num_slots - 1)
        token = key.clamp(max=num_context - 1)
        in_document = document_ids[row, token] == anchor_document[row, known_slot]
        context = (key < num_context) & (key < context_end[row, known_slot]) & in_document
        own_block = (key >= num_context) & ((key - num_context) // block_size == slot)
        return (context | own_block) & (slot < num_slots)

    return mask_mod


def dense_mask(layout: BlockLayout) -> Tensor:
    """The predicate as a bool tensor [R, 1, N*B, S+N*B], True where visible; for scaled_dot_product_attention."""
    device = layout.document_ids.device
    row = torch.arange(layout.document_ids.shape[0], device=device).view(-1, 1, 1, 1)
    head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    query = torch.arange(layout.num_queries, device=device).view(1, 1, -1, 1)
    key = torch.arange(layout.num_keys, device=device).view(1, 1, 1, -1)
    return predicate(layout)(row, head, query, key)


def flex_mask(layout: BlockLayout) -> BlockMask:
    """The predicate as a BlockMask of 128 x 128 tiles, the same for all heads; for flex_attention.

    Equal to torch's create_block_mask(predicate(layout)), which evaluates all Q * T pairs (100 million for a row of 4096
    tokens and 512 anchors of 16). Lists that the layout lacks are made here, on the CPU, which waits for the layout's device.
    """
    tiles = layout.tiles or lists_of(
        layout.anchors.cpu().numpy(), layout.anchor_valid.cpu().numpy(), layout.document_ids.cpu().numpy(), layout.block_size
    ).to(layout.anchors.device)
    return BlockMask(
        seq_lengths=(layout.num_queries, layout.num_keys),
        **{f.name: getattr(tiles, f.name) for f in dataclasses.fields(tiles)},
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=predicate(layout),
    )
