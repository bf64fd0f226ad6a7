"""Laws of a drafter's shape: what it takes from target and configuration, what it refuses, and the form it is released in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from modeling_batches import MASK, tiny_shape

from dflash import events
from dflash.config import ConfigError, DrafterConfig
from dflash.modeling.drafter import DrafterShape, target_layer_ids
from dflash.modeling.feature_layers import check_layer_ids
from dflash.modeling.random_targets import RANDOM_TARGETS

TABLE = {  # reference 1.1, K = 5; 61 and 62 layers round halves to even
    24: (1, 6, 11, 16, 21),
    28: (1, 7, 13, 19, 25),
    32: (1, 8, 15, 22, 29),
    36: (1, 9, 17, 25, 33),
    40: (1, 10, 19, 28, 37),
    48: (1, 12, 23, 34, 45),
    61: (1, 15, 30, 44, 58),
    62: (1, 16, 30, 44, 59),
    64: (1, 16, 31, 46, 61),
    80: (1, 20, 39, 58, 77),
    94: (1, 24, 46, 68, 91),
}


@pytest.mark.parametrize(("layers", "ids"), TABLE.items())
def test_target_layers_follow_the_table_of_the_reference(layers: int, ids: tuple[int, ...]) -> None:
    assert target_layer_ids(layers, 5) == ids


def test_one_feature_comes_from_the_middle() -> None:
    assert target_layer_ids(36, 1) == (18,)


@given(st.integers(1, 100) | st.integers(1, 6), st.integers(1, 12) | st.just(1))
@settings(deadline=None)
def test_the_rule_gives_valid_layers_or_says_which_flag_to_change(layers: int, features: int) -> None:
    if layers < (features + 3 if features > 1 else 3):
        with pytest.raises(ConfigError, match=r"--drafter\.num-features"):
            target_layer_ids(layers, features)
    else:
        ids = target_layer_ids(layers, features)
        assert len(ids) == features
        assert check_layer_ids(ids, layers) == ids


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ((), "at least one"),
        ((3, 2), "ascending"),
        ((2, 2), "ascending"),
        ((-1, 2), "from 0"),
        ((1, 8), "from 0"),
        ((1, 7), "last layer"),
    ],
)
def test_layer_ids_that_no_server_would_read_are_refused(ids: tuple[int, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_layer_ids(ids, 8)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_attention_heads": 3}, "multiple"),
        ({"head_dim": 15}, "even"),
        ({"block_size": 1}, "at least 2"),
        ({"mask_token_id": 512}, "mask-token-id"),
        ({"eos_token_id": (2, MASK)}, "bos, eos or pad"),
        ({"pad_token_id": MASK}, "bos, eos or pad"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_features": 2}, "2 features"),
        ({"target_layer_ids": (1, 3, 7)}, "last layer"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "whole heads"),
    ],
)
def test_a_shape_that_cannot_work_is_refused_with_what_to_change(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        tiny_shape(**changes)


@pytest.mark.parametrize("name", RANDOM_TARGETS)
def test_shape_takes_from_the_target_what_is_not_configured(name: str) -> None:
    target = RANDOM_TARGETS[name]()
    shape = DrafterShape.from_target(target, DrafterConfig(block_size=8, num_layers=3, intermediate_size=100), 77)
    for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "vocab_size"):
        assert getattr(shape, key) == getattr(target, key)
    assert (shape.block_size, shape.num_layers, shape.intermediate_size, shape.mask_token_id) == (8, 3, 100, 77)
    assert shape.num_target_layers == target.num_hidden_layers
    assert shape.target_layer_ids == target_layer_ids(target.num_hidden_layers, 5)


def test_explicit_layers_win_over_the_rule() -> None:
    shape = DrafterShape.from_target(RANDOM_TARGETS["qwen3"](), DrafterConfig(target_layer_ids=(0, 6)), 77)
    assert (shape.target_layer_ids, shape.num_features) == ((0, 6), 2)


def test_a_size_that_the_target_lacks_is_asked_for() -> None:
    target = SimpleNamespace(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=8)
    with pytest.raises(ConfigError, match=r"--drafter\.intermediate-size"):
        DrafterShape.from_target(target, DrafterConfig(), 77)


def test_rope_is_the_targets_and_for_gemma3_that_of_full_attention() -> None:
    thetas = {
        name: DrafterShape.from_target(RANDOM_TARGETS[name](), DrafterConfig(), 77).rope_parameters["rope_theta"]
        for name in RANDOM_TARGETS
    }
    real_sizes = {"qwen3-8b": 1e6, "qwen3-32b": 1e6}
    assert thetas == {"qwen3": 1e6, "llama": 5e5, "qwen3_moe": 1e6, "gemma3": 1e6, "qwen3_5": 1e7, **real_sizes}


def test_a_partial_rotary_factor_of_the_target_is_not_taken_over_silently() -> None:
    seen: list[events.Event] = []
    with events.subscribed(seen.append):
        rope = DrafterShape.from_target(RANDOM_TARGETS["qwen3_5"](), DrafterConfig(), 77).rope_parameters
    assert rope == {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 1.0}
    assert [event.fields["target_partial_rotary_factor"] for event in seen if event.name == "modeling.rope"] == [0.25]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"eos_token_id": (1, 2), "bos_token_id": 3, "pad_token_id": 0},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 1.0}},
    ],
)
def test_shape_survives_the_released_config(changes: dict[str, Any]) -> None:
    shape = tiny_shape(**changes)
    assert DrafterShape.from_zlab_config(shape.to_zlab_config()) == shape


@pytest.mark.parametrize("place", ["top", "inner"])
def test_block_size_is_read_from_either_place(place: str) -> None:
    values = tiny_shape().to_zlab_config()
    del (values if place == "top" else values["dflash_config"])["block_size"]
    assert DrafterShape.from_zlab_config(values).block_size == 4


def test_rope_is_read_from_the_old_place() -> None:
    shape = tiny_shape(rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0})
    values = shape.to_zlab_config()
    del values["rope_parameters"]
    assert DrafterShape.from_zlab_config(values).rope_parameters == shape.rope_parameters
    values["rope_scaling"] = {"type": "linear", "factor": 4.0}
    assert DrafterShape.from_zlab_config(values).rope_parameters == shape.rope_parameters
