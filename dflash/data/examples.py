"""Prepared examples on disk: what is published is complete, and what is not complete is not trusted.

A prepared directory holds
    examples.parquet   sample_id, ids, loss_mask, prompt_tokens, split; the pages carry checksums
    meta.json          which target, vocabulary, mask token and template the examples belong to (`Meta`)
    skipped.jsonl      one line per prompt that has no example, with the reason
    COMPLETE           written last: row count, bytes of the Parquet file, digest of meta.json

It is written under another name, flushed to the disk and renamed, so that a crash, a full disk or a killed process
leaves either the whole directory or none. Reading checks the marker, the size, the schema, the row counts and the
values, and refuses with `DataError` whatever it cannot vouch for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dflash.batch import Example

FORMAT_VERSION = 1
SPLITS = ("train", "heldout")
EXAMPLES_FILE, META_FILE, SKIPPED_FILE, MARKER_FILE = "examples.parquet", "meta.json", "skipped.jsonl", "COMPLETE"
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

Split = Literal["train", "heldout"]


class DataError(ValueError):
    """Prompts or prepared data that cannot be used; the message says what was found and what to do. Commands exit with 2."""


@dataclass(frozen=True, kw_only=True)
class Meta:
    """What prepared examples belong to. Filled by `prepare`; counts are filled by `write_examples`."""

    target: str
    vocab_size: int
    mask_token_id: int
    pad_token_id: int
    eos_token_ids: tuple[int, ...]
    chat_template_sha256: str = ""
    enable_thinking: bool = False
    temperature: float = 0.0
    max_new_tokens: int = 0
    seed: int = 0
    prompts: str = ""
    truncated_answers: int = 0  # answers that reached max_new_tokens before their end token
    examples: dict[str, int] = field(default_factory=dict)  # per split
    skipped: dict[str, int] = field(default_factory=dict)  # per reason
    versions: dict[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION


def write_examples(
    path: Path, splits: Mapping[str, Sequence[Example]], meta: Meta, *, skipped: Sequence[tuple[str, str]] = ()
) -> Meta:
    """Publish examples (train and heldout) as the new directory `path`; return the meta with its counts.

    Raises DataError when `path` holds something already, when an example is not valid for `meta`, or when the disk
    refuses: then nothing is published.
    """
    require_unpublished(path)
    _check_examples(splits, meta)
    meta = dataclasses.replace(
        meta,
        examples={split: len(splits.get(split, ())) for split in SPLITS},
        skipped=dict(Counter(reason for _, reason in skipped).most_common()),
    )
    aside: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
        _write_directory(aside, splits, meta, skipped)
        aside.rename(path)
        _sync_directory(path.parent)
    except OSError as error:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
        raise DataError(f"{path}: cannot write prepared data ({error}); nothing was published there") from error
    return meta


def require_unpublished(path: Path) -> None:
    """Raise DataError when `path` is taken: prepared data is never overwritten."""
    if path.is_dir():
        if any(path.iterdir()):
            raise DataError(f"{path} exists and is not empty: choose another --output, or remove it first")
    elif path.exists() or path.is_symlink():
        raise DataError(f"{path} exists and is not a directory: choose another --output")


def load_meta(path: Path) -> Meta:
    """Read the meta of a complete prepared directory. Raises DataError otherwise."""
    return _open(path)[0]


def load_examples(path: Path, split: Split) -> list[Example]:
    """Read the examples of one split. Raises DataError on anything half-written, damaged or foreign."""
    if split not in SPLITS:
        raise DataError(f"unknown split {split!r}: use one of {', '.join(SPLITS)}")
    meta, _ = _open(path)
    file = path / EXAMPLES_FILE
    try:
        table = pq.read_table(file, schema=SCHEMA, filters=[("split", "=", split)], page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file} is damaged ({error}): prepare the data again") from error
    expected = meta.examples.get(split, 0)
    if table.num_rows != expected:
        raise DataError(f"{file} holds {table.num_rows} {split} examples, {META_FILE} says {expected}: prepare the data again")
    examples = list(_to_examples(table))
    problem = next((text for text in (_problem(example, meta.vocab_size) for example in examples) if text), None)
    if problem is not None:
        raise DataError(f"{file}: {problem}; prepare the data again")
    return examples


def check_matches(meta: Meta, *, vocab_size: int, mask_token_id: int) -> None:
    """Raise DataError when prepared data belongs to another target than the one that is about to read it."""
    if meta.vocab_size != vocab_size:
        raise DataError(
            f"the data was prepared for {meta.target!r} with a vocabulary of {meta.vocab_size}, the target has {vocab_size}: "
            "prepare the data with this target, or train on the other one"
        )
    if meta.mask_token_id != mask_token_id:
        raise DataError(
            f"the data was prepared with mask token id {meta.mask_token_id}, the run uses {mask_token_id}: "
            f"pass --target.mask-token-id {meta.mask_token_id}, or prepare the data again"
        )


def _open(path: Path) -> tuple[Meta, dict[str, Any]]:
    if not path.is_dir():
        raise DataError(f"{path} is not a directory of prepared data: run `python -m dflash prepare` and pass its --output")
    marker_file, meta_file, file = path / MARKER_FILE, path / META_FILE, path / EXAMPLES_FILE
    if not marker_file.is_file():
        raise DataError(f"{path} has no {MARKER_FILE} marker: it is half-written or no prepared data; prepare the data again")
    marker = _read_json(marker_file)
    for name in (meta_file, file):
        if not name.is_file():
            raise DataError(f"{name} is missing: prepare the data again")
    if hashlib.sha256(meta_file.read_bytes()).hexdigest() != marker.get("meta_sha256"):
        raise DataError(f"{meta_file} was changed after it was written: prepare the data again")
    if file.stat().st_size != marker.get("bytes"):
        raise DataError(f"{file} has {file.stat().st_size} bytes, {marker.get('bytes')} were written: prepare the data again")
    _check_file(file, int(marker.get("rows", -1)))
    return _meta_from_json(meta_file, _read_json(meta_file)), marker


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read ({error}): prepare the data again") from error
    if not isinstance(values, dict):
        raise DataError(f"{file} holds no JSON object: prepare the data again")
    return values


def _meta_from_json(file: Path, values: dict[str, Any]) -> Meta:
    version = values.get("format_version")
    if version != FORMAT_VERSION:
        raise DataError(f"{file} has format version {version}, this program reads {FORMAT_VERSION}: prepare the data again")
    known = {f.name for f in dataclasses.fields(Meta)}
    try:
        meta = Meta(**{key: value for key, value in values.items() if key in known})
    except TypeError as error:
        raise DataError(f"{file} lacks a field ({error}): prepare the data again") from error
    return dataclasses.replace(meta, eos_token_ids=tuple(meta.eos_token_ids))


def _check_file(file: Path, rows: int) -> None:
    try:
        info = pq.read_metadata(file)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file} is not a readable Parquet file ({error}): prepare the data again") from error
    if not info.schema.to_arrow_schema().equals(SCHEMA):
        raise DataError(f"{file} has columns {info.schema.names}, expected {SCHEMA.names}: it was not written by prepare")
    if info.num_rows != rows:
        raise DataError(f"{file} holds {info.num_rows} rows, {rows} were written: prepare the data again")


def _check_examples(splits: Mapping[str, Sequence[Example]], meta: Meta) -> None:
    unknown = sorted(set(splits) - set(SPLITS))
    if unknown:
        raise DataError(f"unknown split {unknown[0]!r}: use {', '.join(SPLITS)}")
    seen: set[str] = set()
    for examples in splits.values():
        for example in examples:
            problem = _problem(example, meta.vocab_size)
            if problem is None and example.sample_id in seen:
                problem = f"sample id {example.sample_id!r} occurs more than once"
            if problem is not None:
                raise DataError(f"{problem}; nothing was written")
            seen.add(example.sample_id)


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
    aside: Path, splits: Mapping[str, Sequence[Example]], meta: Meta, skipped: Sequence[tuple[str, str]]
) -> None:
    file = aside / EXAMPLES_FILE
    with pq.ParquetWriter(file, SCHEMA, compression="zstd", write_page_checksum=True) as writer:
        for split in SPLITS:
            examples = splits.get(split, ())
            for first in range(0, len(examples), ROW_GROUP):
                writer.write_table(_to_table(examples[first : first + ROW_GROUP], split))
    meta_text = json.dumps(dataclasses.asdict(meta), indent=2, sort_keys=True) + "\n"
    marker = {
        "rows": sum(meta.examples.values()),
        "bytes": file.stat().st_size,
        "meta_sha256": hashlib.sha256(meta_text.encode()).hexdigest(),
    }
    lines = [json.dumps({"sample_id": sample_id, "reason": reason}) + "\n" for sample_id, reason in skipped]
    _sync_file(file)
    for name, text in ((META_FILE, meta_text), (SKIPPED_FILE, "".join(lines)), (MARKER_FILE, json.dumps(marker) + "\n")):
        (aside / name).write_text(text, encoding="utf-8")
        _sync_file(aside / name)
    aside.chmod(0o777 & ~_umask())
    _sync_directory(aside)


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


def _sync_file(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_sync_directory = _sync_file
