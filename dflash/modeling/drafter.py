"""The drafter: a few transformer layers whose keys and values also come from the target's features.

Legend: R rows, S context tokens, Q block tokens, K features, H hidden size, L draft layers, h heads, g key/value heads,
d size of a head, B block size, N anchor slots.

The features of the context are fused once (`fc`, `hidden_norm`) and projected to keys and values in every layer; context
tokens have no queries and no MLP. Training projects the whole row and gives a mask; decoding keeps the projections of
the context, appends those of new tokens, and needs no mask. Both run `project_context` and `block_forward`.
Parameter names are z-lab's (reference 1.7), because servers drop names they do not know without a word. The token
embedding and the head are the target's and not part of the drafter.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash.batch import PackedBatch
from dflash.modeling.attention import Mask, attend
from dflash.modeling.feature_layers import check_layer_ids, target_layer_ids
from dflash.modeling.rope import RotaryEmbedding, rotate
from dflash.modeling.shape import DrafterShape

__all__ = ["ContextPairs", "Drafter", "DrafterShape", "block_inputs", "check_layer_ids", "target_layer_ids"]

ContextPairs = tuple[tuple[Tensor, Tensor], ...]  # of each layer: keys (normed, rotated) and values, [R, g, S, d] each

INITIAL_DEVIATION = 0.02


class Matrix(nn.Linear):
    """A linear map without bias, and without values until the drafter draws them: torch would take them from global state."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Leave the weight as it was allocated."""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32 and returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Norm x [..., size]."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight.float()).to(x.dtype)


class Attention(nn.Module):
    """Block queries over the keys of context and block, which come from the same projections."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = Matrix(shape.hidden_size, queries)
        self.k_proj = Matrix(shape.hidden_size, keys)
        self.v_proj = Matrix(shape.hidden_size, keys)
        self.o_proj = Matrix(queries, shape.hidden_size)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def keys_and_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Project x [R, tokens, H] to keys (normed, rotated) and values (as projected), [R, g, tokens, d] each."""
        return rotate(self.k_norm(self._heads(self.k_proj(x))), cos, sin), self._heads(self.v_proj(x))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        """Attend from x [R, Q, H], giving [R, Q, H]; the context's keys stand before the block's."""
        q = rotate(self.q_norm(self._heads(self.q_proj(x))), cos, sin)
        own_keys, own_values = self.keys_and_values(x, cos, sin)
        k = torch.cat((context[0], own_keys), dim=2)
        v = torch.cat((context[1], own_values), dim=2)
        attended: Tensor = self.o_proj(attend(q, k, v, mask).transpose(1, 2).flatten(2))
        return attended

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = Matrix(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Matrix(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Matrix(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [R, Q, H] to [R, Q, H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm layer. Its input norm sees block tokens only: the context was normed once, for all layers."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        """Map x [R, Q, H] to [R, Q, H]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, context, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def with_context(
        self, x: Tensor, cos: Tensor, sin: Tensor, fused: Tensor, context_cos: Tensor, context_sin: Tensor, mask: Mask
    ) -> Tensor:
        """`forward`, with the context's keys and values computed here, from the fused features [R, S, H]."""
        context = self.self_attn.keys_and_values(fused, context_cos, context_sin)
        return Layer.forward(self, x, cos, sin, context, mask)


class Drafter(nn.Module):
    """The trained model. Weights are drawn from `generator` (on its device), or as if from seed 0: never from global state."""

    def __init__(self, shape: DrafterShape, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.fc = Matrix(shape.num_features * shape.hidden_size, shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.rotary = RotaryEmbedding(shape.rope_parameters, shape.head_dim, shape.max_position_embeddings)
        self.reset_parameters(generator or torch.Generator().manual_seed(0))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw matrices from N(0, 0.02) in the order of their names' definition; set norms to 1. Meta tensors stay empty."""
        for parameter in self.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            elif not parameter.is_meta:
                drawn = torch.empty(parameter.shape, device=generator.device).normal_(0.0, INITIAL_DEVIATION, generator=generator)
                parameter.copy_(drawn)

    def project_context(self, features: Tensor, positions: Tensor) -> ContextPairs:
        """What the layers need to know of context tokens; token by token, so pieces can be computed apart and joined.

        features [R, S, K*H] target outputs, ascending layer id; positions [R, S] int64 in the document. Returns L pairs
        of keys and values [R, g, S, d].
        """
        fused = self.hidden_norm(self.fc(features))
        cos, sin = self.rotary(positions)
        return tuple(layer.self_attn.keys_and_values(fused, cos, sin) for layer in self._own_layers())

    def block_forward(self, embeds: Tensor, positions: Tensor, context: ContextPairs, mask: Mask) -> Tensor:
        """Hidden states [R, Q, H] of block tokens after the final norm, ready for the target's head.

        embeds [R, Q, H] from the target's embedding; positions [R, Q] int64; context from `project_context`; mask over
        [context | block] keys, None when every query may see every key.
        """
        cos, sin = self.rotary(positions)
        x = embeds
        for layer, pair in zip(self._own_layers(), context, strict=True):
            x = layer(x, cos, sin, pair, mask)
        out: Tensor = self.norm(x)
        return out

    def _own_layers(self) -> list[Layer]:
        return cast("list[Layer]", list(self.layers))

    def forward(self, embeds: Tensor, block_positions: Tensor, features: Tensor, context_positions: Tensor, mask: Mask) -> Tensor:
        """The training step's forward: `project_context`, then `block_forward`. Returns [R, Q, H]."""
        return self.block_forward(embeds, block_positions, self.project_context(features, context_positions), mask)

    def forward_by_layers(
        self, embeds: Tensor, block_positions: Tensor, features: Tensor, context_positions: Tensor, mask: Mask
    ) -> Tensor:
        """`forward`, in an order in which each layer's weights are used at one time only."""
        fused = self.hidden_norm(self.fc(features))
        context_cos, context_sin = self.rotary(context_positions)
        cos, sin = self.rotary(block_positions)
        x = embeds
        for layer in self._own_layers():
            x = layer.with_context(x, cos, sin, fused, context_cos, context_sin, mask)
        out: Tensor = self.norm(x)
        return out


def block_inputs(batch: PackedBatch, mask_token_id: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Token ids and positions of all blocks, [R, N*B] int64 each, on the batch's device.

    A block is its anchor's token and B-1 masks, at positions p, p+1, ... where p is the anchor's position in its document.
    Unused slots hold masks only.
    """
    anchor_tokens = batch.input_ids.gather(1, batch.anchors)
    ids = torch.full((*batch.anchors.shape, block_size), mask_token_id, dtype=torch.int64, device=batch.input_ids.device)
    ids[:, :, 0] = torch.where(batch.anchor_valid, anchor_tokens, mask_token_id)
    offsets = torch.arange(block_size, device=batch.positions.device)
    positions = batch.positions.gather(1, batch.anchors).unsqueeze(-1) + offsets
    return ids.flatten(1), positions.flatten(1)
