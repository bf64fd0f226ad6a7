"""Laws of prepared examples on disk."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_data import example, random_examples

from dflash.batch import Example
from dflash.data.examples import DataError, Meta, check_matches, load_examples, load_meta, write_examples

META = Meta(target="some/target", vocab_size=300, mask_token_id=299, pad_token_id=0, eos_token_ids=(1, 2))


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    examples = random_examples(30)
    write_examples(tmp_path / "data", {"train": examples[:25], "heldout": examples[25:]}, META, skipped=[("x", "empty prompt")])
    return tmp_path / "data"


def rewrite(path: Path, **marker_changes: object) -> None:
    """Make the marker fit the present files, so that only deeper checks can object."""
    marker = json.loads((path / "COMPLETE").read_text())
    marker["bytes"] = (path / "examples.parquet").stat().st_size
    marker["meta_sha256"] = hashlib.sha256((path / "meta.json").read_bytes()).hexdigest()
    (path / "COMPLETE").write_text(json.dumps({**marker, **marker_changes}))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    examples = random_examples(9000, longest=8)  # more than two row groups
    written = write_examples(tmp_path / "data", {"train": examples[:8990], "heldout": examples[8990:]}, META)
    read = [*load_examples(tmp_path / "data", "train"), *load_examples(tmp_path / "data", "heldout")]
    assert [e.sample_id for e in read] == [e.sample_id for e in examples]
    for before, after in zip(examples, read, strict=True):
        assert after.ids.dtype == np.int32
        assert after.loss_mask.dtype == np.bool_
        assert after.ids.tolist() == before.ids.tolist()
        assert after.loss_mask.tolist() == before.loss_mask.tolist()
    assert load_meta(tmp_path / "data") == written
    assert written.examples == {"train": 8990, "heldout": 10}


def test_meta_counts_the_skipped_by_reason_and_the_file_lists_them(tmp_path: Path) -> None:
    skipped = [("a", "empty prompt"), ("b", "too long"), ("c", "empty prompt")]
    write_examples(tmp_path / "data", {"train": random_examples(2)}, META, skipped=skipped)
    assert load_meta(tmp_path / "data").skipped == {"empty prompt": 2, "too long": 1}
    lines = (tmp_path / "data" / "skipped.jsonl").read_text().splitlines()
    assert [tuple(json.loads(line).values()) for line in lines] == skipped


def test_the_columns_are_the_documented_ones(prepared: Path) -> None:
    table = pq.read_table(prepared / "examples.parquet")
    assert table.schema.names == ["sample_id", "ids", "loss_mask", "prompt_tokens", "split"]
    for row in table.to_pylist():
        assert row["prompt_tokens"] == row["loss_mask"].index(True)


def test_a_split_without_examples_is_empty(tmp_path: Path) -> None:
    write_examples(tmp_path / "data", {"train": random_examples(2)}, META)
    assert load_examples(tmp_path / "data", "heldout") == []


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.999])
def test_a_truncated_file_is_refused(prepared: Path, kept: float) -> None:
    file = prepared / "examples.parquet"
    os.truncate(file, int(file.stat().st_size * kept))
    with pytest.raises(DataError, match=r"examples\.parquet has \d+ bytes, \d+ were written"):
        load_examples(prepared, "train")
    rewrite(prepared)
    with pytest.raises(DataError, match=r"examples\.parquet is not a readable Parquet file"):
        load_examples(prepared, "train")


def test_a_flipped_bit_is_refused(prepared: Path) -> None:
    file = prepared / "examples.parquet"
    content = bytearray(file.read_bytes())
    info = pq.read_metadata(file).row_group(0).column(1)
    content[info.data_page_offset + info.total_compressed_size // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"examples\.parquet is damaged"):
        load_examples(prepared, "train")


def test_a_directory_without_its_marker_is_refused(prepared: Path) -> None:
    (prepared / "COMPLETE").unlink()
    with pytest.raises(DataError, match="no COMPLETE marker: it is half-written"):
        load_examples(prepared, "train")
    with pytest.raises(DataError, match="no COMPLETE marker"):
        load_meta(prepared)


@pytest.mark.parametrize("name", ["examples.parquet", "meta.json"])
def test_a_missing_file_is_named(prepared: Path, name: str) -> None:
    (prepared / name).unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        load_examples(prepared, "train")


def test_no_directory_and_a_foreign_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a directory of prepared data"):
        load_examples(tmp_path / "nothing", "train")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match="half-written or no prepared data"):
        load_examples(tmp_path, "train")


def test_a_foreign_parquet_file_is_refused(prepared: Path) -> None:
    pq.write_table(pa.table({"text": ["a"] * 30}), prepared / "examples.parquet")
    rewrite(prepared)
    with pytest.raises(DataError, match=r"has columns \['text'\].*not written by prepare"):
        load_examples(prepared, "train")


def test_lost_rows_are_refused(prepared: Path) -> None:
    file = prepared / "examples.parquet"
    table = pq.read_table(file)
    pq.write_table(table.slice(1), file)
    rewrite(prepared)
    with pytest.raises(DataError, match="holds 29 rows, 30 were written"):
        load_examples(prepared, "train")
    rewrite(prepared, rows=29)
    with pytest.raises(DataError, match=r"holds 24 train examples, meta\.json says 25"):
        load_examples(prepared, "train")


def test_an_edited_meta_and_an_unknown_version_are_refused(prepared: Path) -> None:
    file = prepared / "meta.json"
    meta = json.loads(file.read_text())
    file.write_text(json.dumps({**meta, "format_version": 99}))
    with pytest.raises(DataError, match="was changed after it was written"):
        load_meta(prepared)
    rewrite(prepared)
    with pytest.raises(DataError, match="format version 99, this program reads 1"):
        load_meta(prepared)
    del meta["vocab_size"]
    file.write_text(json.dumps(meta))
    rewrite(prepared)
    with pytest.raises(DataError, match=r"lacks a field.*vocab_size"):
        load_meta(prepared)


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_marker_that_is_no_json_object_is_refused(prepared: Path, content: str) -> None:
    (prepared / "COMPLETE").write_text(content)
    with pytest.raises(DataError, match="COMPLETE"):
        load_examples(prepared, "train")


def test_token_ids_outside_the_vocabulary_are_refused_when_writing_and_when_reading(tmp_path: Path, prepared: Path) -> None:
    bad = example("bad", "..##", first_id=297)
    with pytest.raises(DataError, match=r"'bad' has token ids 297\.\.300, outside the vocabulary of 300"):
        write_examples(tmp_path / "other", {"train": [bad]}, META)
    assert not (tmp_path / "other").exists()
    file = prepared / "meta.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": 100}))
    rewrite(prepared)
    with pytest.raises(DataError, match="outside the vocabulary of 100"):
        load_examples(prepared, "train")


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": [example("a", "##")], "heldout": [example("a", "##")]}, "'a' occurs more than once"),
        ({"train": [example("a", "")]}, "'a' is empty"),
        ({"validation": []}, "unknown split 'validation'"),
        (
            {"train": [Example(sample_id="a", ids=np.zeros(3, np.int32), loss_mask=np.zeros(2, np.bool_))]},
            r"'a' has \(3,\) ids and a mask of \(2,\)",
        ),
    ],
)
def test_examples_that_make_no_sense_are_not_written(tmp_path: Path, splits: dict[str, list[Example]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        write_examples(tmp_path / "data", splits, META)
    assert list(tmp_path.iterdir()) == []


def test_published_data_is_never_overwritten(prepared: Path) -> None:
    before = {file.name: file.read_bytes() for file in prepared.iterdir()}
    with pytest.raises(DataError, match="exists and is not empty"):
        write_examples(prepared, {"train": random_examples(3, seed=1)}, META)
    assert {file.name: file.read_bytes() for file in prepared.iterdir()} == before


def test_an_empty_directory_may_be_published_to_but_a_file_not(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_examples(tmp_path / "data", {"train": random_examples(3)}, META)
    assert len(load_examples(tmp_path / "data", "train")) == 3
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="exists and is not a directory"):
        write_examples(tmp_path / "file", {"train": random_examples(3)}, META)


FULL_DISK_THEN_KILLED = """
import os, resource, signal, sys
from pathlib import Path
import numpy as np
from dflash.batch import Example
from dflash.data.examples import DataError, Meta, write_examples
meta = Meta(target="t", vocab_size=300, mask_token_id=299, pad_token_id=0, eos_token_ids=(1,))
ids = np.random.default_rng(0).integers(0, 300, 5000).astype(np.int32)
examples = [Example(sample_id=str(i), ids=ids, loss_mask=ids > 9) for i in range(4)]
for limit in (0, 100, 8192, resource.RLIM_INFINITY):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    if limit == resource.RLIM_INFINITY:
        print(os.listdir(sys.argv[1] + "/full"), flush=True)
        Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        name = "killed" if limit == resource.RLIM_INFINITY else "full/data"
        write_examples(Path(sys.argv[1]) / name, {"train": examples}, meta)
    except DataError as error:
        print(error, flush=True)
"""


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Where a process wrote on a full disk and was then killed, and what it said."""
    directory = tmp_path_factory.mktemp("child")
    command = [sys.executable, "-c", FULL_DISK_THEN_KILLED, str(directory)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == -9, result.stderr
    return directory, result.stdout.splitlines()


def test_a_disk_that_is_full_publishes_nothing_and_leaves_nothing(child: tuple[Path, list[str]]) -> None:
    directory, lines = child
    assert lines[3:] == ["[]"]
    for line in lines[:3]:
        assert f"{directory}/full/data: cannot write prepared data" in line
        assert "nothing was published" in line


def test_a_process_killed_before_the_rename_leaves_nothing_that_is_trusted(child: tuple[Path, list[str]]) -> None:
    output = child[0] / "killed"
    assert not output.exists()
    assert [file.name for file in child[0].iterdir() if file.name.endswith(".partial")]
    write_examples(output, {"train": random_examples(3)}, META)
    assert len(load_examples(output, "train")) == 3


@pytest.mark.parametrize("failing_call", [1, 2, 3, 4, 5])
def test_a_flush_that_fails_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_call: int) -> None:
    calls = 0

    def fsync(_descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == failing_call:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(DataError, match=r"No space left on device.*nothing was published"):
        write_examples(tmp_path / "data", {"train": random_examples(3)}, META)
    assert list(tmp_path.iterdir()) == []


def test_everything_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def logged_fsync(descriptor: int) -> None:
        log.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def logged_rename(source: Path, target: Path) -> Path:
        log.append("rename")
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(Path, "rename", logged_rename)
    write_examples(tmp_path / "data", {"train": random_examples(3)}, META)
    at = log.index("rename")
    assert log[:4] == ["examples.parquet", "meta.json", "skipped.jsonl", "COMPLETE"]
    assert log[4].endswith(".partial")
    assert log[at + 1 :] == [tmp_path.name]


def test_another_vocabulary_or_mask_token_is_refused_with_the_edit() -> None:
    check_matches(META, vocab_size=300, mask_token_id=299)
    with pytest.raises(DataError, match="'some/target' with a vocabulary of 300, the target has 301"):
        check_matches(META, vocab_size=301, mask_token_id=299)
    with pytest.raises(DataError, match=r"mask token id 299, the run uses 5: pass --target\.mask-token-id 299"):
        check_matches(META, vocab_size=300, mask_token_id=5)


def test_an_unknown_split_is_refused(prepared: Path) -> None:
    with pytest.raises(DataError, match="unknown split 'test'"):
        load_examples(prepared, "test")  # type: ignore[arg-type]  # what a caller without types could pass


def test_a_published_directory_may_be_read_by_whoever_the_umask_allows(prepared: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    assert prepared.stat().st_mode & 0o777 == 0o777 & ~mask


def test_meta_survives_json(prepared: Path) -> None:
    meta = load_meta(prepared)
    assert meta == dataclasses.replace(META, examples={"train": 25, "heldout": 5}, skipped={"empty prompt": 1})
