"""Laws of answering prompts with the target: greedy or sampled, alone or in a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers_data import (
    byte_tokenizer,
    frequent_end,
    questions,
    tiny_target,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dflash.config import TargetConfig
from dflash.data import generate
from dflash.data.examples import DataError
from dflash.data.generate import Question, Sampling, answer, in_batches
from dflash.modeling.target import load_target

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id


def test_greedy_answers_are_those_of_generate(model: Any) -> None:
    asked = questions(5, 17, 1, 30, 9, 22)
    ends = frequent_end(model, asked)
    got = answer(model, asked, Sampling(max_new_tokens=16, end_token_ids=ends))
    assert len({len(tokens) for tokens in got}) > 2
    for question, tokens in zip(asked, got, strict=True):
        ids = torch.tensor([question.ids])
        reference = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=16,
            eos_token_id=sorted(ends),
            pad_token_id=0,
        )
        assert tokens == reference[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma3", "qwen3_moe", "qwen3_5"])
def test_greedy_answers_do_not_depend_on_the_batch_for_any_kind_of_target(name: str) -> None:
    model, _ = load_target(TargetConfig(path=f"random:{name}", dtype="float32"), device="cpu")
    asked = questions(3, 19, 11, 7)
    ends = {t for tokens in answer(model, asked[:2], Sampling(max_new_tokens=5, end_token_ids=set())) for t in tokens[4:]}
    sampling = Sampling(max_new_tokens=10, end_token_ids=ends)
    together = answer(model, asked, sampling)
    assert together == [answer(model, [question], sampling)[0] for question in asked]
    assert len({len(tokens) for tokens in together}) > 1


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 24), min_size=1, max_size=6), st.sampled_from([0.0, 1.0]), st.randoms())
def test_an_answer_depends_on_nothing_but_its_prompt_and_key(lengths: list[int], temperature: float, random: Any) -> None:
    model = tiny_target()
    asked = questions(*lengths)
    sampling = Sampling(max_new_tokens=6, end_token_ids={7}, temperature=temperature, seed=3)
    alone = {question.sample_id: answer(model, [question], sampling)[0] for question in asked}
    random.shuffle(asked)
    assert dict(zip((q.sample_id for q in asked), answer(model, asked, sampling), strict=True)) == alone


def test_every_prompt_begins_at_position_0_behind_its_padding() -> None:
    model = tiny_target()
    calls: list[dict[str, Any]] = []
    model.register_forward_pre_hook(lambda _module, _args, kwargs: calls.append(kwargs), with_kwargs=True)
    asked = questions(3, 5, 4)
    answer(model, asked, Sampling(max_new_tokens=3, end_token_ids=set()))
    assert calls[0]["attention_mask"].tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]
    assert calls[0]["position_ids"].tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4], [0, 0, 1, 2, 3]]
    assert [call["position_ids"].tolist() for call in calls[1:]] == [[[3], [5], [4]], [[4], [6], [5]]]
    assert [call["input_ids"].shape for call in calls] == [(3, 5), (3, 1), (3, 1)]


def test_an_answer_ends_with_its_first_end_token_or_at_the_limit(model: Any) -> None:
    asked = questions(5, 17, 1, 30, 9, 22)
    ends = frequent_end(model, asked)
    for tokens in answer(model, asked, Sampling(max_new_tokens=16, end_token_ids=ends)):
        assert not set(tokens[:-1]) & ends
        assert tokens[-1] in ends or len(tokens) == 16


def test_generation_stops_when_all_rows_have_ended_and_counts_the_tokens_of_answers_only(model: Any) -> None:
    asked = questions(5, 17, 1, 30, 9, 22)
    ends = frequent_end(model, asked)
    tokens_per_forward: list[int] = []
    got = answer(model, asked, Sampling(max_new_tokens=16, end_token_ids=ends), on_token=tokens_per_forward.append)
    assert tokens_per_forward == [sum(len(tokens) > step for tokens in got) for step in range(max(map(len, got)))]
    answer(model, asked[:1], Sampling(max_new_tokens=16, end_token_ids=set(range(272))), on_token=tokens_per_forward.append)
    assert tokens_per_forward[-1] == 1
    assert len(tokens_per_forward) == max(map(len, got)) + 1


def test_rows_leave_the_batch_when_a_quarter_of_it_has_ended() -> None:
    model = tiny_target()
    asked = questions(*range(3, 15))
    sampling = Sampling(max_new_tokens=24, end_token_ids=set(range(30)), temperature=5.0)
    lengths = [len(answer(model, [question], sampling)[0]) for question in asked]
    expected, rows = [], lengths
    for step in range(1, max(lengths) + 1):
        expected.append(len(rows))
        running = [length for length in rows if length > step]
        rows = running if 4 * (len(rows) - len(running)) >= len(rows) else rows
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _m, _a, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True)
    assert [len(tokens) for tokens in answer(model, asked, sampling)] == lengths
    assert sizes == expected
    assert len(set(sizes)) > 2
    assert any(sum(length >= step for length in lengths) < size for step, size in enumerate(sizes, 1))  # some ended rows stay


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_do_not_depend_on_how_often_tokens_are_looked_at(model: Any, temperature: float) -> None:
    asked = questions(5, 17, 1, 30, 9, 22)
    sampling = Sampling(max_new_tokens=16, end_token_ids=frequent_end(model, asked), temperature=temperature)
    counted: list[int] = []
    every = answer(model, asked, sampling, look_every=1)
    assert answer(model, asked, sampling, look_every=3, on_token=counted.append) == every
    assert sum(counted) == sum(map(len, every))
    assert answer(model, asked, sampling, look_every=100) == every


def test_what_a_row_computes_after_its_end_is_not_looked_at() -> None:
    model = tiny_target()
    asked = questions(5, 5)
    free = answer(model, asked, Sampling(max_new_tokens=8, end_token_ids=set()))
    end = next(token for token in free[0] if token not in free[1])
    sampling = Sampling(max_new_tokens=8, end_token_ids={end})
    expected = answer(model, asked, sampling)
    model.model.embed_tokens.weight.data[end] = float("nan")  # the forward after the end computes nonsense
    assert answer(model, asked, sampling, look_every=4) == expected
    with pytest.raises(DataError, match=r"logits are not finite for 'q0'"):
        answer(model, asked, Sampling(max_new_tokens=8, end_token_ids=set()), look_every=4)


def test_prompts_of_one_length_need_no_mask() -> None:
    model = tiny_target()
    masks: list[Any] = []
    model.register_forward_pre_hook(lambda _m, _a, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True)
    asked = questions(6, 6, 6)
    sampling = Sampling(max_new_tokens=4, end_token_ids=set())
    together = answer(model, asked, sampling)
    assert masks == [None] * 4
    assert together == [tokens[:4] for tokens in answer(model, [*asked, *questions(9)], sampling)[:3]]


def test_sampling_follows_the_distribution_of_the_target(model: Any) -> None:
    ids = questions(8)[0].ids
    asked = [Question(sample_id=f"s{i}", ids=ids) for i in range(3000)]
    first = [tokens[0] for tokens in answer(model, asked, Sampling(max_new_tokens=1, end_token_ids=set(), temperature=0.7))]
    logits = model(torch.tensor([ids])).logits[0, -1].detach().double()
    expected = (logits / 0.7).softmax(-1).numpy() * len(asked)
    common = expected >= 5
    counts = np.bincount(first, minlength=len(expected))
    observed = [*counts[common], counts[~common].sum()]
    wanted = [*expected[common], expected[~common].sum()]
    assert stats.chisquare(observed, wanted).pvalue > 1e-3


def test_sampling_draws_anew_at_every_position_and_for_every_seed(model: Any) -> None:
    asked = questions(8)

    def sampled(seed: int) -> list[int]:
        return answer(model, asked, Sampling(max_new_tokens=40, end_token_ids=set(), temperature=5.0, seed=seed))[0]

    assert sampled(0) == sampled(0)
    assert sampled(0) != sampled(1)
    assert len(set(sampled(0))) > 20


def test_a_target_that_computes_nonsense_is_an_error_with_the_sample() -> None:
    broken = tiny_target()
    broken.lm_head.weight.data[3, 0] = float("nan")
    for temperature in (0.0, 1.0):
        with pytest.raises(DataError, match=r"logits are not finite for 'q0'"):
            answer(broken, questions(4), Sampling(max_new_tokens=3, end_token_ids=set(), temperature=temperature))


def test_batches_take_questions_as_they_come_and_no_more_than_they_hold() -> None:
    waiting = iter(questions(30, 17, 9, 5, 1))
    batches = in_batches(waiting, 2)
    assert [len(q.ids) for q in next(batches)] == [30, 17]
    assert len(next(waiting).ids) == 9
    assert [[len(q.ids) for q in batch] for batch in batches] == [[5, 1]]


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 8), st.integers(1, 200))
def test_batches_hold_every_prompt_once_and_no_more_tokens_than_asked(lengths: list[int], rows: int, tokens: int) -> None:
    asked = questions(*sorted(lengths, reverse=True))
    batches = list(in_batches(asked, rows, max_new_tokens=10, batch_tokens=tokens))
    assert sorted(q.sample_id for batch in batches for q in batch) == sorted(q.sample_id for q in asked)
    for batch, after in zip(batches, [*batches, []][1:], strict=True):
        longest = len(batch[0].ids) + 10
        assert len(batch) == 1 or (len(batch) <= rows and len(batch) * longest <= tokens)
        assert not after or len(batch) == rows or (len(batch) + 1) * longest > tokens  # as many as fit


def test_the_random_numbers_of_sampling_are_the_same_on_every_machine_and_version() -> None:
    sampling = Sampling(max_new_tokens=2, end_token_ids=(), temperature=1.0, seed=1)
    assert generate._uniforms(sampling, "sample").tolist() == [0.10073169492216871, 0.7640107770356511]
