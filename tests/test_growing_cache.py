"""Laws of the KV cache that is written in place: it holds what concatenation would hold, and seldom copies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dflash.config import TargetConfig
from dflash.modeling.growing_cache import GrowingLayer, growing_cache
from dflash.modeling.target import load_target


def states(rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 2, tokens, 4), torch.randn(rows, 2, tokens, 3)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 40), st.just("drop"), st.just("crop")), min_size=1, max_size=12), st.integers(1, 60))
def test_a_growing_layer_holds_what_a_concatenating_one_holds(moves: list[int | str], most: int) -> None:
    ours, reference, rows = GrowingLayer(most), DynamicLayer(), 5
    for move in moves:
        if isinstance(move, int):
            new = states(rows, move)
            for got, expected in zip(ours.update(*new), reference.update(*new), strict=True):
                assert torch.equal(got, expected)
        elif move == "crop" and reference.get_seq_length() > 2:
            ours.crop(-2)
            reference.crop(-2)
        elif move == "drop" and rows > 1 and reference.is_initialized:
            rows -= 1
            kept = torch.randperm(rows + 1)[:rows]
            ours.reorder_cache(kept)
            reference.reorder_cache(kept)
        assert ours.get_seq_length() == reference.get_seq_length()
        assert ours.get_mask_sizes(1) == reference.get_mask_sizes(1)


def test_tokens_are_written_in_place_and_at_most_a_quarter_is_spare() -> None:
    layer = GrowingLayer(max_tokens=1000)
    layer.update(*states(2, 100))
    places, copied = [], 0
    for _ in range(900):
        layer.update(*states(2, 1))
        places.append(layer.keys.data_ptr())
        room, filled = (layer.keys.stride(1) // layer.keys.shape[-1], layer.keys.shape[2])
        assert filled <= room <= min(1000, filled * 5 // 4 + 1)
        copied += filled if len(places) > 1 and places[-1] != places[-2] else 0
    assert len(set(places)) <= 12
    assert copied < 5 * 1000


def test_a_layer_goes_on_beyond_the_tokens_it_was_told_of() -> None:
    layer = GrowingLayer(max_tokens=3)
    new = [states(1, 2) for _ in range(4)]
    for one in new:
        keys, values = layer.update(*one)
    assert torch.equal(keys, torch.cat([k for k, _ in new], dim=2))
    assert torch.equal(values, torch.cat([v for _, v in new], dim=2))


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "qwen3_5"])
def test_only_plain_layers_are_written_in_place(name: str) -> None:
    model, _ = load_target(TargetConfig(path=f"random:{name}", dtype="float32"), device="cpu")
    own = DynamicCache(config=model.config).layers
    ours = growing_cache(model.config, 10).layers
    assert [type(layer) for layer in ours] == [GrowingLayer if type(layer) is DynamicLayer else type(layer) for layer in own]
    assert any(type(layer) is GrowingLayer for layer in ours)
