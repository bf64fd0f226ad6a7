"""Prompts from a source of rows: recognised, identified, split, and nothing dropped without a trace.

The id of a prompt is the `id` field of its row, or a hash of its content. Whether it is held out depends on the content alone,
so a prompt is on the same side whatever source it comes in, and equal prompts are never on both sides. With `turns` each, a
conversation of several user turns gives a prompt for each of them (ids ID#1, ID#2, ..., all on the side of the whole), so that
every answer is asked for as a server would be asked, also by templates that rewrite earlier turns.

A row that cannot be a prompt is skipped with a reason; a source that cannot be read, or whose columns no layout explains,
raises `DataError` with what was found.

Prompts stand on disk (`dflash.data.shelf`); what is skipped is listed in memory, by id and reason.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from dataclasses import dataclass
from typing import Any

from dflash.command_config import PrepareConfig
from dflash.data.chat import PromptError
from dflash.data.layouts import EXPECTED, LONE_SURROGATE, Conversation, read_conversation, recognise
from dflash.data.meta import DataError
from dflash.data.shelf import Prompt, PromptShelf
from dflash.data.sources import read_rows

ID_FIELD = "id"
_ROWS_TO_RECOGNISE = 100  # a source is refused when none of its first rows has a known column


@dataclass(frozen=True, kw_only=True)
class PromptList:
    """The prompts of a source, and what became of the rest."""

    prompts: PromptShelf
    skipped: list[tuple[str, str]]  # sample id or place, reason
    field: str  # the column that holds the prompts


def load_prompts(config: PrepareConfig) -> PromptList:
    """Read `config.prompts`.

    Raises DataError when the source cannot be read, holds nothing, or has no column that holds prompts.
    """
    prompts = PromptShelf(config.output.parent)
    skipped: list[tuple[str, str]] = []
    fields: set[str] = set()
    unread: list[tuple[str, dict[str, Any]]] = []  # rows before the first that says which column it is
    field = config.prompt_field
    rows = read_rows(config.prompts, split=config.split, stream=config.limit is not None)
    columns: dict[str, set[str]] = {}  # of each file of several
    for place, row in itertools.islice(rows, config.limit):
        if file := place.rpartition(", ")[0]:
            columns.setdefault(file, set()).update(row)
        fields |= row.keys()
        unread.append((place, row))
        field = field or _recognised(row, config)
        if field is None:
            if len(unread) >= _ROWS_TO_RECOGNISE:
                break
            continue
        for waiting_place, waiting in unread:
            _take(waiting_place, waiting, field, config, prompts, skipped)
        unread.clear()
    if not fields and not unread:
        raise DataError(f"{config.prompts} holds no prompts: expected a JSON object per line, or Parquet rows")
    if field is None or field not in fields:
        raise DataError(_no_field(config, field, fields))
    for file, found in columns.items():
        if field not in found:
            raise DataError(
                f"{file} has no field {field!r}, which others of {config.prompts} have, found {', '.join(sorted(found))}: "
                f"leave that file out, or prepare it apart with --prompt-field"
            )
    return PromptList(prompts=prompts, skipped=skipped, field=field)


def _recognised(row: dict[str, Any], config: PrepareConfig) -> str | None:
    try:
        return recognise([name for name, value in row.items() if value is not None])
    except DataError as error:
        raise DataError(f"{config.prompts}: {error}") from error


def _no_field(config: PrepareConfig, field: str | None, fields: set[str]) -> str:
    found = ", ".join(sorted(fields)) or "no fields"
    if field is None:
        return f"{config.prompts} has the columns {found}; expected one of {EXPECTED}: name the right one with --prompt-field"
    return f"{config.prompts} has no field {field!r}, found {found}: name the right one with --prompt-field"


def _take(
    place: str,
    row: dict[str, Any],
    field: str,
    config: PrepareConfig,
    prompts: PromptShelf,
    skipped: list[tuple[str, str]],
) -> None:
    named = row.get(ID_FIELD)
    sample_id = None if named is None else str(named)
    if sample_id is not None and LONE_SURROGATE.search(sample_id):
        skipped.append((place, "an id with a lone surrogate, which is no text"))
        return
    try:
        read = read_conversation(row, field)
        digest = _digest(read)
        sample_id = sample_id or digest[:8].hex()
        _require_new(again=prompts.has_content(digest), taken=sample_id in prompts or f"{sample_id}#1" in prompts)
    except PromptError as error:
        skipped.append((str(named) if named is not None else place, str(error)))
        return
    prompts.add_content(digest)
    heldout = int.from_bytes(digest[8:16], "big") < config.heldout_fraction * 2**64
    whole = Prompt(
        sample_id=sample_id,
        messages=read.messages,
        split="heldout" if heldout else "train",
        tools=read.tools,
        given=read.given,
    )
    for prompt in _by_turn(whole) if config.turns == "each" else [whole]:
        prompts.put(prompt)


def _by_turn(whole: Prompt) -> list[Prompt]:
    """A prompt for each turn that is answered in the conversation, the last one included."""
    messages = whole.messages
    ends = [
        i
        for i, message in enumerate(messages, start=1)
        if message["role"] in ("user", "tool") and (i == len(messages) or messages[i]["role"] == "assistant")
    ]
    if len(ends) == 1:
        return [whole]
    parts = []
    for number, end in enumerate(ends, start=1):
        given = whole.given if end == len(messages) else (messages[end],)
        name = f"{whole.sample_id}#{number}"
        parts.append(dataclasses.replace(whole, sample_id=name, messages=messages[:end], given=given))
    return parts


def _require_new(*, again: bool, taken: bool) -> None:
    if again or taken:
        raise PromptError("repeated prompt" if again else "id of another prompt")


def _digest(read: Conversation) -> bytes:
    """Identifies what is asked: the messages, and the tools where there are any."""
    content: Any = [*read.messages, {"tools": read.tools}] if read.tools else list(read.messages)
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).digest()
