"""What prepared examples belong to, and whether a prepared directory is complete.

A prepared directory holds
    examples.parquet   sample_id, ids, loss_mask, prompt_tokens, split; the pages carry checksums
    meta.json          which target, vocabulary, mask token and template the examples belong to (`Meta`)
    skipped.jsonl      one line per prompt that has no example, with the reason
    unanswered.jsonl   of these, the prompts that a server did not answer: tries, and what it said last
    COMPLETE           written last: row count, bytes of the Parquet file, digest of meta.json
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

FORMAT_VERSION = 1
EXAMPLES_FILE, META_FILE, SKIPPED_FILE, MARKER_FILE = "examples.parquet", "meta.json", "skipped.jsonl", "COMPLETE"
UNANSWERED_FILE = "unanswered.jsonl"

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")


class DataError(ValueError):
    """Prompts or prepared data that cannot be used; the message says what was found and what to do. Commands exit with 2."""


class PrepareFailed(Exception):
    """Answering ended before its end; what was answered is kept, and the same command goes on. Commands exit with 1."""


@dataclass(frozen=True, kw_only=True)
class Meta:
    """What prepared examples belong to. Filled by `prepare`; counts are filled by `write_examples`."""

    target: str
    gguf_file: str | None = None
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
    prompt_field: str | None = None
    split: str = "train"  # of the source
    turns: Literal["last", "each"] = "last"
    server: str | None = None  # model name and interface of the server that answered; None: the process of `prepare` did
    finish_reasons: dict[str, int] = field(default_factory=dict)  # answers that ended with their end token, and those cut
    retokenized_answers: int = 0  # a server gave text only: their tokens may differ from those that were written
    truncated_answers: int = 0  # answers that reached max_new_tokens before their end token
    examples: dict[str, int] = field(default_factory=dict)  # per split
    skipped: dict[str, int] = field(default_factory=dict)  # per reason
    versions: dict[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION


def load_meta(path: Path) -> Meta:
    """Read the meta of a complete prepared directory. Raises DataError otherwise."""
    return open_prepared(path)[0]


def open_prepared(path: Path) -> tuple[Meta, object]:
    """Meta of a complete prepared directory, and the rows its Parquet file was written with. Raises DataError otherwise."""
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
    return _meta_from_json(meta_file, _read_json(meta_file)), marker.get("rows")


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
