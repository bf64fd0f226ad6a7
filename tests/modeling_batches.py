"""Random micro-batches and tiny drafters that the tests of dflash.modeling share."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from dflash.batch import PackedBatch, Position
from dflash.modeling.drafter import Drafter, DrafterShape

MASK = 511


def packed_batch(
    documents: list[list[int]], *, length: int, anchors: list[list[int]], num_anchors: int, seed: int = 0, vocabulary: int = 500
) -> PackedBatch:
    """Rows of documents (their lengths, padding behind) with random tokens, all supervised, and the given anchors."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(documents)
    document_ids = torch.full((rows, length), -1)
    positions = torch.zeros(rows, length, dtype=torch.int64)
    for row, lengths in enumerate(documents):
        start = 0
        for number, tokens in enumerate([*lengths, length - sum(lengths)]):
            positions[row, start : start + tokens] = torch.arange(tokens)
            if number < len(lengths):
                document_ids[row, start : start + tokens] = number
            start += tokens
    slots = torch.zeros(rows, num_anchors, dtype=torch.int64)
    valid = torch.zeros(rows, num_anchors, dtype=torch.bool)
    for row, chosen in enumerate(anchors):
        slots[row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
        valid[row, : len(chosen)] = True
    return PackedBatch(
        input_ids=torch.randint(0, vocabulary, (rows, length), generator=generator),
        positions=positions,
        document_ids=document_ids,
        loss_mask=document_ids >= 0,
        anchors=slots,
        anchor_valid=valid,
        sample_ids=tuple(tuple(f"{row}-{number}" for number in range(len(lengths))) for row, lengths in enumerate(documents)),
        index=0,
        position=Position(epoch=0, batch=0),
        num_tokens=sum(map(sum, documents)),
    )


def tiny_shape(**changes: Any) -> DrafterShape:
    shape = DrafterShape(
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_features=3,
        block_size=4,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        mask_token_id=MASK,
        target_layer_ids=(1, 3, 5),
        num_target_layers=8,
        vocab_size=512,
        max_position_embeddings=1024,
    )
    return dataclasses.replace(shape, **changes)


def lively_drafter(shape: DrafterShape, seed: int = 0) -> Drafter:
    """A drafter whose weights are large enough for attention to be far from uniform, and whose norms are not all 1."""
    generator = torch.Generator().manual_seed(seed)
    drafter = Drafter(shape, generator=generator)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.mul_(8)
    return drafter


def random_tensor(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))
