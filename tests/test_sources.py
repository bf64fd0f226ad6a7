"""Laws of where prompts come from: files, directories, URLs and data sets give the same rows; what cannot be read is named."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_data import write_jsonl

from dflash.data import sources
from dflash.data.meta import DataError
from dflash.data.sources import read_rows

ROWS = [{"id": str(number), "prompt": f"prompt {number}"} for number in range(5)]


def read(source: Any, split: str = "train") -> list[dict[str, Any]]:
    return [row for _, row in read_rows(str(source), split=split, stream=False)]


def write_parquet(file: Path, rows: list[Any]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=2)
    return file


def compressed(directory: Path) -> Path:
    file = directory / "p.jsonl.gz"
    file.write_bytes(gzip.compress(write_jsonl(directory / "p.jsonl", ROWS).read_bytes()))
    return file


def array(directory: Path) -> Path:
    file = directory / "p.json"
    file.write_text("\n " + json.dumps(ROWS, indent=1))
    return file


def folder(directory: Path) -> Path:
    write_parquet(directory / "2.parquet", ROWS[3:])
    write_jsonl(directory / "1.jsonl", ROWS[:3])
    (directory / "dataset.json").write_text("not prompts")
    (directory / "README.md").write_text("# a card")
    return directory


def saved(directory: Path) -> Path:
    datasets.Dataset.from_list(ROWS).save_to_disk(directory / "saved")
    return directory / "saved"


def in_memory(directory: Path) -> str:
    filesystem = fsspec.filesystem("memory")
    for name in ("1.parquet", "2.parquet"):
        rows = ROWS[:2] if name == "1.parquet" else ROWS[2:]
        filesystem.pipe(f"/{directory.name}/{name}", write_parquet(directory / name, rows).read_bytes())
    return f"memory://{directory.name}/*.parquet"


@pytest.mark.parametrize(
    "made",
    [
        lambda directory: write_jsonl(directory / "p.jsonl", ROWS),
        lambda directory: write_parquet(directory / "p.parquet", ROWS),
        lambda directory: f"file://{write_parquet(directory / 'p.parquet', ROWS)}",
        lambda directory: f"{folder(directory)}/*[12].*",
        *(compressed, array, folder, saved, in_memory),
    ],
)
def test_every_kind_of_source_gives_the_same_rows(made: Any, tmp_path: Path) -> None:
    assert read(made(tmp_path)) == ROWS


def test_a_place_names_the_file_where_there_are_several(tmp_path: Path) -> None:
    places = [place for place, _ in read_rows(str(folder(tmp_path)), split="train", stream=False)]
    assert places == ["1.jsonl, line 1", "1.jsonl, line 2", "1.jsonl, line 3", "2.parquet, row 1", "2.parquet, row 2"]


def test_a_saved_data_set_with_splits_gives_the_one_that_is_asked_for(tmp_path: Path) -> None:
    parts = {"train": datasets.Dataset.from_list(ROWS[:2]), "test": datasets.Dataset.from_list(ROWS[2:])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved", "test") == ROWS[2:]
    with pytest.raises(DataError, match="has no split 'dev', found train, test: name one with --split"):
        read(tmp_path / "saved", "dev")


@pytest.mark.parametrize("stream", [False, True])
def test_a_data_set_of_the_hub_is_read_by_datasets_itself(tmp_path: Path, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "owner" / "name").mkdir(parents=True)
    write_parquet(tmp_path / "owner" / "name" / "train.parquet", ROWS)  # what the hub holds, read from here by the same code
    rows = sources._hub_rows(str(tmp_path / "owner" / "name"), "train", stream=stream)
    assert [row for _, row in rows] == ROWS


@pytest.mark.parametrize("kept", [4, 0.5, 0.99])
def test_a_truncated_parquet_file_is_named(tmp_path: Path, kept: float) -> None:
    file = write_parquet(tmp_path / "p.parquet", ROWS)
    os.truncate(file, int(kept if kept > 1 else file.stat().st_size * kept))
    with pytest.raises(DataError, match=r"p\.parquet is not a readable Parquet file"):
        read(file)


def test_a_parquet_file_that_is_damaged_inside_is_named_after_the_rows_before(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "p.parquet", [{"prompt": "x" * 1000 + str(number)} for number in range(8)])
    content = bytearray(file.read_bytes())
    info = pq.read_metadata(file).row_group(3).column(0)
    start = info.dictionary_page_offset or info.data_page_offset
    content[start : start + info.total_compressed_size] = bytes(info.total_compressed_size)
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"p\.parquet is not a readable Parquet file"):
        read(file)


def test_a_compressed_file_that_was_cut_is_named(tmp_path: Path) -> None:
    file = compressed(tmp_path)
    os.truncate(file, file.stat().st_size - 9)
    with pytest.raises(DataError, match=r"cannot read .*p\.jsonl\.gz \(EOFError"):
        read(file)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("s3://bucket/p.parquet", r"cannot open s3://bucket/p\.parquet: .*s3fs.*pip install 'dflash-harness\[s3\]'"),
        ("nothing://p.jsonl", r"cannot open nothing://p\.jsonl: .*nothing"),
        ("memory://nowhere/p.jsonl", r"^memory://nowhere/p\.jsonl does not exist: pass files"),
        ("memory://nowhere/*.jsonl", r"^no .* file matches the pattern memory://nowhere/\*\.jsonl: pass files"),
    ],
)
def test_a_url_that_cannot_be_opened_says_why(source: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)  # as where it is not installed
    with pytest.raises(DataError, match=message):
        read(source)


def test_an_array_of_something_else_is_refused_with_the_item(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('[{"prompt": "a"}, "b"]')
    with pytest.raises(DataError, match=r"p\.json, item 2: a JSON str; expected an array of objects"):
        read(tmp_path / "p.json")
