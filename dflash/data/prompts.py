"""Prompts from a JSONL or Parquet file, or from the hub: read, identified, split, and nothing dropped without a trace.

A prompt is a string (one user turn) or a list of {role, content} messages that ends with a user turn. Its id is the `id`
field of its row, or a hash of its content. Whether it is held out depends on the content alone, so a prompt is on the same
side whatever file it comes in, and equal prompts are never on both sides.

A row that cannot be a prompt is skipped with a reason; a file that cannot be read raises `DataError` with the place.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dflash.config import PrepareConfig
from dflash.data.chat import Message, PromptError
from dflash.data.meta import DataError, Split

ID_FIELD = "id"
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
_LOCAL_SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet")

Row = tuple[str, dict[str, Any]]  # where it stands ("line 3"), and its fields


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What the target is asked to answer."""

    sample_id: str
    messages: tuple[Message, ...]
    split: Split


def load_prompts(config: PrepareConfig) -> tuple[list[Prompt], list[tuple[str, str]]]:
    """Read `config.prompts`; return the prompts and the skipped (sample id or place, reason).

    Raises DataError when the source cannot be read, holds nothing, or has no field `config.prompt_field`.
    """
    prompts: dict[str, Prompt] = {}
    skipped: list[tuple[str, str]] = []
    fields: set[str] = set()
    for place, row in itertools.islice(_rows(config), config.limit):
        fields |= row.keys()
        named = row.get(ID_FIELD)
        sample_id = None if named is None else str(named)
        try:
            prompt = _prompt(row, sample_id, config)
            _require_new(prompt, prompts)
        except PromptError as error:
            skipped.append((sample_id or place, str(error)))
        else:
            prompts[prompt.sample_id] = prompt
    if not prompts and not skipped:
        raise DataError(f"{config.prompts} holds no prompts: expected a JSON object per line, or Parquet rows")
    if config.prompt_field not in fields:
        raise DataError(
            f"{config.prompts} has no field {config.prompt_field!r}, found {', '.join(sorted(fields)) or 'no fields'}: "
            "name the right one with --prompt-field"
        )
    return list(prompts.values()), skipped


def _prompt(row: dict[str, Any], sample_id: str | None, config: PrepareConfig) -> Prompt:
    if config.prompt_field not in row:
        raise PromptError(f"no field {config.prompt_field!r}")
    messages = _messages(row[config.prompt_field])
    digest = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).digest()
    heldout = int.from_bytes(digest[8:16], "big") < config.heldout_fraction * 2**64
    return Prompt(sample_id=sample_id or digest[:8].hex(), messages=tuple(messages), split="heldout" if heldout else "train")


def _require_new(prompt: Prompt, prompts: dict[str, Prompt]) -> None:
    before = prompts.get(prompt.sample_id)
    if before is not None:
        raise PromptError("repeated prompt" if before.messages == prompt.messages else "id of another prompt")


def _messages(value: Any) -> list[Message]:
    """The messages of a prompt field."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise PromptError(f"prompt is neither text nor messages but {type(value).__name__}")
    if not value:
        raise PromptError("empty prompt")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise PromptError("a message without text role and content")
    if any(_LONE_SURROGATE.search(message["content"]) for message in value):
        raise PromptError("a lone surrogate, which is no text")
    if value[-1]["role"] != "user":
        raise PromptError("messages do not end with a user turn")
    if not value[-1]["content"].strip():
        raise PromptError("empty prompt")
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _rows(config: PrepareConfig) -> Iterator[Row]:
    path = Path(config.prompts)
    if path.is_file():
        return _parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path)
    if path.suffix in _LOCAL_SUFFIXES or path.is_absolute() or path.exists():
        raise DataError(f"{path} is not a file: pass a JSONL or Parquet file, or a hub name, as --prompts")
    return _hub_rows(config)


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except ValueError as error:
                raise DataError(f"{path}, line {number}: no JSON ({error}); expected one object per line") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: a JSON {type(row).__name__}; expected one object per line")
            yield f"line {number}", row


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error


def _hub_rows(config: PrepareConfig) -> Iterator[Row]:
    """Rows of a hub data set, written `owner/name` or `owner/name:configuration`."""
    import datasets  # noqa: PLC0415  # takes seconds, and local files do not need it

    name, _, configuration = config.prompts.partition(":")
    try:
        rows = datasets.load_dataset(name, configuration or None, split=config.split, streaming=config.limit is not None)
        for number, row in enumerate(rows, start=1):
            yield f"row {number}", row
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read {config.prompts!r} from the hub, split {config.split!r} ({type(error).__name__}: {error}): "
            "pass a JSONL or Parquet file, or the hub name of a data set (owner/name:configuration)"
        ) from error
