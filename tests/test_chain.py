"""Laws of speculative decoding, held on small random targets that depend on every token before.

Where rounds must accept some drafts, a noisy oracle replaces the proposals: the target's own continuation with errors.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers_decoding import MASK, VOCABULARY, build, drafter_for, prompt_of, sharp_drafter, target
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import ConfigError, DrafterConfig
from dflash.decoding.acceptance import RoundStats
from dflash.decoding.chain import plain, speculate
from dflash.decoding.draft_session import DraftSession
from dflash.decoding.rounds import Generation, commit
from dflash.decoding.tree import DraftTree
from dflash.modeling.drafter import Drafter, DrafterShape
from dflash.modeling.target import RANDOM_TARGETS, FrozenEnds, text_config

FAMILIES = ("qwen3", "llama", "qwen3_moe", "gemma3")
NO_END = ()
# Derandomised: float32 may round B tokens at once otherwise than one at a time, so near ties must not depend on the day.
exact = functools.partial(settings, derandomize=True, deadline=None, database=None)


class Oracle:
    """Proposes `continuation` (the tokens after the prompt), changed where `wrong(index)` says so."""

    def __init__(
        self, prompt: list[int], continuation: tuple[int, ...], wrong: Callable[[int], Any] = lambda _index: False
    ) -> None:
        self.prompt, self.continuation, self.wrong = len(prompt), continuation, wrong
        self.asked: list[int] = []

    def logits(self, session: DraftSession, bonuses: list[int]) -> torch.Tensor:
        index = session.lengths[0] - self.prompt
        assert [self.continuation[index]] == bonuses, "the context holds every committed token but the last"
        self.asked.append(index)
        drafts = self.continuation[index + 1 : index + session.block_size]
        tokens = [(t + 1) % VOCABULARY if self.wrong(index + k) else t for k, t in enumerate(drafts, 1)]
        return torch.nn.functional.one_hot(torch.tensor(tokens), VOCABULARY)[None].float()

    def speculate(self, *arguments: Any, **settings_: Any) -> Generation:
        def logits(session: DraftSession, bonuses: list[int]) -> torch.Tensor:
            return self.logits(session, bonuses)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DraftSession, "logits", logits)
            return speculate(*arguments, **settings_)


# Greedy decoding


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_equals_generate(family: str) -> None:
    model, _ = target(family)
    for length, end in ((1, None), (12, None), (12, 4)):
        prompt = prompt_of(length)
        ids = torch.tensor([prompt])
        free = plain(model, prompt, max_new_tokens=14).tokens
        eos = NO_END if end is None else (free[end],)
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=14,
            eos_token_id=list(eos) or None,
            pad_token_id=0,
        )
        assert plain(model, prompt, max_new_tokens=14, eos_ids=eos).tokens == tuple(expected[0, length:].tolist())


@pytest.mark.parametrize("family", FAMILIES)
@exact(max_examples=12)
@given(
    length=st.integers(1, 20),
    block_size=st.integers(2, 7),
    max_new_tokens=st.integers(1, 14),
    end=st.none() | st.integers(0, 13),
    error_rate=st.sampled_from([0.0, 0.2, 0.5]),
    seed=st.integers(0, 1000),
)
def test_greedy_speculation_is_lossless_whatever_is_drafted(
    family: str, length: int, block_size: int, max_new_tokens: int, end: int | None, error_rate: float, seed: int
) -> None:
    model, ends = target(family)
    prompt = prompt_of(length, seed)
    free = plain(model, prompt, max_new_tokens=14 + block_size).tokens
    eos = NO_END if end is None else (free[end],)
    expected = free[:max_new_tokens]
    if eos and eos[0] in expected:
        expected = expected[: expected.index(eos[0]) + 1]
    arguments = {"max_new_tokens": max_new_tokens, "eos_ids": eos}
    errors = np.random.default_rng(seed).random(len(free) + block_size) < error_rate
    own = speculate(model, ends, drafter_for(family, block_size), prompt, **arguments)
    helped = Oracle(prompt, free, lambda index: errors[index]).speculate(
        model, ends, drafter_for(family, block_size), prompt, **arguments
    )
    assert plain(model, prompt, **arguments).tokens == expected
    for generation in (own, helped):
        assert generation.tokens == expected
        assert generation.target_forwards == 1 + len(generation.rounds)
        assert len(generation.tokens) == 1 + sum(r.committed for r in generation.rounds)
        assert all(r.drafted == block_size - 1 for r in generation.rounds)


def test_an_oracle_drafter_commits_whole_blocks() -> None:
    model, ends = target("qwen3")
    for block_size in (2, 5):
        prompt = prompt_of(9)
        free = plain(model, prompt, max_new_tokens=40).tokens
        count = 1 + 4 * block_size  # the first token is the prefill's
        got = Oracle(prompt, free).speculate(model, ends, drafter_for("qwen3", block_size), prompt, max_new_tokens=count)
        assert got.tokens == free[:count]
        assert got.rounds == (RoundStats(block_size - 1, block_size - 1, block_size, truncated=False),) * 4


def test_an_always_wrong_drafter_commits_the_bonus_alone() -> None:
    model, ends = target("qwen3")
    prompt = prompt_of(9)
    free = plain(model, prompt, max_new_tokens=40).tokens
    oracle = Oracle(prompt, free, wrong=lambda _index: True)
    got = oracle.speculate(model, ends, drafter_for("qwen3", 5), prompt, max_new_tokens=12)
    assert got.tokens == free[:12]
    assert got.rounds == (RoundStats(4, 0, 1, truncated=False),) * 11


def test_the_target_reads_the_prompt_once_and_then_bonus_and_drafts() -> None:
    model, ends = target("qwen3")
    prompt = prompt_of(7)
    free = plain(model, prompt, max_new_tokens=40).tokens
    seen = []
    hook = model.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    oracle = Oracle(prompt, free, wrong=lambda index: index % 3 == 0)
    oracle.speculate(model, ends, drafter_for("qwen3", 4), prompt, max_new_tokens=10)
    hook.remove()
    blocks = [[free[i], *((free[j] + (j % 3 == 0)) % VOCABULARY for j in range(i + 1, i + 4))] for i in oracle.asked]
    assert seen == [prompt, *blocks]


# The drafter's side


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_cached_drafting_equals_a_fresh_forward_over_the_full_context(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features from a cache-free target forward over the committed tokens before the bonus, all layers by its own account."""
    model, ends = target(family)
    block_size, prompt = 5, prompt_of(6)
    drafter = drafter_for(family, block_size)
    free = plain(model, prompt, max_new_tokens=40).tokens
    oracle = Oracle(prompt, free, wrong=lambda index: index in {2, 3, 7, 13})  # rounds of different length
    hidden = []
    original = Drafter.block_forward

    def observed(self: Drafter, *arguments: Any) -> torch.Tensor:
        hidden.append(original(self, *arguments))
        return hidden[-1]

    monkeypatch.setattr(Drafter, "block_forward", observed)
    real = DraftSession.logits
    own_drafts = []

    def logits(session: DraftSession, bonuses: list[int]) -> torch.Tensor:
        own_drafts.append(real(session, bonuses)[0].argmax(-1).tolist())
        return oracle.logits(session, bonuses)

    monkeypatch.setattr(DraftSession, "logits", logits)
    got = speculate(model, ends, drafter, prompt, max_new_tokens=16)
    assert len({r.committed for r in got.rounds if not r.truncated}) > 1
    monkeypatch.undo()
    for index, cached, drafts in zip(oracle.asked, hidden, own_drafts, strict=True):
        context = [*prompt, *free[:index]]
        states = model(input_ids=torch.tensor([context]), output_hidden_states=True, use_cache=False).hidden_states
        features = torch.cat([states[layer_id + 1] for layer_id in drafter.shape.target_layer_ids], dim=-1)
        block = torch.tensor([[free[index]] + [MASK] * (block_size - 1)])
        positions = torch.arange(len(context) + block_size)[None]
        start = len(context)
        fresh = drafter(ends.embed(block), positions[:, start:], features, positions[:, :start], None)
        torch.testing.assert_close(cached, fresh, rtol=1e-4, atol=1e-4)
        assert drafts == ends.logits(fresh[0, 1:]).argmax(-1).tolist()


def test_hooks_are_gone_after_decoding_and_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ends = target("qwen3")

    def hooks() -> int:
        return sum(len(module._forward_hooks) for module in model.modules())

    before = hooks()
    speculate(model, ends, drafter_for("qwen3", 3), prompt_of(4), max_new_tokens=5)
    assert hooks() == before

    def explode(*_arguments: Any) -> None:
        assert hooks() == before + 2, "both selected layers are hooked while decoding"
        raise RuntimeError("drafting failed")

    monkeypatch.setattr(DraftSession, "logits", explode)
    with pytest.raises(RuntimeError, match="drafting failed"):
        speculate(model, ends, drafter_for("qwen3", 3), prompt_of(4), max_new_tokens=5)
    assert hooks() == before


def test_bfloat16_target_with_float32_drafter_decodes() -> None:
    model = build(RANDOM_TARGETS["qwen3"]()).to(torch.bfloat16)
    ends = FrozenEnds.from_model(model, "cpu", torch.bfloat16)
    shape = DrafterShape.from_target(text_config(model), DrafterConfig(block_size=4, num_layers=1, num_features=2), 511)
    for dtype in (torch.float32, torch.bfloat16):
        got = speculate(model, ends, sharp_drafter(shape).to(dtype), prompt_of(5), max_new_tokens=6)
        assert len(got.tokens) == 6


# Sampling


@exact(max_examples=12)
@given(
    block_size=st.integers(2, 6),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    error_rate=st.sampled_from([0.0, 0.3, 1.0]),
    end=st.none() | st.integers(0, 11),
    seed=st.integers(-5, 10**12),
)
def test_sampled_speculation_equals_plain_sampling_token_for_token(
    block_size: int, temperature: float, error_rate: float, end: int | None, seed: int
) -> None:
    model, ends = target("qwen3")
    prompt = prompt_of(5, abs(seed))
    key = {"temperature": temperature, "seed": seed, "request": 3}
    free = plain(model, prompt, max_new_tokens=12 + block_size, **key).tokens
    eos = NO_END if end is None else (free[end],)
    errors = np.random.default_rng(abs(seed)).random(len(free) + block_size) < error_rate
    oracle = Oracle(prompt, free, lambda index: errors[index])
    got = oracle.speculate(model, ends, drafter_for("qwen3", block_size), prompt, max_new_tokens=12, eos_ids=eos, **key)
    expected = free[:12]
    assert got.tokens == (expected[: expected.index(eos[0]) + 1] if eos and eos[0] in expected else expected)
    if error_rate == 0:
        assert all(r.truncated or r.committed == block_size for r in got.rounds)


# End of a round


@given(
    drafts=st.lists(st.integers(0, 4), max_size=6),
    choices=st.lists(st.integers(0, 4), min_size=7, max_size=7),
    eos=st.sets(st.integers(0, 4), max_size=2),
    room=st.integers(1, 9),
)
def test_a_commit_is_plain_decoding_of_the_verified_block(
    drafts: list[int], choices: list[int], eos: set[int], room: int
) -> None:
    choices = choices[: len(drafts) + 1]
    expected, stopped = [], False  # take choices one by one: while the draft agrees, there is room and no end
    for k, choice in enumerate(choices):
        expected.append(choice)
        agreed = k < len(drafts) and drafts[k] == choice
        stopped = agreed and (choice in eos or len(expected) == room)
        if stopped or not agreed:
            break
    path = DraftTree.chain(np.array(drafts, dtype=np.int64)).walk(np.array(choices))
    tokens, stats_found = commit([choices[node] for node in path], len(drafts), eos, room)
    assert tokens == expected
    assert stats_found == RoundStats(len(drafts), len(expected) - (not stopped), len(expected), truncated=stopped)


def test_an_end_token_in_the_prefill_ends_the_request_without_a_round() -> None:
    model, ends = target("qwen3")
    first = plain(model, prompt_of(4), max_new_tokens=1).tokens
    got = speculate(model, ends, drafter_for("qwen3", 3), prompt_of(4), max_new_tokens=9, eos_ids=first)
    assert (got.tokens, got.rounds, got.target_forwards) == (first, (), 1)


def test_stages_are_timed_and_plain_decoding_never_drafts() -> None:
    model, ends = target("qwen3")
    slow, fast = (
        plain(model, prompt_of(4), max_new_tokens=6),
        speculate(model, ends, drafter_for("qwen3", 3), prompt_of(4), max_new_tokens=6),
    )
    assert slow.seconds.draft == 0
    assert min(slow.seconds.prefill, slow.seconds.verify, slow.seconds.commit) > 0
    assert min(fast.seconds.prefill, fast.seconds.draft, fast.seconds.verify, fast.seconds.commit) > 0
    assert fast.seconds.decode == fast.seconds.draft + fast.seconds.build + fast.seconds.verify + fast.seconds.commit


# Refusals


@pytest.mark.parametrize(
    ("prompt", "settings_", "message"),
    [
        ([], {"max_new_tokens": 2}, "at least one token"),
        ([[1, 2]], {"max_new_tokens": 2}, "one sequence"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([1], {"max_new_tokens": 2, "temperature": -1.0}, "temperature is -1.0"),
    ],
)
def test_impossible_requests_are_refused(prompt: list[Any], settings_: dict[str, Any], message: str) -> None:
    model, ends = target("qwen3")
    for decode in (functools.partial(plain, model), functools.partial(speculate, model, ends, drafter_for("qwen3", 3))):
        with pytest.raises(ConfigError, match=message):
            decode(prompt, **settings_)
