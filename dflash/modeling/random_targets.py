"""Configurations of targets with random weights: one tiny model of each family, and two real sizes for measuring.

The tiny ones have 8 layers, so that the default rule finds 5 different ones, and windows, experts and linear layers small
enough to matter in a text of a few dozen tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import Gemma3TextConfig, LlamaConfig, Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig

_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def _qwen3() -> Qwen3Config:
    return Qwen3Config(**_TINY, rope_parameters=_rope(1_000_000.0), max_window_layers=8, tie_word_embeddings=True)


def _llama() -> LlamaConfig:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    return LlamaConfig(**_TINY, rope_parameters=rope, tie_word_embeddings=False)


def _qwen3_moe() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        **_TINY,
        rope_parameters=_rope(1_000_000.0),
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )


def _gemma3() -> Gemma3TextConfig:
    return Gemma3TextConfig(
        **_TINY,
        query_pre_attn_scalar=16,
        sliding_window=8,
        layer_types=["full_attention" if (i + 1) % 4 == 0 else "sliding_attention" for i in range(8)],
        final_logit_softcapping=30.0,
        rope_parameters={"sliding_attention": _rope(10_000.0), "full_attention": _rope(1_000_000.0)},
    )


def _qwen3_5() -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        **_TINY,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        rope_parameters={
            **_rope(10_000_000.0), "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0], "mrope_interleaved": True,
        },
    )  # fmt: skip


def _qwen3_dense(*, hidden_size: int, intermediate_size: int, num_hidden_layers: int, num_attention_heads: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rms_norm_eps=1e-6,
        rope_parameters=_rope(1_000_000.0),
        max_window_layers=num_hidden_layers,
        tie_word_embeddings=False,
        bos_token_id=151_643,
        eos_token_id=151_645,
    )


def _qwen3_8b() -> Qwen3Config:
    return _qwen3_dense(hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32)


def _qwen3_32b() -> Qwen3Config:
    return _qwen3_dense(hidden_size=5120, intermediate_size=25_600, num_hidden_layers=64, num_attention_heads=64)


RANDOM_TARGETS: dict[str, Callable[[], Any]] = {
    "qwen3": _qwen3,
    "llama": _llama,
    "qwen3_moe": _qwen3_moe,
    "gemma3": _gemma3,
    "qwen3_5": _qwen3_5,
    "qwen3-8b": _qwen3_8b,
    "qwen3-32b": _qwen3_32b,
}
