"""Laws of preparing data: prompts are answered by the target, whatever their source and their form."""

from __future__ import annotations

import dataclasses
import json
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
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
    frequent_end,
    saved_target,
    tiny_target,
    write_jsonl,
)

from dflash.batch import Example
from dflash.config import ConfigError, TargetConfig
from dflash.data import chat, examples, prepare, shelf
from dflash.data.answers import Answer
from dflash.data.examples import DataError, load_examples, load_meta
from dflash.data.generate import Question, Sampling, answer
from fixtures import tiny_target as trained

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id


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


def test_only_a_batch_of_prompts_and_answers_is_in_memory(
    configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: Counter[str] = Counter()
    most: Counter[str] = Counter()

    def born(it: Any) -> Any:
        name = type(it).__name__
        alive[name] += 1
        most[name] = max(most[name], alive[name])
        weakref.finalize(it, alive.subtract, {name: 1})
        return it

    for kind in (Question, Answer, Example):
        made = kind.__init__
        monkeypatch.setattr(kind, "__init__", lambda it, made=made, **fields: (made(it, **fields), born(it))[0])
    read_back = shelf._prompt
    monkeypatch.setattr(shelf, "_prompt", lambda content: born(read_back(content)))
    monkeypatch.setattr(examples, "ROW_GROUP", 4)
    prepare.prepare(configure([{"prompt": "x" * (i + 1)} for i in range(60)], batch_size=4, max_new_tokens=2))
    assert set(most) == {"Prompt", "Question", "Answer", "Example"}
    assert max(most.values()) <= 3 * 4
    assert len(load_examples(tmp_path / "data", "train")) == 60


def test_malformed_json_is_an_error_with_the_line(configure: Any, tmp_path: Path) -> None:
    file = tmp_path / "broken.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": \n')
    with pytest.raises(DataError, match=r"broken\.jsonl, line 3: no JSON \(Expecting value, column 13\); expected"):
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


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing.jsonl", r"missing\.jsonl does not exist: "),
        ("missing.parquet", r"missing\.parquet does not exist: "),
        ("/nowhere/prompts", "/nowhere/prompts does not exist: "),
        ("dflash", r"the directory dflash holds no \.jsonl, \.ndjson or \.parquet files: "),
        ("missing/*.json", r"no \.jsonl, .* file matches the pattern missing/\*\.json: "),
    ],
)
def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(configure: Any, name: str, problem: str) -> None:
    with pytest.raises(DataError, match=f"^{problem}pass files"):
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
    with pytest.raises(ConfigError, match="use cpu or cuda:INDEX"):
        prepare.prepare(configure([{"prompt": "a"}], device="gpu"))
    with pytest.raises(ConfigError, match=r"device cuda:97 needs 98 GPUs, found \d+"):
        prepare.prepare(configure([{"prompt": "a"}], device="cuda:97"))


def test_batches_hold_no_more_tokens_than_asked(configure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[list[int]] = []

    def observed(model: Any, asked: Any, *args: Any, **kwargs: Any) -> Any:
        batches.append([len(question.ids) for question in asked])
        return answer(model, asked, *args, **kwargs)

    monkeypatch.setattr(prepare, "answer", observed)
    prepare.prepare(configure([{"prompt": "x" * (10 * i + 1)} for i in range(9)], batch_tokens=200, max_new_tokens=2))
    assert all(len(batch) == 1 or len(batch) * (batch[0] + 2) <= 200 for batch in batches)
    assert len({len(batch) for batch in batches}) > 1
    with pytest.raises(ConfigError, match="batch-tokens is 0: use at least 1"):
        configure([{"prompt": "a"}], batch_tokens=0)


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
