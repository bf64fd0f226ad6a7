"""Prepared examples on disk: what is published is complete, and what is not complete is not trusted.

A prepared directory (its files: `dflash.data.meta`) is written under another name, flushed to the disk and renamed, so that
a crash, a full disk or a killed process leaves either the whole directory or none. Reading checks the marker, the size, the
schema, the checksums, the row counts and the values, and refuses with `DataError` whatever it cannot vouch for.

Known limit: a process killed while it writes leaves `.NAME.*.partial` beside NAME, which nobody reads and anybody may delete.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dflash.batch import Example
from dflash.data.answers import Unanswered
from dflash.data.meta import (
    EXAMPLES_FILE,
    MARKER_FILE,
    META_FILE,
    SKIPPED_FILE,
    SPLITS,
    UNANSWERED_FILE,
    DataError,
    Meta,
    Split,
    check_matches,
    load_meta,
    open_prepared,
)
from dflash.files import sync

__all__ = [
    "DataError",
    "Meta",
    "check_matches",
    "iterate_examples",
    "load_examples",
    "load_meta",
    "require_unpublished",
    "write_examples",
]

ROW_GROUP = 4096

SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("prompt_tokens", pa.int32()),  # tokens before the first supervised one
        ("split", pa.string()),
    ]
)


def write_examples(
    path: Path,
    splits: Mapping[str, Iterable[Example]],
    meta: Meta,
    *,
    skipped: Sequence[tuple[str, str]] = (),
    unanswered: Sequence[Unanswered] = (),
) -> Meta:
    """Publish examples (train and heldout) as the new directory `path`; return the meta with its counts.

    One row group of examples is in memory at a time, and the sample ids of all. Raises DataError when `path` holds something
    already, when an example is not valid for `meta`, or when the disk refuses: then nothing is published.
    """
    require_unpublished(path)
    unknown = sorted(set(splits) - set(SPLITS))
    if unknown:
        raise DataError(f"unknown split {unknown[0]!r}: use {', '.join(SPLITS)}")
    meta = dataclasses.replace(meta, skipped=dict(Counter(reason for _, reason in skipped).most_common()))
    aside: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
        meta = _write_directory(aside, splits, meta, skipped, unanswered)
        aside.rename(path)
    except OSError as error:
        raise DataError(f"{path}: cannot write prepared data ({error}); nothing was published there") from error
    finally:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)  # of what was not published; else the name is gone
    try:
        sync(path.parent)
    except OSError as error:
        raise DataError(f"{path} is published, but the disk does not confirm it ({error}): check the disk") from error
    return meta


def require_unpublished(path: Path) -> None:
    """Raise DataError when `path` is taken: prepared data is never overwritten."""
    if path.is_dir():
        if any(path.iterdir()):
            raise DataError(f"{path} exists and is not empty: choose another --output, or remove it first")
    elif path.exists() or path.is_symlink():
        raise DataError(f"{path} exists and is not a directory: choose another --output")


def load_examples(path: Path, split: Split) -> list[Example]:
    """Read the examples of one split. Raises DataError on anything half-written, damaged or foreign."""
    return list(iterate_examples(path, split))


def iterate_examples(path: Path, split: Split) -> Iterator[Example]:
    """The examples of one split in the order of the file, one row group in memory at a time.

    Raises DataError on anything half-written, damaged or foreign; a damage, and a wrong count, only when it is reached.
    """
    if split not in SPLITS:
        raise DataError(f"unknown split {split!r}: use one of {', '.join(SPLITS)}")
    meta, rows = open_prepared(path)
    file = path / EXAMPLES_FILE
    _check_file(file, rows)
    found = 0
    for table in _row_groups(file, split):
        found += table.num_rows
        for example in _to_examples(table):
            problem = _problem(example, meta.vocab_size)
            if problem is not None:
                raise DataError(f"{file}: {problem}; prepare the data again")
            yield example
    expected = meta.examples.get(split, 0)
    if found != expected:
        raise DataError(f"{file} holds {found} {split} examples, {META_FILE} says {expected}: prepare the data again")


def _row_groups(file: Path, split: Split) -> Iterator[Any]:
    try:
        with pq.ParquetFile(file, page_checksum_verification=True, pre_buffer=False) as content:
            for number in range(content.num_row_groups):
                table = content.read_row_group(number, use_threads=False)
                yield table.filter(pc.field("split") == split)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file} is damaged ({error}): prepare the data again") from error


def _check_file(file: Path, rows: object) -> None:
    try:
        info = pq.read_metadata(file)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file} is not a readable Parquet file ({error}): prepare the data again") from error
    if not info.schema.to_arrow_schema().equals(SCHEMA):
        raise DataError(f"{file} has columns {info.schema.names}, expected {SCHEMA.names}: it was not written by prepare")
    if info.num_rows != rows:
        raise DataError(f"{file} holds {info.num_rows} rows, {rows} were written: prepare the data again")


def _checked(examples: Iterable[Example], vocab_size: int, seen: set[str]) -> Iterator[Example]:
    """The examples, none of which is wrong or named as one in `seen`."""
    for example in examples:
        problem = _problem(example, vocab_size)
        if problem is None and example.sample_id in seen:
            problem = f"sample id {example.sample_id!r} occurs more than once"
        if problem is not None:
            raise DataError(f"{problem}; nothing was written")
        seen.add(example.sample_id)
        yield example


def _problem(example: Example, vocab_size: int) -> str | None:
    if example.ids.ndim != 1 or example.ids.shape != example.loss_mask.shape:
        return f"example {example.sample_id!r} has {example.ids.shape} ids and a mask of {example.loss_mask.shape}"
    if len(example.ids) == 0:
        return f"example {example.sample_id!r} is empty"
    low, high = int(example.ids.min()), int(example.ids.max())
    if low < 0 or high >= vocab_size:
        return f"example {example.sample_id!r} has token ids {low}..{high}, outside the vocabulary of {vocab_size}"
    return None


def _write_directory(
    aside: Path,
    splits: Mapping[str, Iterable[Example]],
    meta: Meta,
    skipped: Sequence[tuple[str, str]],
    unanswered: Sequence[Unanswered],
) -> Meta:
    """Write all files; the meta with the counts of examples."""
    file = aside / EXAMPLES_FILE
    counts: dict[str, int] = dict.fromkeys(SPLITS, 0)
    seen: set[str] = set()
    with pq.ParquetWriter(file, SCHEMA, compression="zstd", write_page_checksum=True) as writer:
        for split in SPLITS:
            examples = _checked(splits.get(split, ()), meta.vocab_size, seen)
            while group := list(itertools.islice(examples, ROW_GROUP)):
                writer.write_table(_to_table(group, split))
                counts[split] += len(group)
    meta = dataclasses.replace(meta, examples=counts)
    meta_text = json.dumps(dataclasses.asdict(meta), indent=2, sort_keys=True) + "\n"
    marker = {
        "rows": sum(meta.examples.values()),
        "bytes": file.stat().st_size,
        "meta_sha256": hashlib.sha256(meta_text.encode()).hexdigest(),
    }
    lines = [json.dumps({"sample_id": sample_id, "reason": reason}) + "\n" for sample_id, reason in skipped]
    sync(file)
    texts = {META_FILE: meta_text, SKIPPED_FILE: "".join(lines)}
    if unanswered:
        texts[UNANSWERED_FILE] = "".join(json.dumps(dataclasses.asdict(one)) + "\n" for one in unanswered)
    for name, text in {**texts, MARKER_FILE: json.dumps(marker) + "\n"}.items():
        (aside / name).write_text(text, encoding="utf-8")
        sync(aside / name)
    aside.chmod(0o777 & ~_umask())
    sync(aside)
    return meta


def _to_table(examples: Sequence[Example], split: str) -> Any:
    offsets = np.concatenate([[0], np.cumsum([len(example.ids) for example in examples])]).astype(np.int32)
    ids = np.concatenate([example.ids for example in examples]).astype(np.int32)
    mask = np.concatenate([example.loss_mask for example in examples]).astype(np.bool_)
    return pa.table(
        [
            pa.array([example.sample_id for example in examples], pa.string()),
            pa.ListArray.from_arrays(offsets, pa.array(ids)),
            pa.ListArray.from_arrays(offsets, pa.array(mask)),
            pa.array([_prompt_tokens(example.loss_mask) for example in examples], pa.int32()),
            pa.array([split] * len(examples), pa.string()),
        ],
        schema=SCHEMA,
    )


def _prompt_tokens(loss_mask: npt.NDArray[np.bool_]) -> int:
    return int(loss_mask.argmax()) if loss_mask.any() else len(loss_mask)


def _to_examples(table: Any) -> Iterator[Example]:
    for chunk in table.to_batches():
        names = chunk.column("sample_id").to_pylist()
        ids, ids_offsets = _flat(chunk.column("ids"))
        mask, mask_offsets = _flat(chunk.column("loss_mask"))
        for i, sample_id in enumerate(names):
            yield Example(
                sample_id=sample_id,
                ids=ids[ids_offsets[i] : ids_offsets[i + 1]],
                loss_mask=mask[mask_offsets[i] : mask_offsets[i + 1]],
            )


def _flat(column: Any) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    offsets = column.offsets.to_numpy().astype(np.int64)
    return column.flatten().to_numpy(zero_copy_only=False), offsets - offsets[0]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
