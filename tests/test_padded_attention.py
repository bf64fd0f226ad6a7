"""Laws of attention with padded rows: the model computes what it always does, from one mask for all layers of a kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_data import tiny_target

from dflash.config import TargetConfig
from dflash.modeling.anatomy import text_config
from dflash.modeling.growing_cache import growing_cache
from dflash.modeling.padded_attention import additive, padded_attention
from dflash.modeling.target import load_target


def padded(model: Any) -> list[torch.Tensor]:
    """Logits of a padded prompt and of the token after it."""
    mask = torch.ones(3, 31, dtype=torch.int64)
    mask[0, :9] = mask[2, :25] = 0
    ids = torch.randint(0, 200, (3, 31), generator=torch.Generator().manual_seed(0))
    cache = growing_cache(model.config, 40)
    with torch.no_grad():
        first = model(input_ids=ids[:, :30], attention_mask=mask[:, :30], past_key_values=cache, use_cache=True).logits
        second = model(input_ids=ids[:, 30:], attention_mask=mask, past_key_values=cache, use_cache=True).logits
    return [first[mask[:, :30].bool()], second]


@pytest.mark.filterwarnings("ignore:.*past_key_values")
@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma3", "qwen3_moe", "qwen3_5"])
def test_a_padded_forward_computes_what_transformers_computes(name: str) -> None:
    model, _ = load_target(TargetConfig(path=f"random:{name}", dtype="float32"), device="cpu")
    expected = padded(model)
    with padded_attention(model):
        got = padded(model)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_all_layers_get_one_aligned_mask_of_numbers_and_none_without_padding() -> None:
    model = tiny_target()
    masks: list[Any] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda _m, _a, kw: masks.append(kw["attention_mask"]), with_kwargs=True)
    ids = torch.ones(2, 13, dtype=torch.int64)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with padded_attention(model), torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
        model(input_ids=ids)
    assert masks[0] is masks[1]
    assert masks[0].dtype == torch.float32
    assert all(stride % 8 == 0 for stride in masks[0].stride()[:-1])
    assert masks[2:] == [None, None]


def test_a_mask_is_added_to_scores_as_sdpa_would_read_it() -> None:
    visible = torch.tensor([[True, False, True]])
    assert additive(visible, torch.bfloat16).tolist() == [[0.0, -torch.inf, 0.0]]


def test_the_model_has_its_own_attention_back_after_the_block_and_any_other_is_left_alone() -> None:
    model = tiny_target()
    model.register_forward_pre_hook(lambda _m, _a: [][1 if text_config(model)._attn_implementation != "sdpa" else "sdpa"])
    with pytest.raises(IndexError), padded_attention(model):
        model(torch.ones(1, 1, dtype=torch.int64))
    assert text_config(model)._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    with padded_attention(model):
        assert text_config(model)._attn_implementation == "eager"
