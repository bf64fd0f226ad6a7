"""Laws of decoding with draft trees and of decoding several requests together: the tokens are those of plain decoding.

Untrained drafters put wrong trees on trial; drafters that know the target's words, but not always best, make trees accept
deep paths through nodes that do not stand in a row, so that a wrong compaction of keys, values or features shows.
"""

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from helpers_decoding import MASK, VOCABULARY, build, drafter_for, knowing, prompt_of, sharp_drafter, target
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import Qwen3Config

from dflash.config import MAX_BUDGET, ConfigError, DrafterConfig
from dflash.decoding import rounds
from dflash.decoding.chain import plain, speculate
from dflash.decoding.draft_session import DraftSession
from dflash.decoding.rounds import Drafting, Generation, Wanted, decode, propose
from dflash.modeling.drafter import Drafter, DrafterShape
from dflash.modeling.target import FrozenEnds

BLOCK = 5
# Derandomised: float32 may round many tokens at once otherwise than one at a time, so near ties must not depend on the day.
exact = functools.partial(settings, derandomize=True, deadline=None, database=None)


def drafting(family: str, budget: int | None, block_size: int = BLOCK) -> Drafting:
    return Drafting(drafter=drafter_for(family, block_size), ends=target(family)[1], budget=budget)


def until_end(tokens: tuple[int, ...], eos: tuple[int, ...], count: int) -> tuple[int, ...]:
    tokens = tokens[:count]
    return tokens[: tokens.index(eos[0]) + 1] if eos and eos[0] in tokens else tokens


# Trees of one request and of several


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "llama"])
@exact(max_examples=8)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    budget=st.none() | st.sampled_from([1, 3, 17, 60]),
    max_new_tokens=st.integers(1, 13),
    end=st.none() | st.integers(0, 12),
    temperature=st.sampled_from([0.0, 0.0, 0.8]),
    knows=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_request_decodes_to_the_tokens_of_plain_decoding_alone(
    family: str,
    lengths: list[int],
    budget: int | None,
    max_new_tokens: int,
    end: int | None,
    temperature: float,
    knows: bool,
    seed: int,
) -> None:
    """End tokens and the token limit fall anywhere in blocks and trees; requests end at different times."""
    model, _ = target(family)
    prompts = [prompt_of(length, seed + i) for i, length in enumerate(lengths)]
    key = {"temperature": temperature, "seed": seed}
    free = [plain(model, p, max_new_tokens=13 + BLOCK, request=i, **key).tokens for i, p in enumerate(prompts)]
    eos = () if end is None else (free[0][end],)
    wanted = Wanted(max_new_tokens=max_new_tokens, eos_ids=eos, **key)
    if knows:
        with knowing(prompts, free, errors=0.5, seed=seed):
            got = decode(model, prompts, wanted, drafting=drafting(family, budget))
    else:
        got = decode(model, prompts, wanted, drafting=drafting(family, budget))
    for generation, tokens in zip(got, free, strict=True):
        assert generation.tokens == until_end(tokens, eos, max_new_tokens)
        assert generation.target_forwards == 1 + len(generation.rounds)
        assert len(generation.tokens) == 1 + sum(r.committed for r in generation.rounds)
        assert all(r.drafted == BLOCK - 1 for r in generation.rounds)
    assert [g.tokens for g in decode(model, prompts, wanted)] == [g.tokens for g in got]


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_trees_accept_deep_paths_and_more_than_chains(family: str) -> None:
    """The drafter knows every token but ranks it first half of the time: a tree finds it, a chain gives up."""
    model, _ = target(family)
    prompts = [prompt_of(length, length) for length in (3, 18)]
    free = [plain(model, prompt, max_new_tokens=60).tokens for prompt in prompts]
    found = {}
    for budget in (None, 120):
        with knowing(prompts, free, errors=0.5, seed=2):
            found[budget] = decode(model, prompts, Wanted(max_new_tokens=50), drafting=drafting(family, budget, 6))
        assert [g.tokens for g in found[budget]] == [tokens[:50] for tokens in free]
    accepted = {budget: [r.accepted for g in got for r in g.rounds] for budget, got in found.items()}
    assert max(accepted[120]) == 5
    assert np.mean(accepted[120]) > 2.5
    assert np.mean(accepted[None]) < 1.5


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_after_accepted_branches_cache_and_context_are_those_of_a_fresh_start(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter's hidden states over the features that were kept, against full forwards without cache or padding."""
    model, ends = target(family)
    prompts = [prompt_of(4, 1), prompt_of(15, 2)]
    free = [plain(model, prompt, max_new_tokens=40).tokens for prompt in prompts]
    hidden: list[Any] = []
    original, checked = Drafter.block_forward, 0
    monkeypatch.setattr(Drafter, "block_forward", lambda *a: hidden.append(original(*a)) or hidden[-1])
    real = DraftSession.logits
    with knowing(prompts, free, errors=0.6, seed=4), pytest.MonkeyPatch.context() as inner:
        known = DraftSession.logits

        def both(session: DraftSession, bonuses: list[int]) -> torch.Tensor:
            nonlocal checked
            real(session, bonuses)
            for row, (number, length) in enumerate(zip(session.rows, session.lengths, strict=True)):
                context = [*prompts[number], *free[number]][:length]
                states = model(input_ids=torch.tensor([context]), output_hidden_states=True, use_cache=False).hidden_states
                features = torch.cat([states[layer + 1] for layer in drafter.shape.target_layer_ids], dim=-1)
                block = torch.tensor([[bonuses[row]] + [MASK] * (BLOCK - 1)])
                positions = torch.arange(length + BLOCK)[None]
                fresh = original(
                    drafter,
                    ends.embed(block),
                    positions[:, length:],
                    drafter.project_context(features, positions[:, :length]),
                    None,
                )
                torch.testing.assert_close(hidden[-1][row : row + 1], fresh, rtol=1e-4, atol=1e-4)
                checked += 1
            return known(session, bonuses)

        inner.setattr(DraftSession, "logits", both)
        drafter = drafter_for(family, BLOCK)
        got = decode(model, prompts, Wanted(max_new_tokens=20), drafting=drafting(family, 40))
    assert checked == sum(len(g.rounds) for g in got) > 8
    assert len({r.committed for g in got for r in g.rounds}) > 2


def test_trees_of_equal_probabilities_are_lossless_and_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens tie at every position; then two at each, of which one is right."""
    model, _ = target("qwen3")
    prompt = prompt_of(6)
    free = plain(model, prompt, max_new_tokens=40).tokens

    def ties(session: DraftSession, bonuses: list[int], *, only: bool) -> torch.Tensor:
        made = torch.zeros(len(bonuses), BLOCK - 1, VOCABULARY)
        index = session.lengths[0] - len(prompt)
        for k, token in enumerate(free[index + 1 : index + BLOCK]) if only else ():
            made[0, k, [token, (token + 7) % VOCABULARY]] = 5.0
        return made

    for only, budget, accepted in ((False, 50, 1), (True, 30, BLOCK - 1)):
        monkeypatch.setattr(DraftSession, "logits", functools.partialmethod(ties, only=only))
        got, again = (speculate(model, *_parts("qwen3"), prompt, max_new_tokens=20, budget=budget) for _ in range(2))
        assert got.tokens == again.tokens == free[:20]
        assert got.rounds == again.rounds
        assert max(r.accepted for r in got.rounds) == accepted


def _parts(family: str) -> tuple[FrozenEnds, Drafter]:
    return target(family)[1], drafter_for(family, BLOCK)


def test_the_chain_is_the_tree_of_the_likeliest_tokens_when_it_is_certain() -> None:
    logits = torch.randn(2, 4, 30, generator=torch.Generator().manual_seed(0)) * 50
    chains, trees = propose(logits, None), propose(logits, 4)
    for chain, tree in zip(chains, trees, strict=True):
        assert (chain.tokens.tolist(), chain.parents.tolist()) == (tree.tokens.tolist(), tree.parents.tolist())


def test_a_budget_above_all_prefixes_drafts_them_all_and_stays_lossless() -> None:
    model, ends, drafter = _three_words()
    prompt = [0, 2, 1]
    free = plain(model, prompt, max_new_tokens=12).tokens
    got = speculate(model, ends, drafter, prompt, max_new_tokens=12, budget=1000)
    assert got.tokens == free
    assert {r.accepted for r in got.rounds if not r.truncated} == {2}, "every path of two tokens is in the tree"


# Sampling


@pytest.mark.parametrize("budget", [None, 3])
def test_sampled_tokens_have_the_exact_joint_distribution(budget: int | None) -> None:
    """First three tokens of 1000 requests against the product of the target's conditional probabilities.

    27 cells of at least 10 expected requests each; the bound is the 99.9 % quantile of chi-square with 26 degrees of freedom.
    """
    model, ends, drafter = _three_words()
    prompt, temperature, count = [0, 2, 1], 2.5, 1000
    wanted = Wanted(max_new_tokens=3, temperature=temperature, seed=21)
    parts = Drafting(drafter=drafter, ends=ends, budget=budget)
    got: list[Generation] = []
    for first in range(0, count, 250):
        got += decode(model, [prompt] * 250, wanted, drafting=parts, requests=range(first, first + 250))
    accepted = [g.rounds[0].accepted for g in got]
    assert 0.1 * count < sum(a > 0 for a in accepted) < 0.9 * count, "both accepted and rejected drafts are on trial"
    cells = list(itertools.product(range(3), repeat=3))
    logits = model(input_ids=torch.tensor([[*prompt, *cell] for cell in cells])).logits.double()[:, len(prompt) - 1 : -1]
    conditional = torch.softmax(logits / temperature, dim=-1)
    exact_probability = conditional.gather(-1, torch.tensor(cells)[..., None]).prod(dim=1).squeeze(-1).numpy()
    found = np.array([sum(g.tokens == cell for g in got) for cell in cells])
    assert exact_probability.min() * count >= 10
    assert stats.chisquare(found, exact_probability * count).statistic < stats.chi2.ppf(0.999, len(cells) - 1)


@functools.cache
def _three_words() -> tuple[Any, FrozenEnds, Drafter]:
    config = Qwen3Config(
        vocab_size=3,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
    )
    model = build(config, seed=1)
    shape = DrafterShape.from_target(config, DrafterConfig(block_size=3, num_layers=1, target_layer_ids=(0,)), 2)
    return model, FrozenEnds.from_model(model, "cpu", torch.float32), sharp_drafter(shape)


# What is run, and how long it takes


def test_requests_share_the_forwards_of_the_target() -> None:
    model, _ = target("qwen3")
    prompts = [prompt_of(length, length) for length in (3, 9, 14)]
    shapes = []
    hook = model.register_forward_pre_hook(
        lambda _module, _args, keywords: shapes.append(tuple(keywords["input_ids"].shape)), with_kwargs=True
    )
    free = [plain(model, p, max_new_tokens=30).tokens for p in prompts]
    shapes.clear()
    with knowing(prompts, free, errors=0.3, seed=1):
        got = decode(model, prompts, Wanted(max_new_tokens=12), drafting=drafting("qwen3", 7))
    hook.remove()
    assert shapes[0] == (3, 14)
    assert {columns for _, columns in shapes[1:]} == {8}
    running = [sum(len(g.rounds) > number for g in got) for number in range(len(shapes) - 1)]
    assert [rows for rows, _ in shapes[1:]] == running


def test_stages_of_a_batch_are_shared_and_only_trees_are_built() -> None:
    model, _ = target("qwen3")
    prompts = [prompt_of(4), prompt_of(9)]
    got = decode(model, prompts, Wanted(max_new_tokens=5), drafting=drafting("qwen3", 9))
    assert got[0].seconds.prefill == got[1].seconds.prefill > 0
    assert min(got[0].seconds.draft, got[0].seconds.build, got[0].seconds.verify, got[0].seconds.commit) > 0
    for generation in decode(model, prompts, Wanted(max_new_tokens=5)):
        assert generation.seconds.draft == generation.seconds.build == 0


# Limits and refusals


@pytest.mark.parametrize("budget", [None, 20])
def test_positions_stay_below_those_the_target_has(budget: int | None) -> None:
    """Prompt and new tokens fill the target's 1024 positions exactly; the last trees would look past them."""
    model, ends = target("qwen3")
    prompt = prompt_of(1024 - 6)
    seen = []
    hook = model.register_forward_pre_hook(
        lambda _module, _args, keywords: seen.append(int(keywords["position_ids"].max())) if "position_ids" in keywords else None,
        with_kwargs=True,
    )
    got = speculate(model, ends, drafter_for("qwen3", BLOCK), prompt, max_new_tokens=6, budget=budget)
    hook.remove()
    assert got.tokens == plain(model, prompt, max_new_tokens=6).tokens
    assert max(seen) == 1023


def test_a_prompt_that_does_not_fit_is_refused() -> None:
    model, ends = target("qwen3")
    for decoded in (
        functools.partial(plain, model, prompt_of(1020)),
        functools.partial(speculate, model, ends, drafter_for("qwen3", BLOCK), prompt_of(1020), budget=4),
    ):
        with pytest.raises(ConfigError, match="1020 prompt and 5 new tokens exceed the target's 1024 positions"):
            decoded(max_new_tokens=5)


@pytest.mark.parametrize("budget", [0, -1, MAX_BUDGET + 1])
def test_an_impossible_budget_is_refused(budget: int) -> None:
    model, ends = target("qwen3")
    with pytest.raises(ConfigError, match=rf"a tree budget is {budget}: use 1 to {MAX_BUDGET}"):
        speculate(model, ends, drafter_for("qwen3", BLOCK), [1], max_new_tokens=4, budget=budget)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 70}, "a vocabulary of 64, the target has 70"),
        ({"num_hidden_layers": 5}, "a number of target layers of 4, the target has 5"),
        ({"hidden_size": 32}, "a hidden size of 64, the target has 32"),
    ],
)
def test_a_drafter_of_another_target_is_refused(changes: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ends = target("qwen3")
    for name, value in changes.items():
        monkeypatch.setattr(model.config, name, value)
    for budget in (None, 4):
        with pytest.raises(ConfigError, match=message):
            speculate(model, ends, drafter_for("qwen3", BLOCK), [1], max_new_tokens=4, budget=budget)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("_attn_implementation", "flash_attention_2", "attention is 'flash_attention_2', which takes no mask of a tree"),
        ("layer_types", ["chunked_attention"] * 4, "layers of type chunked_attention: trees and several requests"),
    ],
)
def test_attention_that_takes_no_mask_of_a_tree_is_refused(
    name: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = target("llama")
    monkeypatch.setattr(model.config, name, value, raising=False)
    monkeypatch.setattr(rounds.TargetSession, "prefill", lambda *_: pytest.fail("the target ran first"))
    for prompts, budget in (([[1]], 4), ([[1], [2]], None)):
        with pytest.raises(ConfigError, match=message):
            decode(model, prompts, Wanted(max_new_tokens=3), drafting=drafting("llama", budget))


def test_no_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="no prompt to decode"):
        decode(target("qwen3")[0], [], Wanted(max_new_tokens=3))
