"""Laws of preparing data: prompts are answered by the target, whatever happens to batches, disks and processes."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers_data import (
    REWRITES_EARLIER,
    REWRITES_PROMPT,
    THINKING,
    WITHOUT_GENERATION,
    byte_tokenizer,
    saved_target,
    tiny_target,
    write_jsonl,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats

from dflash.config import ConfigError, PrepareConfig, TargetConfig
from dflash.data import chat, generate, journal, prepare, progress
from dflash.data.examples import DataError, load_examples, load_meta
from dflash.data.generate import Question, Sampling, answer, in_batches
from dflash.modeling.target import load_target
from fixtures import tiny_target as trained

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_target()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def configure(tmp_path: Path, target: Path) -> Any:
    """A function that makes the configuration for some rows of prompts."""

    def make(rows: list[Any] | str, **changes: Any) -> PrepareConfig:
        prompts = rows if isinstance(rows, str) else str(write_jsonl(tmp_path / "prompts.jsonl", rows))
        values: dict[str, Any] = {
            "prompts": prompts,
            "output": tmp_path / "data",
            "target": TargetConfig(path=str(target), dtype="float32"),
            "max_new_tokens": 12,
            "heldout_fraction": 0.0,
        }
        return PrepareConfig(**{**values, **changes})

    return make


def questions(*lengths: int, seed: int = 0) -> list[Question]:
    generator = np.random.default_rng(seed)
    return [Question(sample_id=f"q{i}", ids=generator.integers(0, 256, n).tolist()) for i, n in enumerate(lengths)]


def frequent_end(model: Any, asked: list[Question]) -> set[int]:
    """A token that ends some of the greedy answers early, and not others."""
    free = answer(model, asked, Sampling(max_new_tokens=16, end_token_ids=set()))
    for token in sorted({t for tokens in free for t in tokens}):
        at = [tokens.index(token) if token in tokens else None for tokens in free]
        found = [i for i in at if i is not None]
        if None in at and len(set(found)) > 1:
            return {token}
    raise AssertionError("the random target gives every prompt the same answer")


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


def test_generation_stops_when_all_rows_have_ended_and_ended_rows_cost_nothing(model: Any) -> None:
    asked = questions(5, 17, 1, 30, 9, 22)
    ends = frequent_end(model, asked)
    rows_per_forward: list[int] = []
    got = answer(model, asked, Sampling(max_new_tokens=16, end_token_ids=ends), on_token=rows_per_forward.append)
    assert rows_per_forward == [sum(len(tokens) > step for tokens in got) for step in range(max(map(len, got)))]
    answer(model, asked[:1], Sampling(max_new_tokens=16, end_token_ids=set(range(272))), on_token=rows_per_forward.append)
    assert rows_per_forward[-1] == 1
    assert len(rows_per_forward) == max(map(len, got)) + 1


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


def test_batches_are_of_similar_length_and_the_longest_comes_first() -> None:
    lengths = [5, 17, 1, 30, 9]
    assert [[len(q.ids) for q in batch] for batch in in_batches(questions(*lengths), 2)] == [[30, 17], [9, 5], [1]]


def test_examples_are_what_the_target_was_asked_and_what_it_wrote(configure: Any, model: Any) -> None:
    rows = [{"id": "a", "prompt": "Hello"}, {"id": "b", "prompt": "Another, longer one"}, {"id": "c", "prompt": "ünï"}]
    summary = prepare.prepare(configure(rows))
    assert summary["examples"] == {"train": 3, "heldout": 0}
    for row, example in zip(rows, load_examples(Path(summary["output"]), "train"), strict=True):
        asked = chat.render_prompt(TOKENIZER, [{"role": "user", "content": row["prompt"]}])
        written = answer(model, [Question(sample_id="", ids=asked)], Sampling(max_new_tokens=12, end_token_ids={END}))[0]
        assert example.sample_id == row["id"]
        assert example.ids.tolist() == asked + written
        assert example.loss_mask.tolist() == [False] * len(asked) + [True] * len(written)
    assert summary["answer_tokens"] == sum(int(e.loss_mask.sum()) for e in load_examples(Path(summary["output"]), "train"))


def test_the_end_token_that_the_target_writes_is_supervised(
    configure: Any, tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"prompt {i}"} for i in range(8)]
    asked = [
        Question(sample_id="", ids=chat.render_prompt(TOKENIZER, [{"role": "user", "content": row["prompt"]}])) for row in rows
    ]
    (end,) = frequent_end(model, asked)
    monkeypatch.setattr(prepare, "_end_token_ids", lambda *_: (end,))
    summary = prepare.prepare(configure(rows))
    ended = 0
    for example in load_examples(tmp_path / "data", "train"):
        written = example.ids[example.loss_mask].tolist()
        ended += written[-1] == end
        assert end not in written[:-1]
    assert 0 < ended < 8
    assert summary["truncated_answers"] == 8 - ended


def test_every_end_token_that_the_target_names_ends_an_answer() -> None:
    model = tiny_target()
    model.generation_config.eos_token_id = [3, 9]
    assert prepare._end_token_ids(model, TOKENIZER) == (3, 9, END)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_prepared_data_does_not_depend_on_the_batch_size(configure: Any, tmp_path: Path, temperature: float) -> None:
    rows = [{"prompt": "x" * (i * 7 % 23 + 1)} for i in range(20)]
    read = []
    for size in (1, 8):
        prepare.prepare(configure(rows, output=tmp_path / f"{size}", batch_size=size, temperature=temperature))
        read.append([(e.sample_id, e.ids.tolist()) for e in load_examples(tmp_path / f"{size}", "train")])
    assert read[0] == read[1]
    assert len(read[0]) == 20


def test_a_dialogue_is_answered_after_its_last_user_turn_and_earlier_answers_are_context(configure: Any, tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Short."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two?"},
    ]
    prepare.prepare(configure([{"conversation": messages}], prompt_field="conversation"))
    (example,) = load_examples(tmp_path / "data", "train")
    asked = chat.render_prompt(TOKENIZER, messages)
    assert example.ids[: len(asked)].tolist() == asked
    assert example.loss_mask.tolist() == [False] * len(asked) + [True] * (len(example.ids) - len(asked))


def test_a_dialogue_may_be_answered_with_a_template_that_rewrites_earlier_turns(configure: Any, tmp_path: Path) -> None:
    path = saved_target(tmp_path / "rewriting", REWRITES_EARLIER)
    messages = [{"role": role, "content": "a#b"} for role in ("user", "assistant", "user")]
    config = configure([{"prompt": messages}], target=TargetConfig(path=str(path), dtype="float32"))
    assert prepare.prepare(config)["examples"] == {"train": 1, "heldout": 0}


def test_the_thinking_mode_reaches_the_prompts(configure: Any, tmp_path: Path) -> None:
    path = saved_target(tmp_path / "thinking", THINKING)
    for thinking in (False, True):
        output = tmp_path / f"{thinking}"
        config = configure([{"prompt": "a"}], target=TargetConfig(path=str(path), dtype="float32"), output=output)
        prepare.prepare(dataclasses.replace(config, enable_thinking=thinking))
        (example,) = load_examples(output, "train")
        assert ("<think></think>" in TOKENIZER.decode(example.ids[~example.loss_mask])) is not thinking


def test_skipped_prompts_are_counted_and_listed(configure: Any, tmp_path: Path) -> None:
    rows: list[Any] = [
        {"prompt": "fine"},
        {"id": "long", "prompt": "x" * 100},
        {"id": "empty", "prompt": "  "},
        {"id": "number", "prompt": 3},
        {"id": "none", "prompt": []},
        {"id": "turn", "prompt": [{"role": "assistant", "content": "hm"}]},
        {"id": "parts", "prompt": [{"role": "user", "content": [{"type": "text"}]}]},
        {"id": "other field", "text": "hello"},
        {"prompt": "fine"},
        {"id": "long", "prompt": "another prompt"},
        {"text": "no id"},
    ]
    summary = prepare.prepare(configure(rows, max_prompt_tokens=60))
    listed = [tuple(json.loads(line).values()) for line in (tmp_path / "data" / "skipped.jsonl").read_text().splitlines()]
    assert len(load_examples(tmp_path / "data", "train")) == 1
    assert sorted(listed) == sorted(
        [
            ("long", "more than 60 tokens"),
            ("empty", "empty prompt"),
            ("number", "prompt is neither text nor messages but int"),
            ("none", "empty prompt"),
            ("turn", "messages do not end with a user turn"),
            ("parts", "a message without text role and content"),
            ("other field", "no field 'prompt'"),
            ("line 9", "repeated prompt"),
            ("long", "id of another prompt"),
            ("line 11", "no field 'prompt'"),
        ]
    )
    assert sum(summary["skipped"].values()) == 10
    assert summary["skipped"] == load_meta(tmp_path / "data").skipped
    assert summary["skipped"]["empty prompt"] == 2


def test_a_prompt_that_leaves_no_room_in_the_targets_context_is_skipped(configure: Any) -> None:
    summary = prepare.prepare(configure([{"prompt": "a"}, {"prompt": "b" * 500}]))
    assert summary["skipped"] == {"no room for 12 more tokens in the target's 512": 1}


def test_prompts_that_the_template_refuses_are_skipped(configure: Any, tmp_path: Path) -> None:
    refusing = "{% if messages[0].content == 'bad' %}{{ raise_exception('not this one') }}{% endif %}" + WITHOUT_GENERATION
    path = saved_target(tmp_path / "refusing", refusing)
    config = configure([{"prompt": "good"}, {"prompt": "bad"}], target=TargetConfig(path=str(path), dtype="float32"))
    assert prepare.prepare(config)["skipped"] == {"the chat template refuses it: not this one": 1}


def test_a_template_that_breaks_the_prefix_law_is_refused_before_anything_is_generated(configure: Any, tmp_path: Path) -> None:
    path = saved_target(tmp_path / "rewriting", REWRITES_PROMPT)
    config = configure([{"id": "p", "prompt": "hello"}], target=TargetConfig(path=str(path), dtype="float32"))
    with pytest.raises(DataError, match=r"prompts\.jsonl, prompt 'p': the chat template cannot be trained on"):
        prepare.prepare(config)
    assert not (tmp_path / "data").exists()


def test_all_prompts_skipped_is_an_error_that_counts_the_reasons(configure: Any, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"every prompt was skipped \(more than 5 tokens: 2; empty prompt: 1\); nothing was written"
    ):
        prepare.prepare(configure([{"prompt": "one"}, {"prompt": "two"}, {"prompt": ""}], max_prompt_tokens=5))
    assert not (tmp_path / "data").exists()


def test_a_prompt_is_held_out_by_its_content_alone(configure: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"prompt number {i}"} for i in range(60)]
    heldout = []
    for name, some in (("all", rows), ("half", rows[::-2])):
        file = write_jsonl(tmp_path / f"{name}.jsonl", [{"id": f"{name}{i}", **row} for i, row in enumerate(some)])
        config = configure(str(file), output=tmp_path / name, heldout_fraction=0.3, max_new_tokens=1, seed=len(name))
        summary = prepare.prepare(config)
        assert sum(summary["examples"].values()) == len(some)
        heldout.append({TOKENIZER.decode(e.ids[~e.loss_mask]) for e in load_examples(tmp_path / name, "heldout")})
    assert 8 <= len(heldout[0]) <= 28
    in_half = {chat_text for row in rows[::-2] if (chat_text := f"<|user|>\n{row['prompt']}<|end|>\n<|assistant|>\n")}
    assert heldout[1] == heldout[0] & in_half


def test_meta_says_what_the_data_belongs_to(configure: Any, tmp_path: Path, target: Path) -> None:
    prepare.prepare(configure([{"prompt": "a"}], temperature=0.5, seed=4, enable_thinking=True))
    meta = load_meta(tmp_path / "data")
    assert meta.target == str(target)
    assert (meta.vocab_size, meta.mask_token_id) == (272, TOKENIZER.mask_token_id)
    assert (meta.pad_token_id, meta.eos_token_ids) == (TOKENIZER.pad_token_id, (END,))
    assert meta.chat_template_sha256 == chat.template_sha256(TOKENIZER)
    assert (meta.enable_thinking, meta.temperature, meta.seed, meta.max_new_tokens) == (True, 0.5, 4, 12)
    assert meta.versions["torch"] == torch.__version__


def test_malformed_json_is_an_error_with_the_line(configure: Any, tmp_path: Path) -> None:
    file = tmp_path / "broken.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": \n')
    with pytest.raises(DataError, match=r"broken\.jsonl, line 3: no JSON"):
        prepare.prepare(configure(str(file)))
    file.write_text('{"prompt": "a"}\n["b"]\n')
    with pytest.raises(DataError, match=r"broken\.jsonl, line 2: a JSON list; expected one object per line"):
        prepare.prepare(configure(str(file)))
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"broken\.jsonl, line 2: no JSON.*utf-8"):
        prepare.prepare(configure(str(file)))


def test_an_empty_file_is_an_error(configure: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"empty\.jsonl holds no prompts"):
        prepare.prepare(configure(str(tmp_path / "empty.jsonl")))


def test_an_unknown_prompt_field_names_the_fields_found(configure: Any) -> None:
    with pytest.raises(DataError, match="no field 'question', found id, prompt, text: name the right one with --prompt-field"):
        prepare.prepare(configure([{"prompt": "a", "id": "1"}, {"text": "b"}], prompt_field="question"))


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.parquet", "/nowhere/prompts", "."])
def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(configure: Any, name: str) -> None:
    with pytest.raises(DataError, match="is not a file"):
        prepare.prepare(configure(name))


def test_a_damaged_parquet_file_is_an_error(configure: Any, tmp_path: Path) -> None:
    (tmp_path / "p.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(DataError, match=r"p\.parquet is not a readable Parquet file"):
        prepare.prepare(configure(str(tmp_path / "p.parquet")))


def test_parquet_and_jsonl_prompts_give_the_same_data(configure: Any, tmp_path: Path) -> None:
    rows = [{"id": i, "prompt": [{"role": "user", "content": f"p{i}"}]} for i in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    prepare.prepare(configure(rows))
    prepare.prepare(configure(str(tmp_path / "p.parquet"), output=tmp_path / "other"))
    one, other = (load_examples(tmp_path / name, "train") for name in ("data", "other"))
    assert [(e.sample_id, e.ids.tolist()) for e in one] == [(e.sample_id, e.ids.tolist()) for e in other]


def test_a_hub_name_is_read_through_datasets(configure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(name: str, configuration: str | None, *, split: str, streaming: bool) -> Any:
        calls.append((name, configuration, split, streaming))
        return datasets.Dataset.from_list([{"question": f"q{i}"} for i in range(5)])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    summary = prepare.prepare(configure("owner/name:main", prompt_field="question", split="test", limit=3))
    assert calls == [("owner/name", "main", "test", True)]
    assert summary["examples"]["train"] == 3


def test_a_hub_that_cannot_be_read_is_an_error_with_the_name(configure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_args: Any, **_kwargs: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"cannot read 'owner/name' from the hub.*no route"):
        prepare.prepare(configure("owner/name"))


def test_the_limit_takes_the_first_rows(configure: Any, tmp_path: Path) -> None:
    prepare.prepare(configure([{"id": str(i), "prompt": f"p{i}"} for i in range(6)], limit=2))
    assert [e.sample_id for e in load_examples(tmp_path / "data", "train")] == ["0", "1"]


def test_an_output_that_is_taken_is_refused_before_the_target_is_loaded(
    configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").touch()
    monkeypatch.setattr(prepare, "load_target", None)
    with pytest.raises(DataError, match="exists and is not empty"):
        prepare.prepare(configure([{"prompt": "a"}]))


def test_settings_that_cannot_work_say_what_to_change(configure: Any) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        prepare.prepare(configure([{"prompt": "a"}], target=TargetConfig(path="random:qwen3", dtype="float32", mask_token_id=9)))
    with pytest.raises(ConfigError, match="use cpu, cuda or cuda:N"):
        prepare.prepare(configure([{"prompt": "a"}], device="gpu"))
    with pytest.raises(ConfigError, match=r"device is 'cuda:97', found \d+ GPUs"):
        prepare.prepare(configure([{"prompt": "a"}], device="cuda:97"))


def test_out_of_memory_names_the_batch_size(configure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_args: Any, **_kwargs: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(prepare, "answer", out_of_memory)
    with pytest.raises(ConfigError, match="use a --batch-size below 32"):
        prepare.prepare(configure([{"prompt": "a"}]))


def test_the_threads_of_the_cpu_are_the_configured_ones_and_put_back(configure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def observed(*args: Any, **kwargs: Any) -> Any:
        seen.append(torch.get_num_threads())
        return answer(*args, **kwargs)

    monkeypatch.setattr(prepare, "answer", observed)
    before = torch.get_num_threads()
    prepare.prepare(configure([{"prompt": "a"}], cpu_threads=before + 1))
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


class Killed(BaseException):
    """Stands for a signal that ends the process between two batches."""


def interrupt(monkeypatch: pytest.MonkeyPatch, after_batches: int) -> list[list[str]]:
    """Let `prepare` die after some batches; returns the sample ids of the batches that it answered."""
    batches: list[list[str]] = []

    def counted(model: Any, asked: Any, *args: Any, **kwargs: Any) -> Any:
        if len(batches) == after_batches:
            raise Killed
        batches.append([question.sample_id for question in asked])
        return answer(model, asked, *args, **kwargs)

    monkeypatch.setattr(prepare, "answer", counted)
    return batches


ROWS = [{"id": f"p{i}", "prompt": "x" * (i + 1)} for i in range(7)]


def test_a_prepare_that_was_killed_goes_on_and_gives_what_one_go_gives(
    configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare.prepare(configure(ROWS, output=tmp_path / "one go"))
    interrupt(monkeypatch, after_batches=2)
    with pytest.raises(Killed):
        prepare.prepare(configure(ROWS, batch_size=2))
    assert not (tmp_path / "data").exists()
    batches = interrupt(monkeypatch, after_batches=99)
    summary = prepare.prepare(configure(ROWS, batch_size=3))
    assert batches == [["p2", "p1", "p0"]]
    assert summary["resumed_answers"] == 4
    assert "going on: 4 of 7 prompts were answered by an earlier go" in capfd.readouterr().err
    one, two = (load_examples(tmp_path / name, "train") for name in ("one go", "data"))
    assert [(e.sample_id, e.ids.tolist()) for e in one] == [(e.sample_id, e.ids.tolist()) for e in two]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["data", "one go", "prompts.jsonl"]


def journal_of(configure: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    interrupt(monkeypatch, after_batches=2)
    with pytest.raises(Killed):
        prepare.prepare(configure(ROWS, batch_size=2))
    interrupt(monkeypatch, after_batches=99)
    return tmp_path / ".data.answers"


@pytest.mark.parametrize("tail", [b'{"sample_id": "p0", "ans', b"[]\n", b"null\n", b'{"sample_id": "p0"}\n', b"\x00" * 40])
def test_what_a_crash_left_of_the_last_line_is_not_trusted(
    configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tail: bytes
) -> None:
    file = journal_of(configure, monkeypatch, tmp_path) / "answers.jsonl"
    file.write_bytes(file.read_bytes() + tail)
    interrupt(monkeypatch, after_batches=1)
    with pytest.raises(Killed):
        prepare.prepare(configure(ROWS, batch_size=2))
    interrupt(monkeypatch, after_batches=99)
    assert prepare.prepare(configure(ROWS))["resumed_answers"] == 6
    assert len(load_examples(tmp_path / "data", "train")) == 7


def test_an_answer_to_another_question_is_not_used(configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal_of(configure, monkeypatch, tmp_path)
    changed = [{**row, "prompt": "y" + row["prompt"]} if row["id"] == "p6" else row for row in ROWS]
    assert prepare.prepare(configure(changed))["resumed_answers"] == 3


@pytest.mark.parametrize("change", [{"temperature": 1.0}, {"max_new_tokens": 5}, {"seed": 3}])
def test_answers_of_other_settings_are_refused(
    configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    journal_of(configure, monkeypatch, tmp_path)
    name = next(iter(change)).replace("_", "-")
    with pytest.raises(DataError, match=rf"answers that were made with another {name}: use the same settings"):
        prepare.prepare(configure(ROWS, **change))


def test_answers_of_another_target_in_the_same_place_are_refused(
    configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved_target(tmp_path / "target")
    in_place = TargetConfig(path=str(path), dtype="float32")
    interrupt(monkeypatch, after_batches=1)
    with pytest.raises(Killed):
        prepare.prepare(configure(ROWS, batch_size=2, target=in_place))
    tiny_target(seed=1).save_pretrained(path)
    with pytest.raises(DataError, match="answers that were made with another target files"):
        prepare.prepare(configure(ROWS, target=in_place))


def test_two_processes_do_not_answer_into_one_journal(tmp_path: Path) -> None:
    with journal.AnswerJournal(tmp_path / "data", {}), pytest.raises(DataError, match="in use by another process"):
        journal.AnswerJournal(tmp_path / "data", {}).__enter__()
    with journal.AnswerJournal(tmp_path / "data", {}):
        pass


def test_a_disk_that_fills_up_between_batches_keeps_the_answers_before(
    configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    appended = journal.AnswerJournal.append
    batches = interrupt(monkeypatch, after_batches=99)

    def append(self: journal.AnswerJournal, *args: Any) -> None:
        if len(batches) == 3:
            monkeypatch.setattr(os, "fsync", full)
        appended(self, *args)

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal.AnswerJournal, "append", append)
        with pytest.raises(DataError, match=r"cannot keep answers .*No space left.*run the same command again"):
            prepare.prepare(configure(ROWS, batch_size=2))
    assert not (tmp_path / "data").exists()


def test_progress_is_shown_when_it_takes_long_and_not_before() -> None:
    for delay, shown in ((0.0, True), (1000.0, False)):
        console = Console(force_terminal=True, width=120)
        with console.capture() as capture, progress.GenerationProgress(4, show_after_seconds=delay, console=console) as bar:
            bar.tokens(3)
            bar.answered(2)
        assert ("answering prompts" in capture.get()) is shown
        assert ("2/4" in capture.get()) is shown
    assert progress.SHOW_AFTER_SECONDS == 2.0


def test_progress_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with progress.GenerationProgress(4, show_after_seconds=0.0) as bar:
        bar.answered(4)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "4/4" in captured.err


def test_the_random_numbers_of_sampling_are_the_same_on_every_machine_and_version() -> None:
    sampling = Sampling(max_new_tokens=2, end_token_ids=(), temperature=1.0, seed=1)
    assert generate._uniforms(sampling, "sample").tolist() == [0.10073169492216871, 0.7640107770356511]


def test_the_trained_target_answers_real_prompts_as_its_template_would_render_them(configure: Any, tmp_path: Path) -> None:
    prompts = ["def add(a, b):\n", "import os\nimport ", "class Point:\n    def __init__(self, x, y):\n", "for i in range(10):\n"]
    target = TargetConfig(path=str(trained.PATH), dtype="float32")
    rows = [{"id": str(i), "prompt": prompt} for i, prompt in enumerate(prompts)]
    summary = prepare.prepare(configure(rows, target=target, max_new_tokens=160))
    model, tokenizer = trained.load()
    meta = load_meta(tmp_path / "data")
    assert summary["truncated_answers"] < len(prompts)
    for prompt, example in zip(prompts, load_examples(tmp_path / "data", "train"), strict=True):
        written = example.ids[example.loss_mask].tolist()
        if written[-1] not in meta.eos_token_ids:
            continue
        messages = [{"role": "user", "content": prompt}]
        rendered = chat.render(tokenizer, messages, tokenizer.decode(written[:-1]), end_token_ids=meta.eos_token_ids)
        asked = rendered.prompt_tokens
        assert example.ids.tolist() == rendered.ids[: len(example.ids)].tolist()
        assert example.loss_mask.tolist() == rendered.loss_mask[: len(example.ids)].tolist()
        assert not rendered.loss_mask[len(example.ids) :].any()
        ids = torch.tensor([example.ids[:asked].tolist()])
        reference = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=160, do_sample=False)
        assert reference[0].tolist() == example.ids.tolist()
