"""Laws of `prepare --audit`: it says what is in the data, and finds what will be served otherwise."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_data import THINKING, byte_tokenizer, prepare_config, saved_target, write_jsonl

from dflash import __main__ as main
from dflash.batch import Example
from dflash.command_config import PrepareConfig
from dflash.config import TargetConfig
from dflash.data import prepare
from dflash.data.examples import DataError, load_examples, load_meta, write_examples

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id
ROWS = [{"id": f"p{number}", "prompt": "x" * (4 * number + 1)} for number in range(6)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, target: Path) -> PrepareConfig:
    """Data that nobody changes."""
    config: PrepareConfig = prepare_config(tmp_path_factory.mktemp("audited"), target, ROWS, audit=True)
    prepare.prepare(config)
    return config


def rewritten(config: PrepareConfig, directory: Path, change: Any, **meta: Any) -> PrepareConfig:
    """The same data with each example changed, as published data of its own."""
    examples = [change(example) for example in load_examples(config.output, "train")]
    write_examples(directory / "data", {"train": examples}, dataclasses.replace(load_meta(config.output), **meta))
    return dataclasses.replace(config, output=directory / "data")


def test_the_audit_counts_what_the_examples_hold(prepared: PrepareConfig, capsys: pytest.CaptureFixture[str]) -> None:
    result = prepare.prepare(prepared)
    examples = load_examples(prepared.output, "train")
    found = result["audit"]["splits"]["train"]
    assert result["failed"] == []
    assert found["examples"] == len(examples)
    assert found["supervised_share"] == sum(int(e.loss_mask.sum()) for e in examples) / sum(len(e.ids) for e in examples)
    assert sum(found["lengths"].values()) == len(examples)
    for top, count in found["lengths"].items():
        assert count == sum(int(top) // 2 < len(e.ids) <= int(top) for e in examples)
    assert found["prefix_exact"] == {"compared": len(ROWS), "different": 0}
    first = examples[0].ids[examples[0].loss_mask]
    assert found["shown"][0]["first"] == TOKENIZER.decode(first[:6].tolist())
    assert found["shown"][0]["last"] == TOKENIZER.decode(first[-6:].tolist())
    said = capsys.readouterr().err
    assert "6 of 6 prompts compared are token for token what will be served" in said
    assert "% supervised" in said


def test_a_prompt_of_other_tokens_than_will_be_served_is_found(prepared: PrepareConfig, tmp_path: Path) -> None:
    def change(example: Example) -> Example:
        ids = example.ids.copy()
        if example.sample_id == "p3":
            ids[2] = 65
        return dataclasses.replace(example, ids=ids)

    found = prepare.prepare(rewritten(prepared, tmp_path, change))
    assert found["failed"] == ["train: 1 of 6 prompts differ from the serving render, for example 'p3'"]


def test_without_the_prompts_their_ends_are_compared(
    prepared: PrepareConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = rewritten(prepared, tmp_path, lambda example: example, prompts=str(tmp_path / "gone.jsonl"))
    found = prepare.prepare(config)
    assert found["audit"]["prompts_read_again"] is False
    assert found["audit"]["splits"]["train"]["prefix_exact"] == {"compared": 6, "different": 0}
    assert "more cannot be said without the prompts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda e: dataclasses.replace(e, loss_mask=np.zeros_like(e.loss_mask)), "6 examples have no supervised token"),
        (lambda e: dataclasses.replace(e, loss_mask=np.ones_like(e.loss_mask)), "every token is supervised"),
        (lambda e: dataclasses.replace(e, ids=np.where(e.loss_mask, TOKENIZER.mask_token_id, e.ids)), "the mask token occurs"),
    ],
)
def test_masks_that_teach_the_wrong_tokens_are_found(prepared: PrepareConfig, tmp_path: Path, change: Any, problem: str) -> None:
    found = prepare.prepare(rewritten(prepared, tmp_path, change))
    assert any(problem in failed for failed in found["failed"])


def test_thinking_cut_short_and_repeated_answers_are_counted(prepared: PrepareConfig, tmp_path: Path) -> None:
    def change(example: Example) -> Example:
        answer = {"p0": TOKENIZER("<think>a")["input_ids"] + [END], "p2": [END]}.get(example.sample_id, [5, 6])
        prompt = example.ids[~example.loss_mask] if example.sample_id in ("p0", "p2") else np.array([1, 2], dtype=np.int32)
        ids = np.array([*prompt, *answer], dtype=np.int32)
        return Example(sample_id=example.sample_id, ids=ids, loss_mask=np.arange(len(ids)) >= len(prompt))

    found = prepare.prepare(rewritten(prepared, tmp_path, change))["audit"]["splits"]["train"]
    assert found["think_share"] == pytest.approx(1 / 6)
    assert (found["one_token_answers"], found["cut_answers"], found["repeated_examples"]) == (1, 4, 3)


def test_another_template_or_vocabulary_is_told(prepared: PrepareConfig, tmp_path: Path) -> None:
    other = saved_target(tmp_path / "other", THINKING)
    config = dataclasses.replace(prepared, target=TargetConfig(path=str(other), dtype="float32"))
    failed = prepare.prepare(config)["failed"]
    assert any("6 of 6 prompts differ from the serving render" in problem for problem in failed)
    assert any("the data's template is" in problem for problem in failed)
    config = rewritten(prepared, tmp_path, lambda example: example, vocab_size=300)
    with pytest.raises(DataError, match=r"with a vocabulary of 300, this target has 272: name the right one with --target\.path"):
        prepare.prepare(config)


def test_the_command_audits_data_that_is_there_and_exits_with_1_when_something_is_wrong(
    prepared: PrepareConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["prepare", "--audit", "--target.path", prepared.target.path, "--output"]
    assert main.main([*arguments, str(prepared.output)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["audit"]["splits"]["train"]["examples"] == 6
    bad = rewritten(prepared, tmp_path, lambda e: dataclasses.replace(e, loss_mask=np.ones_like(e.loss_mask)))
    assert main.main([*arguments, str(bad.output)]) == 1
    assert "WRONG" in capsys.readouterr().err
    assert main.main([*arguments, str(tmp_path / "nothing")]) == 2
    assert "nothing holds no prepared data, and there are no prompts: name a file" in capsys.readouterr().err


def test_text_that_a_template_rendered_before_is_skipped(configure: Any, tmp_path: Path) -> None:
    rows = [{"id": "a", "prompt": "plain"}, {"id": "b", "prompt": "<|user|>\nhi<|end|>\n<|assistant|>\n"}]
    summary = prepare.prepare(configure(str(write_jsonl(tmp_path / "p.jsonl", rows))))
    assert summary["examples"]["train"] == 1
    (reason,) = summary["skipped"]
    assert reason == "the text holds the special token <|assistant|>: it was rendered by a template before"
