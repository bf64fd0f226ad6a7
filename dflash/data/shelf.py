"""Prompts and their tokens on disk while they are answered: any number of them, in the memory of a few.

They stand in a scratch database beside the output (`dflash.data.scratch`), in the order in which they came; it also knows which
contents and ids it holds, so that repetitions are found. Whole prompts and token ids are read one at a time.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash.data.chat import Message
from dflash.data.generate import Question
from dflash.data.meta import Split
from dflash.data.scratch import on_disk, scratch_database

_TABLES = (
    "contents (digest BLOB PRIMARY KEY) WITHOUT ROWID",
    "prompts (place INTEGER PRIMARY KEY, sample_id TEXT NOT NULL UNIQUE, split TEXT NOT NULL, given INTEGER, content BLOB)",
    "questions (place INTEGER PRIMARY KEY, tokens INTEGER NOT NULL, ids BLOB NOT NULL)",
)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What the target is asked to answer."""

    sample_id: str
    messages: tuple[Message, ...]
    split: Split
    tools: tuple[dict[str, Any], ...] = ()  # descriptions of functions, for the chat template
    given: tuple[Message, ...] = ()  # the source's own answer


class PromptShelf:
    """Prompts in their order, and the questions that they became. Raises DataError when the disk refuses."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._database = scratch_database(directory, *_TABLES)
        weakref.finalize(self, self._database.close)

    def has_content(self, digest: bytes) -> bool:
        """Whether a prompt of this content is there."""
        return self._database.execute("SELECT 1 FROM contents WHERE digest = ?", (digest,)).fetchone() is not None

    def add_content(self, digest: bytes) -> None:
        """Note the content of a prompt."""
        with on_disk(self._directory):
            self._database.execute("INSERT INTO contents VALUES (?)", (digest,))

    def __contains__(self, sample_id: str) -> bool:
        return self._database.execute("SELECT 1 FROM prompts WHERE sample_id = ?", (sample_id,)).fetchone() is not None

    def put(self, prompt: Prompt) -> None:
        """Add a prompt; one of the same id gives its place to it."""
        values = (prompt.sample_id, prompt.split, bool(prompt.given), pickle.dumps(prompt, pickle.HIGHEST_PROTOCOL))
        with on_disk(self._directory):
            self._database.execute(
                "INSERT INTO prompts (sample_id, split, given, content) VALUES (?, ?, ?, ?) ON CONFLICT (sample_id) DO UPDATE "
                "SET split = excluded.split, given = excluded.given, content = excluded.content",
                values,
            )

    def __len__(self) -> int:
        return int(self._database.execute("SELECT count(*) FROM prompts").fetchone()[0])

    def __iter__(self) -> Iterator[Prompt]:
        for (content,) in self._database.execute("SELECT content FROM prompts ORDER BY place"):
            yield _prompt(content)

    def get(self, sample_id: str) -> Prompt | None:
        """The prompt of this id, if there is one."""
        found = self._database.execute("SELECT content FROM prompts WHERE sample_id = ?", (sample_id,)).fetchone()
        return _prompt(found[0]) if found else None

    def put_question(self, sample_id: str, ids: Sequence[int]) -> None:
        """Add the tokens of a prompt that is there."""
        with on_disk(self._directory):
            self._database.execute(
                "INSERT INTO questions SELECT place, ?, ? FROM prompts WHERE sample_id = ?",
                (len(ids), np.array(ids, dtype="<i4").tobytes(), sample_id),
            )

    def num_questions(self) -> int:
        """How many prompts have become questions."""
        return int(self._database.execute("SELECT count(*) FROM questions").fetchone()[0])

    def questions(self, split: Split | None = None) -> Iterator[tuple[Question, bool]]:
        """Questions in the order of their prompts, of one side or of both, and whether the source had an answer."""
        for sample_id, ids, given in self._database.execute(
            "SELECT sample_id, ids, given FROM questions JOIN prompts USING (place) WHERE ? IS NULL OR split = ? ORDER BY place",
            (split, split),
        ):
            yield _question(sample_id, ids), bool(given)

    def longest_first(self) -> Iterator[Question]:
        """Questions by length, equal ones by id."""
        for (place,) in self._database.execute(
            "SELECT place FROM questions JOIN prompts USING (place) ORDER BY tokens DESC, sample_id"
        ):
            found = self._database.execute(
                "SELECT sample_id, ids FROM questions JOIN prompts USING (place) WHERE place = ?", (place,)
            )
            yield _question(*found.fetchone())


def _prompt(content: bytes) -> Prompt:
    found = pickle.loads(content)  # noqa: S301 - this process wrote it, into a file that no other can open
    assert isinstance(found, Prompt)
    return found


def _question(sample_id: str, ids: bytes) -> Question:
    return Question(sample_id=sample_id, ids=np.frombuffer(ids, dtype="<i4").tolist())
