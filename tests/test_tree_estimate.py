"""Laws of the acceptance that one teacher-forced pass foretells: ranks and curves are those of building every tree."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash.decoding.acceptance import RoundStats, tau_block
from dflash.decoding.tree import build_tree
from dflash.modeling.tree_estimate import DraftCounts, count_drafts, prefix_ranks, top_marginals


def blocks(seed: int, count: int, levels: int, vocabulary: int, *, ties: bool) -> tuple[Tensor, Tensor]:
    """Logits [n, D, V], of few values with ties, and labels [n, D] that the drafter half knows."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, levels, vocabulary, generator=generator) * 3
    if ties:
        logits = logits.round().clamp(-1, 1)
    labels = torch.randint(vocabulary, (count, levels), generator=generator)
    known = torch.rand(count, levels, generator=generator) < 0.7
    return logits, torch.where(known, logits.argmax(-1), labels)


def drafted(logs: Tensor, tokens: Tensor, labels: Tensor, budget: int) -> int:
    """How many labels the tree of this budget drafts."""
    tree = build_tree(logs.numpy(), tokens.numpy(), budget)
    choices = np.append(labels.numpy(), -1)[tree.depths]
    return len(tree.walk(choices)) - 1


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    levels=st.integers(1, 5),
    vocabulary=st.integers(1, 12),
    budget=st.integers(1, 40),
    ties=st.booleans(),
)
def test_a_rank_is_the_smallest_budget_whose_tree_drafts_the_prefix(
    seed: int, levels: int, vocabulary: int, budget: int, ties: bool
) -> None:
    logits, labels = blocks(seed, 3, levels, vocabulary, ties=ties)
    logs, tokens = top_marginals(logits, budget)
    ranks = prefix_ranks(logs, tokens, labels, budget)
    for row in range(3):
        lengths = [drafted(logs[row], tokens[row], labels[row], size) for size in range(1, budget + 1)]
        expected = [
            next((size for size, length in enumerate(lengths, 1) if length >= depth), budget + 1)
            for depth in range(1, levels + 1)
        ]
        assert ranks[row].tolist() == expected


def test_the_whole_curve_is_that_of_trees_built_one_by_one_with_censored_labels() -> None:
    budget, levels = 50, 6
    logits, labels = blocks(5, 60, levels, 30, ties=False)
    supervised = torch.rand(60, levels, generator=torch.Generator().manual_seed(1)) < 0.9
    logs, tokens = top_marginals(logits, budget)
    counts = count_drafts(logs, tokens, labels, supervised, budget)
    known = supervised.long().cumprod(-1).sum(-1).tolist()

    def rounds(accepted: list[int]) -> list[RoundStats]:
        """As decoding would count them: a block whose labels end among its accepted drafts is cut there."""
        kept = [(a, k) for a, k in zip(accepted, known, strict=True) if k]
        return [RoundStats(levels, min(a, k), k if k <= a and k < levels else a + 1, k <= a and k < levels) for a, k in kept]

    curve = counts.tree_tau(range(1, budget + 1))
    for size in (1, 2, 3, 7, 20, budget):
        accepted = [drafted(logs[row], tokens[row], labels[row], size) for row in range(60)]
        assert curve[size - 1] == pytest.approx(tau_block([rounds(accepted)]))
    chain = [int((logits[row].argmax(-1) == labels[row]).long().cumprod(0).sum()) for row in range(60)]
    assert counts.chain_tau() == pytest.approx(tau_block([rounds(chain)]))
    assert curve == sorted(curve)
    assert curve[-1] > counts.chain_tau() > 1.5


def test_counts_of_pieces_add_up() -> None:
    logits, labels = blocks(2, 40, 4, 20, ties=True)
    supervised = torch.ones_like(labels, dtype=torch.bool)

    def counts(part: slice) -> DraftCounts:
        return count_drafts(*top_marginals(logits[part], 16), labels[part], supervised[part], 16)

    whole, pieces = counts(slice(None)), counts(slice(0, 13)) + counts(slice(13, 40))
    for name, tensor in vars(whole).items():
        assert torch.equal(tensor, vars(pieces)[name]), name


def test_nothing_supervised_is_none_and_an_uncounted_budget_an_error() -> None:
    logits, labels = blocks(2, 4, 3, 20, ties=False)
    counts = count_drafts(*top_marginals(logits, 8), labels, torch.zeros_like(labels, dtype=torch.bool), 8)
    assert (counts.chain_tau(), counts.tree_tau([8])) == (None, [None])
    with pytest.raises(ValueError, match=r"budgets \[0, 9\] were not counted: expected 1 to 8"):
        counts.tree_tau([0, 8, 9])


def test_marginals_are_the_likeliest_tokens_and_ties_stand_in_the_order_of_their_ids() -> None:
    logits = torch.tensor([[2.0, 5.0, 2.0, 5.0, 2.0, -9.0]]).to(torch.bfloat16)
    logs, tokens = top_marginals(logits, 5)
    assert tokens.tolist() == [[1, 3, 0, 2, 4]]
    torch.testing.assert_close(logs, logits.float().log_softmax(-1).gather(-1, tokens))
    assert top_marginals(logits, 100)[0].shape == (1, 6)
    many = top_marginals(torch.zeros(3, 800), 600)[1]
    assert torch.equal(many, many.sort(-1).values)
