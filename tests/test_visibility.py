"""The law of who sees whom when trees are verified, by a loop over queries and keys."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash.decoding.tree import build_tree
from dflash.decoding.visibility import additive, visible


@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    budget=st.integers(1, 8),
    window=st.none() | st.integers(1, 6),
)
def test_a_node_sees_its_own_tokens_its_ancestors_and_itself_within_the_window(
    seed: int, lengths: list[int], budget: int, window: int | None
) -> None:
    rng = np.random.default_rng(seed)
    columns = max(lengths)
    logs = -np.sort(rng.random((3, 4)))
    trees = [build_tree(logs, rng.permuted(np.tile(np.arange(4), (3, 1)), axis=1), budget) for _ in lengths]
    positions = np.array([length + tree.depths for length, tree in zip(lengths, trees, strict=True)])
    ancestors = torch.from_numpy(np.array([tree.ancestors for tree in trees]))
    found = visible(torch.tensor(lengths), columns, torch.from_numpy(positions), ancestors, window)
    for row, (length, tree) in enumerate(zip(lengths, trees, strict=True)):
        for node in range(len(tree)):
            path = [node]
            while path[-1]:
                path.append(int(tree.parents[path[-1]]))
            for key in range(columns + len(tree)):
                own = key < length
                position = key if own else length + int(tree.depths[key - columns]) if key >= columns else -1
                near = window is None or length + int(tree.depths[node]) - position < window
                assert found[row, node, key].item() == ((own or key - columns in path) and near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_is_zero_where_visible_and_finite_everywhere(dtype: torch.dtype) -> None:
    seen = torch.tensor([[[True, False], [False, False]]])
    mask = additive(seen, dtype)
    assert mask.tolist() == [[[[0.0, torch.finfo(dtype).min], [torch.finfo(dtype).min] * 2]]]
    assert mask.dtype == dtype
