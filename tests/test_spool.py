"""Laws of examples that stay on the disk: the same batches as from memory, from any place, and nothing damaged is trained on."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_data import example, random_examples

from dflash.config import DataConfig
from dflash.data import spool
from dflash.data.examples import DataError, Meta, load_examples, write_examples
from dflash.data.packing import PackedStream
from dflash.data.spool import SpooledExamples, open_spool

META = Meta(target="some/target", vocab_size=300, mask_token_id=299, pad_token_id=0, eos_token_ids=(1, 2))
CONFIG = DataConfig(sequence_length=48, rows_per_batch=2, num_anchors=8)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data that nobody changes; one id is no ASCII, one example is empty but for its prompt."""
    directory = tmp_path_factory.mktemp("spooled") / "data"
    examples = [*random_examples(200), example("é", "..##"), example("prompt only", "....")]
    write_examples(directory, {"train": examples, "heldout": [example("held", "..##")]}, META)
    return directory


def batches(examples: Any, numbers: range) -> list[Any]:
    stream = PackedStream(examples, CONFIG, seed=3, pad_token_id=0)
    return [stream.batch(number) for number in numbers]


def same(a: Any, b: Any) -> bool:
    pairs = [(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a)]
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


def test_a_spool_holds_the_examples_of_its_split_in_their_order(prepared: Path, tmp_path: Path) -> None:
    for split in ("train", "heldout"):
        expected, spooled = load_examples(prepared, split), open_spool(prepared, split, tmp_path)  # type: ignore[arg-type]
        for found in (list(spooled), [spooled[number] for number in range(len(spooled))], spooled[:]):
            assert [e.sample_id for e in found] == [e.sample_id for e in expected]
            for before, after in zip(expected, found, strict=True):
                assert after.ids.dtype == before.ids.dtype
                assert after.ids.tolist() == before.ids.tolist()
                assert after.loss_mask.tolist() == before.loss_mask.tolist()
    with pytest.raises(IndexError):
        spooled[len(spooled)]


def test_a_stream_from_a_spool_gives_the_batches_of_one_from_memory_from_any_number_on(prepared: Path, tmp_path: Path) -> None:
    numbers = range(7, 300, 13)
    from_memory = batches(load_examples(prepared, "train"), numbers)
    from_spool = batches(open_spool(prepared, "train", tmp_path), numbers)
    assert all(same(a, b) for a, b in zip(from_memory, from_spool, strict=True))


def test_a_spool_is_made_once_and_again_for_other_data(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(spool, "_write", lambda *arguments, write=spool._write: (made.append(arguments), write(*arguments)))
    threads = [threading.Thread(target=open_spool, args=(prepared, "train", tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    write_examples(tmp_path / "other", {"train": random_examples(3, seed=9)}, META)
    assert len(open_spool(tmp_path / "other", "train", tmp_path)) == 3


def test_a_spool_that_was_not_finished_is_made_again(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_path: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(spool, "sync", full)
        with pytest.raises(DataError, match=r"cannot spool the data .*No space left.*--data\.spool"):
            open_spool(prepared, "train", tmp_path)
    assert [file for file in tmp_path.iterdir() if not file.name.endswith(".lock")] == []
    spooled = open_spool(prepared, "train", tmp_path)
    (spooled._directory / "SPOOLED").unlink()
    assert len(open_spool(prepared, "train", tmp_path)) == 202


@pytest.mark.parametrize("name", ["records.bin", "offsets.bin"])
def test_damage_is_noticed(prepared: Path, tmp_path: Path, name: str) -> None:
    directory = open_spool(prepared, "train", tmp_path)._directory
    file = directory / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"records\.bin is damaged: remove .*, it is made again"):
        list(SpooledExamples(directory)[:])
    with pytest.raises(DataError, match=r"records\.bin is damaged"):
        list(SpooledExamples(directory))
    os.truncate(file, 40)
    with pytest.raises(DataError, match=rf"{name} has 40 bytes, \d+ were written: remove"):
        SpooledExamples(directory)


def test_a_stream_keeps_no_example_in_memory(prepared: Path, tmp_path: Path) -> None:
    spooled = open_spool(prepared, "train", tmp_path)
    stream = PackedStream(spooled, CONFIG, seed=0, pad_token_id=0)
    kept = [value for value in vars(stream).values() if hasattr(value, "nbytes")]
    assert sum(value.nbytes for value in kept) <= 16 * len(spooled)
    assert stream._source is spooled
