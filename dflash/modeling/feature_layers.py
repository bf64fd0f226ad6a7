"""Which layers of the target give features (reference 1.1)."""

from __future__ import annotations

from dflash.config import ConfigError


def target_layer_ids(num_layers: int, num_features: int) -> tuple[int, ...]:
    """The default choice of K = num_features layers of a target with T = num_layers, 0-based and ascending.

    One feature is taken from the middle, more are spread evenly from layer 1 to layer T-3, rounded half to even
    (z-lab's rule, reference 1.1). Raises ConfigError when T is too small for K different layers.
    """
    if num_features < 1 or num_layers < 1:
        raise ConfigError(f"{num_features} features of {num_layers} target layers: use at least 1 of both")
    if num_features == 1:
        ids: tuple[int, ...] = (num_layers // 2,)
    else:
        step = (num_layers - 4) / (num_features - 1)
        ids = tuple(round(1 + i * step) for i in range(num_features))
    try:
        return check_layer_ids(ids, num_layers)
    except ConfigError as error:
        raise ConfigError(
            f"the rule gives layers {ids} for {num_features} features of a target with {num_layers} layers ({error}): "
            f"use fewer --drafter.num-features, or name --drafter.target-layer-ids"
        ) from None


def check_layer_ids(ids: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Return `ids`, or raise ConfigError when they are no ascending choice of layers below the last one.

    The last layer is refused because its output is reported after the final norm by some engines and before it by others.
    """
    if not ids or list(ids) != sorted(set(ids)):
        raise ConfigError(f"target layer ids are {ids}: expected at least one, ascending, none twice")
    if ids[0] < 0 or ids[-1] >= num_layers:
        raise ConfigError(
            f"target layer ids are {ids}: expected numbers from 0 to {num_layers - 2}, the target has {num_layers} layers"
        )
    if ids[-1] == num_layers - 1:
        raise ConfigError(
            f"target layer id {ids[-1]} is the last layer of the target: its output is ambiguous, use at most {num_layers - 2}"
        )
    return ids
