"""What travels: from examples on disk to the statistics of a step.

Legend: R rows of a batch, S tokens of a row, N anchor slots of a row, B block size, K features, H hidden size.
Each field says who fills it and where it lives. Dataclasses are frozen: a stage makes a new object, it never edits one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Item = TypeVar("_Item", "TileLists", "PackedBatch", "TargetStates")


@dataclass(frozen=True, kw_only=True)
class Example:
    """One conversation. Filled by `dflash.data.examples`, on the CPU."""

    sample_id: str
    ids: npt.NDArray[np.int32]  # [tokens], prompt and answer as the target sees them
    loss_mask: npt.NDArray[np.bool_]  # [tokens], True exactly on the assistant's tokens


@dataclass(frozen=True, kw_only=True, order=True)
class Position:
    """Where a micro-batch stands in the stream of data; enough to start again at it."""

    epoch: int
    batch: int  # micro-batch number inside the epoch


@dataclass(frozen=True, kw_only=True)
class TileLists:
    """Tiles of 128 queries x 128 keys in which something is visible: what a flex BlockMask is made of, by its names.

    Filled by `dflash.modeling.tiles` on the CPU, moved with its batch. int32; Tq tiles of queries, Tk of keys; the first
    `num_blocks` of a line's indices count.
    """

    kv_num_blocks: Tensor  # [R, 1, Tq], partly visible
    kv_indices: Tensor  # [R, 1, Tq, Tk]
    full_kv_num_blocks: Tensor  # [R, 1, Tq], all visible
    full_kv_indices: Tensor  # [R, 1, Tq, Tk]
    q_num_blocks: Tensor  # [R, 1, Tk], the same by tiles of keys
    q_indices: Tensor  # [R, 1, Tk, Tq]
    full_q_num_blocks: Tensor  # [R, 1, Tk]
    full_q_indices: Tensor  # [R, 1, Tk, Tq]

    def to(self, device: torch.device) -> TileLists:
        """The same lists on `device`."""
        return _tensors_to(self, device)


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """One micro-batch of fixed shape. Filled by `dflash.data.packing` on the CPU, moved by the engine."""

    input_ids: Tensor  # [R, S] int64; padding holds the pad id
    positions: Tensor  # [R, S] int64, from 0 in every document (padding too)
    document_ids: Tensor  # [R, S] int64, number of the document in its row; -1 on padding
    loss_mask: Tensor  # [R, S] bool
    anchors: Tensor  # [R, N] int64, index in the row, ascending; unused slots hold 0 and come last
    anchor_valid: Tensor  # [R, N] bool
    sample_ids: tuple[tuple[str, ...], ...]  # R tuples, in the order of the document numbers
    index: int  # number of the micro-batch since the start of the run: orders queue and gradients
    position: Position
    num_tokens: int  # tokens that belong to a document; the rest of R*S is padding
    tiles: TileLists | None = None  # of the drafter's flex mask, where it has been made ahead

    @property
    def num_padding_tokens(self) -> int:
        """Slots of the batch that hold no document token."""
        return self.input_ids.numel() - self.num_tokens

    def summary(self) -> BatchSummary:
        """What remains of interest once the batch has been learned from."""
        return BatchSummary(
            index=self.index,
            num_tokens=self.num_tokens,
            num_padding_tokens=self.num_padding_tokens,
            sample_ids=self.sample_ids,
        )

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch with its tensors on `device` (copies do not block the host)."""
        moved = _tensors_to(self, device)
        return moved if self.tiles is None else dataclasses.replace(moved, tiles=self.tiles.to(device))


@dataclass(frozen=True, kw_only=True)
class BatchSummary:
    """What statistics tell about a micro-batch. Filled by the drafter that learned from it; holds no tensors."""

    index: int
    num_tokens: int
    num_padding_tokens: int
    sample_ids: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class TargetStates:
    """What the drafter learns from. Filled by a target worker on its device, which is done with it before it hands it over."""

    batch: PackedBatch
    features: Tensor  # [R, S, K*H], outputs of the selected layers side by side, ascending layer id
    final_hidden: Tensor | None = None  # [R, S, H] input of the target's head, only for the KL loss

    @property
    def nbytes(self) -> int:
        """Bytes of target output that the queue carries for this item."""
        tensors = [self.features] if self.final_hidden is None else [self.features, self.final_hidden]
        return sum(t.numel() * t.element_size() for t in tensors)

    def to(self, device: torch.device) -> TargetStates:
        """The same states on `device`."""
        moved = _tensors_to(self, device)
        return dataclasses.replace(moved, batch=self.batch.to(device))


@dataclass(frozen=True, kw_only=True)
class LossSums:
    """Sums over the blocks of a micro-batch; nothing is divided until all drafters have added theirs."""

    loss: Tensor  # scalar fp32, sum of weight * loss over supervised block positions (carries the gradient)
    weight: Tensor  # scalar fp32, sum of the weights
    correct: Tensor  # [B-1] fp32, supervised positions whose arg-max is the label
    counted: Tensor  # [B-1] fp32, supervised positions
    accepted: Tensor  # scalar fp32, sum over blocks of the accepted prefix length (bonus not included)
    blocks: Tensor  # scalar fp32, blocks with at least one supervised position

    def vector(self) -> Tensor:
        """All sums side by side, without their graph: fp32 [4 + 2*(B-1)]."""
        return torch.cat([getattr(self, f.name).detach().reshape(-1).float() for f in dataclasses.fields(self)])

    @classmethod
    def of_vector(cls, vector: Tensor) -> Self:
        """What `vector` made."""
        width = (len(vector) - 4) // 2
        names = [f.name for f in dataclasses.fields(cls)]
        parts = torch.split(vector, [width if name in ("correct", "counted") else 1 for name in names])
        return cls(**{n: part if n in ("correct", "counted") else part[0] for n, part in zip(names, parts, strict=True)})

    def detach(self) -> Self:
        """The same sums without their graph."""
        values = {f.name: getattr(self, f.name).detach() for f in dataclasses.fields(self)}
        return dataclasses.replace(self, **values)


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """One optimizer step as telemetry sees it. Filled by the leading drafter, plain Python numbers."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens: int
    padding_tokens: int
    seconds: float
    teacher_forced_acceptance: float  # 1 + accepted / blocks: bonus included, at most B
    accuracy: tuple[float | None, ...]  # per block position 1..B-1; None where nothing was supervised
    sample_ids: tuple[str, ...] = field(default=(), repr=False)


def _tensors_to(item: _Item, device: torch.device) -> _Item:
    moved = {
        f.name: getattr(item, f.name).to(device, non_blocking=True)
        for f in dataclasses.fields(item)
        if isinstance(getattr(item, f.name), Tensor)
    }
    return dataclasses.replace(item, **moved)
