"""Useful work: floating-point operations that a step or a forward pass cannot do without.

Each matmul counts 2mnk once forward, twice backward for trained weights (their gradient and their input's), once backward for
frozen weights or inputs without a gradient. Recomputation counts nothing. Attention counts the visible pairs only: two
matmuls forward, four backward. The head counts for positions that are trained, the B-1 drafts of every block.
"""

from __future__ import annotations

from typing import Any

from dflash.modeling.shape import DrafterShape


def drafter_step_tflop(shape: DrafterShape, *, context: int, anchors: int, visible_pairs: int) -> float:
    """TFLOP of forward and backward of one row; `visible_pairs` of queries and keys, over one head."""
    hidden, inner, head_dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_attention_heads * head_dim, shape.num_key_value_heads * head_dim
    block = anchors * shape.block_size
    fuse = 2 * context * shape.num_features * hidden * hidden
    of_layer = 2 * hidden * (2 * block * queries + 2 * (block + context) * keys + 3 * block * inner)
    attention = 2 * 2 * visible_pairs * queries
    head = 2 * anchors * (shape.block_size - 1) * hidden * shape.vocab_size
    return (2 * fuse + 3 * shape.num_layers * (of_layer + attention) + 2 * head) / 1e12


def target_forward_tflop(config: Any, *, layers: int, tokens: int) -> float:
    """TFLOP of `layers` layers of a dense transformers model over one causal row of `tokens`, without its head."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    weights = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    pairs = tokens * (tokens + 1) // 2
    return float(layers * (2 * tokens * weights + 2 * 2 * pairs * queries) / 1e12)
