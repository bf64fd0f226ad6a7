"""Laws of the draft tree: the best tree of its size, its order, its ancestors, the path that a target agrees with."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.config import MAX_BUDGET, ConfigError
from dflash.decoding import tree_cost
from dflash.decoding.tree import ROOT_TOKEN, DraftTree, Floats, Ints, build_tree
from dflash.decoding.tree_cost import heap_tree

Prefix = tuple[int, ...]


def marginals(
    rng: np.random.Generator, levels: int, vocabulary: int, *, ties: bool, sharpness: float = 2.0
) -> tuple[Floats, Ints]:
    """Log-probabilities [L, V], descending, and their tokens; with ties: of few and exact values."""
    shape = (levels, vocabulary)
    logits = rng.integers(0, 3, shape).astype(float) if ties else rng.normal(size=shape) * sharpness
    logs = -np.sort(-logits, axis=1)
    logs = logs - logs[:, :1] if ties else np.minimum(logs - np.log(np.exp(logs).sum(axis=1, keepdims=True)), 0)
    return logs, rng.permuted(np.tile(np.arange(vocabulary), (levels, 1)), axis=1)


def prefixes(tree: DraftTree) -> list[Prefix]:
    """The tokens on the path to each node, the root's first."""
    paths: list[Prefix] = [()]
    for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths


def all_weights(logs: Floats, tokens: Ints) -> dict[Prefix, float]:
    """Every possible prefix and its log-probability."""
    levels, count = logs.shape
    return {
        tuple(int(tokens[d, r]) for d, r in enumerate(ranks)): sum(float(logs[d, r]) for d, r in enumerate(ranks))
        for length in range(1, levels + 1)
        for ranks in itertools.product(range(count), repeat=length)
    }


def best_surrogate(weights: dict[Prefix, float], budget: int) -> float:
    """The largest sum of probabilities of any prefix-closed set of `budget` prefixes: all such sets are tried."""
    closed = {frozenset[Prefix]()}
    for _ in range(budget):
        closed = {held | {new} for held in closed for new in weights if new not in held and (len(new) == 1 or new[:-1] in held)}
    return max(sum(np.exp(weights[prefix]) for prefix in held) for held in closed)


@given(
    seed=st.integers(0, 10**6),
    levels=st.integers(1, 3),
    vocabulary=st.integers(1, 3),
    budget=st.integers(1, 5),
    ties=st.booleans(),
)
def test_no_prefix_closed_set_of_this_size_expects_more_accepted_drafts(
    seed: int, levels: int, vocabulary: int, budget: int, ties: bool
) -> None:
    logs, tokens = marginals(np.random.default_rng(seed), levels, vocabulary, ties=ties)
    weights = all_weights(logs, tokens)
    tree = build_tree(logs, tokens, budget)
    assert len(tree) - 1 == min(budget, len(weights))
    paths = prefixes(tree)
    assert len(set(paths)) == len(paths)
    np.testing.assert_allclose(tree.log_probabilities[1:], [weights[path] for path in paths[1:]], rtol=0, atol=1e-12)
    assert np.exp(tree.log_probabilities[1:]).sum() == pytest.approx(best_surrogate(weights, len(tree) - 1), abs=1e-12)


@given(
    seed=st.integers(0, 10**6),
    levels=st.integers(1, 9),
    vocabulary=st.integers(1, 60),
    budget=st.integers(1, 300),
    ties=st.booleans(),
    sharpness=st.sampled_from([0.01, 0.5, 2.0, 8.0]),
)
def test_nodes_and_their_order_are_those_of_a_best_first_heap(
    seed: int, levels: int, vocabulary: int, budget: int, ties: bool, sharpness: float
) -> None:
    """The heap pops by probability, depth, parent and rank: the order that the module states, ties included."""
    logs, tokens = marginals(np.random.default_rng(seed), levels, vocabulary, ties=ties, sharpness=sharpness)
    if ties:
        logs[:, vocabulary // 2 + 1 :] = -np.inf  # some tokens are impossible
    logs, tokens = logs[:, :budget], tokens[:, :budget]
    tree = build_tree(logs, tokens, budget)
    assert list(zip(tree.depths[1:], tree.parents[1:], tree.tokens[1:], tree.log_probabilities[1:], strict=True)) == heap_tree(
        logs, tokens, budget
    )


@given(seed=st.integers(0, 10**6), smaller=st.integers(1, 40), larger=st.integers(1, 40), ties=st.booleans())
def test_a_smaller_tree_is_the_beginning_of_a_larger_one(seed: int, smaller: int, larger: int, ties: bool) -> None:
    logs, tokens = marginals(np.random.default_rng(seed), 4, 12, ties=ties)
    smaller, larger = sorted((smaller, larger))
    assert prefixes(build_tree(logs, tokens, smaller)) == prefixes(build_tree(logs, tokens, larger))[: smaller + 1]


@given(seed=st.integers(0, 10**6), budget=st.integers(1, 60), length=st.integers(0, 9))
def test_ancestors_are_the_prefixes_of_a_node_and_itself(seed: int, budget: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    for tree in (build_tree(*marginals(rng, 5, 8, ties=False), budget), DraftTree.chain(rng.integers(0, 9, length))):
        paths = prefixes(tree)
        expected = [[path[: len(other)] == other for other in paths] for path in paths] if len(set(paths)) == len(paths) else None
        assert tree.ancestors.tolist() == expected
        assert tree.depths.tolist() == [len(path) for path in paths]


@given(seed=st.integers(0, 10**6), budget=st.integers(1, 40))
def test_the_walk_follows_the_target_as_far_as_the_tree_goes(seed: int, budget: int) -> None:
    """By look-up in the set of prefixes: extend by the target's token while the extended prefix is drafted."""
    rng = np.random.default_rng(seed)
    tree = build_tree(*marginals(rng, 4, 4, ties=True), budget)
    choices = rng.integers(0, 4, len(tree))
    paths = prefixes(tree)
    expected = [0]
    while (*paths[expected[-1]], int(choices[expected[-1]])) in paths:
        expected.append(paths.index((*paths[expected[-1]], int(choices[expected[-1]]))))
    assert tree.walk(choices) == expected


def test_a_chain_is_the_tree_of_one_path() -> None:
    tree = DraftTree.chain(np.array([7, 7, 3]))
    assert prefixes(tree) == [(), (7,), (7, 7), (7, 7, 3)]
    assert tree.walk(np.array([7, 7, 4, 9])) == [0, 1, 2]
    root = DraftTree.chain(np.empty(0, np.int64))
    assert (len(root), root.tokens.tolist(), root.walk(np.array([5]))) == (1, [ROOT_TOKEN], [0])


def test_a_certain_drafter_drafts_one_path_and_nothing_impossible() -> None:
    logs = np.array([[0.0, -np.inf, -np.inf]] * 3)
    tree = build_tree(logs, np.array([[4, 5, 6]] * 3), 100)
    assert prefixes(tree) == [(), (4,), (4, 4), (4, 4, 4)]


@pytest.mark.parametrize("budget", [0, -3, MAX_BUDGET + 1])
def test_a_budget_outside_its_limits_is_refused(budget: int) -> None:
    with pytest.raises(ConfigError, match=f"a tree budget is {budget}: use 1 to {MAX_BUDGET} nodes"):
        build_tree(np.zeros((2, 1)), np.zeros((2, 1), np.int64), budget)


def test_probabilities_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="are not numbers: check its weights"):
        build_tree(np.array([[-0.1, np.nan]]), np.array([[0, 1]]), 2)


def test_the_benchmark_compares_what_it_times(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--rounds", "2", "--vocabulary", "300", "--budget", "20"]
    assert tree_cost.main(small) == 0
    assert '"same_nodes": true' in capsys.readouterr().out
    monkeypatch.setattr(tree_cost, "build_tree", lambda logs, tokens, budget: build_tree(logs, tokens, budget - 1))
    assert tree_cost.main(small) == 1
    with pytest.raises(SystemExit, match="2"):
        tree_cost.main(["--budget", "0"])
