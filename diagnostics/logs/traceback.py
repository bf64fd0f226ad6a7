"""A traceback as it was printed: its frames, its exception, and what was printed before it in the same chain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from diagnostics.logs.shapes import Frame

MAX_SOURCE_LINES = 4  # of one frame: Python 3.13 prints several


@dataclass(kw_only=True, slots=True)
class Traceback:
    """What was printed of one exception; `cause` is the one printed before it in the same chain."""

    stream: str
    first_line: int
    last_line: int
    thread: str = ""
    frames: list[Frame] = field(default_factory=list)
    exception: str = ""  # its class as printed; empty where the log ends before
    message: str = ""
    tail: list[tuple[int, str]] = field(default_factory=list)  # lines after the message's first, with their numbers
    cause: Traceback | None = None
    link: str = ""
    truncated: str = ""  # "start" or "end"
    interleaved: bool = False

    @property
    def is_stack(self) -> bool:
        """Frames without head and exception inside a log: a stack that was only printed, as anomaly mode does."""
        return self.truncated == "start" and not self.exception and self.first_line > MAX_SOURCE_LINES

    @property
    def text(self) -> str:
        """Class, message and what follows it."""
        return "\n".join((self.head, *(text for _, text in self.tail))) if self.tail else self.head

    @property
    def head(self) -> str:
        """Class and the first line of the message."""
        return f"{self.exception}: {self.message}" if self.message else self.exception

    @property
    def chain(self) -> Iterator[Traceback]:
        """This one, then what was printed before it."""
        at: Traceback | None = self
        while at is not None:
            yield at
            at = at.cause
