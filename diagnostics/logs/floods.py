"""Failures that come again and again: a run of one stream's lines that came before, but for digits, counts what it counted then.

A `Run` begins with a traceback's head or with an exception that stands alone, where nothing else of its stream is open, and ends
where the next line surely ends its message: with such a line again, with a line that is dated where the message is not, or
when more lines followed than a message keeps. Its lines are held back until then. What they counted is remembered where digits
cannot matter to it; `search` reads them one by one if they are new, or if their group still needs evidence, and the message alone
where its numbers may still say something. A traceback of which only the message is new, and names no known kind, is counted by
what its frames counted.

Limit: lines that carry no form (`templates`), exception groups and dumps are never held.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diagnostics.logs.shapes import EXCEPTION, HEADER, LINK
from diagnostics.logs.templates import Template

MAX_LINES = 400
MAX_KNOWN, MAX_KNOWN_BYTES = 512, 8000  # runs, and what one of them says
_MAX_TAIL = 12
_STRUCTURE = (HEADER, EXCEPTION, LINK)

Key = tuple[bytes, ...]


@dataclass(slots=True)
class Run:
    """Lines held back. `keys` are they with 0 for each digit, and names that have digits."""

    keys: list[bytes] = field(default_factory=list)
    held: list[tuple[bytes, Template, int]] = field(default_factory=list)
    dated: bool | None = None  # of the exception's line; None before it came
    num_after: int = 0  # lines since then
    num_exceptions: int = 0
    linked: bool = False  # the next one of a chain is awaited

    @property
    def first_line(self) -> int:
        """Its number."""
        return self.held[0][2]

    @property
    def last_line(self) -> int:
        """Its number."""
        return self.held[-1][2]

    def ends_before(self, template: Template) -> bool:
        """Whether a line of this form ends the message that stands last in the run."""
        is_ = template.is_
        if is_ == HEADER:
            return not self.linked
        if self.dated is None or is_ == LINK:
            return False
        return template.prefix.dated != self.dated or template.is_alone or self.num_after >= _MAX_TAIL

    def add(self, raw: bytes, key: bytes, template: Template, number: int) -> None:
        """Hold back line `number`."""
        self.keys.append(key)
        self.held.append((raw, template, number))
        if template.numbered:  # failures are told apart by names, whole
            self.keys += [raw[begin:end] for begin, end in template.numbered]
        is_ = template.is_
        if is_ not in _STRUCTURE:
            self.num_after += 1
        elif is_ == EXCEPTION:
            self.dated, self.num_after, self.linked = template.prefix.dated, 0, False
            self.num_exceptions += 1
        else:
            self.linked = is_ == LINK
            self.dated = self.dated if self.linked else None

    @property
    def key(self) -> Key | None:
        """What is the same for runs that count the same; None for too much text."""
        return tuple(self.keys) if sum(map(len, self.keys)) <= MAX_KNOWN_BYTES else None

    @property
    def exception(self) -> tuple[str, str] | None:
        """The exception and the message, where the run has one only and ends with them."""
        raw, template, _ = self.held[-1]
        if template.is_ != EXCEPTION or self.num_exceptions != 1:
            return None
        exception, _, message = template.words(raw).decode().strip().partition(":")
        return exception, message.strip()

    @property
    def frames(self) -> tuple[Key, str, str] | None:
        """All but the message, the exception and the message, where the run is one traceback that ends with them."""
        ending = self.exception if len(self.held) > 1 else None
        return ((*self.keys[:-1], ending[0].encode()), *ending) if ending is not None else None
