"""Answers are kept as they come: a `prepare` that is killed after hours goes on where it stopped.

Answers stand in `.NAME.answers/` beside the output NAME until that is published. A line counts only when it is whole and
matches its question, and the journal is used again only under the same fingerprint of everything that decides an answer
(target, template, decoding). Answers do not depend on their batch, so going on gives what one go would have given.

Answers are read from there one at a time; where each stands is in a scratch database beside them.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import io
import json
import os
import shutil
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dflash.data.answers import Answer, Unanswered, from_record, record_of
from dflash.data.generate import Question
from dflash.data.meta import UNANSWERED_FILE, DataError
from dflash.data.scratch import on_disk, scratch_database

ANSWERS_FILE, FINGERPRINT_FILE = "answers.jsonl", "fingerprint.json"
_PLACES = "places (sample_id TEXT PRIMARY KEY, digest TEXT, start INTEGER, size INTEGER) WITHOUT ROWID"


class AnswerJournal:
    """The answers of an unfinished `prepare`, of this go and earlier ones; a context manager, held by one process at a time.

    Raises DataError when another process holds the journal, when
    it belongs to other settings, or when the disk refuses.
    """

    def __init__(self, output: Path, fingerprint: Mapping[str, Any]) -> None:
        self.directory = output.with_name(f".{output.name}.answers")
        self._fingerprint = json.loads(json.dumps(fingerprint))
        self._places: sqlite3.Connection | None = None
        self._file: io.FileIO | None = None
        self._bytes = 0  # of whole lines

    def __enter__(self) -> Self:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._file = (self.directory / ANSWERS_FILE).open("a+b", buffering=0)
            self._lock()
            self._check_fingerprint()
            self._places = scratch_database(self.directory, _PLACES)
            self._read()
        except OSError as error:
            self._close()
            raise DataError(f"{self.directory}: cannot keep answers there ({error})") from error
        except DataError:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._close()

    def has(self, question: Question) -> bool:
        """Whether exactly this question is answered."""
        return self._place(question) is not None

    def take(self, question: Question) -> Answer | None:
        """The answer to exactly this question."""
        place = self._place(question)
        if place is None:
            return None
        assert self._file is not None
        start, size = place
        try:
            return from_record(json.loads(os.pread(self._file.fileno(), size, start)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self._file.name}: the answer to {question.sample_id!r} cannot be read back ({error})") from error

    def append(self, questions: Sequence[Question], answers: Sequence[Answer]) -> None:
        """Keep the answers of one batch; they are on the disk when this returns."""
        assert self._file is not None
        digests = [_digest(question) for question in questions]
        lines = [
            (json.dumps({"sample_id": question.sample_id, "question": digest, **record_of(answer)}) + "\n").encode()
            for question, digest, answer in zip(questions, digests, answers, strict=True)
        ]
        try:
            rest = memoryview(b"".join(lines))
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise DataError(
                f"{self._file.name}: cannot keep answers ({error}); make room and run the same command again, it goes on there"
            ) from error
        for question, digest, line in zip(questions, digests, lines, strict=True):
            self._note(question.sample_id, digest, line)

    def list_unanswered(self, unanswered: Sequence[Unanswered]) -> Path:
        """Write the questions of this go that have no answer beside the answers; they are asked again by the next go."""
        file = self.directory / UNANSWERED_FILE
        try:
            file.write_text("".join(json.dumps(dataclasses.asdict(one)) + "\n" for one in unanswered), encoding="utf-8")
        except OSError as error:
            raise DataError(f"{file}: cannot list what was not answered ({error})") from error
        return file

    def remove(self) -> None:
        """Delete the journal; its answers are published."""
        shutil.rmtree(self.directory)

    def _lock(self) -> None:
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{self.directory} is in use by another process: wait for it, or choose another --output") from error

    def _check_fingerprint(self) -> None:
        file = self.directory / FINGERPRINT_FILE
        if not file.exists() or self._size() == 0:
            file.write_text(json.dumps(self._fingerprint, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            return
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            before = {}
        different = sorted(k for k in before.keys() | self._fingerprint.keys() if before.get(k) != self._fingerprint.get(k))
        if different:
            raise DataError(
                f"{self.directory} holds answers that were made with another {', '.join(different)}: "
                "use the same settings to go on, or remove the directory to begin again"
            )

    def _size(self) -> int:
        assert self._file is not None
        return os.fstat(self._file.fileno()).st_size

    def _read(self) -> None:
        """Read whole lines; cut off what a crash left of a last one."""
        assert self._file is not None
        with (self.directory / ANSWERS_FILE).open("rb") as lines:
            for line in lines:
                try:
                    record = json.loads(line) if line.endswith(b"\n") else None
                    if record is None:
                        break
                    from_record(record)
                    sample_id, digest = str(record["sample_id"]), str(record["question"])
                except (ValueError, KeyError, TypeError):
                    break
                self._note(sample_id, digest, line)
        self._file.truncate(self._bytes)

    def _note(self, sample_id: str, digest: str, line: bytes) -> None:
        """The next line of the file is this answer's; a later one counts."""
        assert self._places is not None
        with on_disk(self.directory):
            self._places.execute("INSERT OR REPLACE INTO places VALUES (?, ?, ?, ?)", (sample_id, digest, self._bytes, len(line)))
        self._bytes += len(line)

    def _place(self, question: Question) -> tuple[int, int] | None:
        assert self._places is not None
        found = self._places.execute(
            "SELECT start, size FROM places WHERE sample_id = ? AND digest = ?", (question.sample_id, _digest(question))
        ).fetchone()
        return None if found is None else (int(found[0]), int(found[1]))

    def _close(self) -> None:
        if self._places is not None:
            self._places.close()
            self._places = None
        if self._file is not None:
            self._file.close()
            self._file = None


def _digest(question: Question) -> str:
    return hashlib.sha256(json.dumps([int(token) for token in question.ids]).encode()).hexdigest()[:16]
