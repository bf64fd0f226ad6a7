"""What the target wrote to one prompt, and how it came here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dflash.batch import Example
from dflash.data.generate import Question

Finish = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer in tokens. Filled by `prepare` or by the client of a server."""

    ids: tuple[int, ...]  # ends with an end token exactly when `finish` is "stop"
    finish: Finish
    exact: bool = True  # False: a server gave text only, which was tokenized here

    @classmethod
    def of(cls, ids: Sequence[int], end_token_ids: Collection[int], *, exact: bool = True) -> Answer:
        """An answer that was stopped by its last token if that is an end token, else by its length."""
        return cls(ids=tuple(ids), finish="stop" if ids and ids[-1] in end_token_ids else "length", exact=exact)


@dataclass(frozen=True, kw_only=True)
class Unanswered:
    """A question that a server did not answer, after all tries."""

    sample_id: str
    reason: str  # short: equal reasons are counted together
    detail: str  # what the server said last
    tries: int


def to_example(question: Question, answer: Answer) -> Example:
    """What was asked and what was written; supervised is what was written."""
    ids = np.array([*question.ids, *answer.ids], dtype=np.int32)
    return Example(sample_id=question.sample_id, ids=ids, loss_mask=np.arange(len(ids)) >= len(question.ids))


def record_of(answer: Answer) -> dict[str, Any]:
    """An answer as JSON values."""
    return {"answer": list(answer.ids), "finish": answer.finish, "exact": answer.exact}


def from_record(record: dict[str, Any]) -> Answer:
    """Read back what `record_of` made. Raises KeyError, TypeError or ValueError on anything else."""
    if record["finish"] not in ("stop", "length") or not isinstance(record["exact"], bool):
        raise ValueError
    return Answer(ids=tuple(int(token) for token in record["answer"]), finish=record["finish"], exact=record["exact"])
