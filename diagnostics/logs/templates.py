"""Lines and texts that differ in their digits only are looked at once: steps, dates, line numbers and addresses are what differs.

An address counts as digits where a bracket, a comma or a quotation mark ends it, so that no word can begin in it.

`Template` says for such lines where their parts stand; `once_for_all_digits` remembers what was found in such texts. Both give
exactly what a look at each of them would give: no expression here asks for one digit rather than another, and words that do are
named by the caller.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from diagnostics.logs.shapes import FRAME, DumpPart, Frame, Shape, Spans, shape_of, spans_of

_T = TypeVar("_T")
_Key = TypeVar("_Key")
_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_MAX_KNOWN = 4096  # texts of one kind
MAX_TEXT = 500  # characters of what is remembered
_DIGITS = re.compile(r"\d")
_ADDRESS = re.compile(rb"""0x[0-9a-fA-F]+(?=[]>),'"])""")


def zeroed(text: bytes) -> bytes:
    """With 0 for each digit, those of an address included, and as long as it was; as it is where that would make an address."""
    zeros = text.translate(_ZEROS)
    if b"0x" not in zeros:
        return zeros
    return _ADDRESS.sub(_zero_address, zeros) if zeros.count(b"0x") == text.count(b"0x") else text


def _zero_address(found: re.Match[bytes]) -> bytes:
    return b"0x" + b"0" * (len(found[0]) - 2)


def keep(known: dict[_Key, _T], key: _Key, value: _T, most: int = _MAX_KNOWN) -> _T:
    """Remember it, and nothing else once there is too much: what is needed comes again."""
    if len(known) >= most:
        known.clear()
    known[key] = value
    return value


def once_for_all_digits(look: Callable[[str], _T], special: re.Pattern[bytes] | None = None) -> Callable[[str], _T]:
    """`look`, called once for texts that differ in digits only; always where `special` is in the text with zeros, squeezed."""
    known: dict[bytes, _T] = {}

    def found(text: str) -> _T:
        if len(text) > MAX_TEXT:
            return look(text)
        key = zeroed(text.encode())
        if key in known:
            return known[key]
        value = look(text)
        if special is not None and special.search(b"".join(key.split())) is not None:
            return value
        return keep(known, key, value)

    return found


class Prefix(NamedTuple):
    """What loggers and launchers put before a line: whose it is (`text[begin:end]`), and where the line's own text begins."""

    whose: str
    begin: int
    end: int
    dated: bool
    at: int

    def stream(self, text: str) -> str:
        """The rank or process, "" where the line does not say."""
        return f"{self.whose} {text[self.begin : self.end]}" if self.whose else ""


class Template(NamedTuple):
    """Lines of one form. `spans` tells where a frame's file, line number and function stand in the line's own text."""

    prefix: Prefix
    end: int
    shape: Shape
    spans: Spans | None

    def shape_in(self, words: str) -> Shape:
        """The shape of a line of this form, whose own text is `words`."""
        if self.spans is None:
            return self.shape
        (file, file_end), (line, line_end), (function, function_end) = self.spans
        frame = Frame(words[file:file_end], int(words[line:line_end]), words[function:function_end])
        dump = self.shape.dump
        if dump is None:
            return Shape(FRAME, None, "", frame)
        by_py_spy = dump.frame is None
        part = DumpPart(dump.begins, "", None, None if by_py_spy else frame, frame if by_py_spy else None)
        return Shape(self.shape.is_, part)


def template_of(text: str, prefix: Prefix) -> Template | None:
    """The form of a printable ASCII line, or None where its digits stand in something else than a frame."""
    words = text[prefix.at :].rstrip()
    shape = shape_of(words)
    spans = spans_of(words, shape)
    if spans is None and not _without_digits(shape):
        return None
    return Template(prefix, prefix.at + len(words), shape, spans)


def _without_digits(shape: Shape) -> bool:
    named = shape.exception is not None and _DIGITS.search(shape.exception.name) is not None
    return shape.frame is None and shape.dump is None and not named and not _DIGITS.search(shape.text)
