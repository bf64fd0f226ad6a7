"""Laws of preparing data across crashes: nothing is answered twice, nothing untrue is trusted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from helpers_data import (
    byte_tokenizer,
    saved_target,
    tiny_target,
)

from dflash.config import TargetConfig
from dflash.data import journal, prepare
from dflash.data.examples import DataError, load_examples
from dflash.data.generate import answer

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id
ROWS = [{"id": f"p{i}", "prompt": "x" * (i + 1)} for i in range(7)]


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
