"""Lines and texts that differ in their digits only are looked at once: steps, dates, line numbers and addresses are what differs.

An address counts as digits where a bracket, a comma or a quotation mark ends it, so that no word can begin in it.

`Template` says for such lines where their parts stand; `once_for_all_digits` remembers what was found in such texts. Both give
exactly what a look at each of them would give: no expression here asks for one digit rather than another, and words that do are
named by the caller.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from diagnostics.logs.shapes import FRAME, HEADER, DumpPart, Frame, Shape, Span, Spans, shape_of, spans_of

_T = TypeVar("_T")
_Key = TypeVar("_Key")
_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_MAX_KNOWN = 4096  # texts of one kind
MAX_TEXT = 800  # characters of what is remembered: a GPU out of memory says 600 in one line
_DIGITS = re.compile(r"\d")
_ADDRESS = re.compile(rb"""0x[0-9a-fA-F]+(?=[]>),'"])""")


def zeroed(text: bytes) -> bytes:
    """With 0 for each digit, those of an address included, and as long as it was; as it is where that would make an address."""
    zeros = text.translate(_ZEROS)
    if b"0x" not in zeros:
        return zeros
    return _ADDRESS.sub(_zero_address, zeros) if zeros.count(b"0x") == text.count(b"0x") else text


def zeroed_lines(piece: bytes, lines: list[bytes]) -> list[bytes]:
    """What `zeroed` gives for each of the lines of `piece`, mostly at once."""
    zeros = piece.translate(_ZEROS)
    if b"0x" in zeros:
        if zeros.count(b"0x") != piece.count(b"0x"):
            return [zeroed(line) for line in lines]
        zeros = _ADDRESS.sub(_zero_address, zeros)
    return zeros.split(b"\n")


def _zero_address(found: re.Match[bytes]) -> bytes:
    return b"0x" + b"0" * (len(found[0]) - 2)


def keep(known: dict[_Key, _T], key: _Key, value: _T, most: int = _MAX_KNOWN) -> _T:
    """Remember it, and nothing else once there is too much: what is needed comes again."""
    if len(known) >= most:
        known.clear()
    known[key] = value
    return value


def once_for_all_digits(look: Callable[[str], _T], special: Callable[[bytes], bool] | None = None) -> Callable[[str], _T]:
    """`look`, called once for texts that differ in digits only; always where that is `special`, by the text with zeros."""
    known: dict[bytes, _T] = {}

    def found(text: str) -> _T:
        if len(text) > MAX_TEXT:
            return look(text)
        key = zeroed(text.encode())
        if key in known:
            return known[key]
        value = look(text)
        if special is not None and special(key):
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


@dataclass(kw_only=True, slots=True)
class Template:
    """Lines of one form. `spans` tells where a frame's file, line number and function stand in the line's own text."""

    prefix: Prefix
    end: int
    shape: Shape
    spans: Spans | None
    # What the prefix and the shape say, for what is done at every line.
    is_: int = field(init=False)  # -1 for a line that may be part of a dump
    is_alone: bool = field(init=False)  # an exception, with or without a traceback
    begins_run: bool = field(init=False)  # a head or such an exception, see `floods`
    numbered: tuple[Span, ...] = field(default=(), init=False)  # names with digits in a frame: its file's, its function
    begin: int = field(init=False)
    behind: int = field(init=False)
    is_plain: bool | None = field(default=None, init=False)  # has no trigger; None: not looked for yet
    names: dict[bytes, str] = field(default_factory=dict, init=False)  # of streams, by what stands in the prefix

    def __post_init__(self) -> None:
        self.is_ = self.shape.is_ if self.shape.dump is None else -1
        self.is_alone = self.shape.dump is None and self.shape.exception is not None and self.shape.exception.alone
        self.begins_run = self.is_alone or (self.is_ == HEADER and not self.shape.group)
        if self.spans is not None and self.shape.frame is not None:
            (file, file_end), _, function = self.spans
            name = file_end - len(self.shape.frame.file.rpartition("/")[2])
            texts = (((name, file_end), self.shape.frame.file[name - file :]), (function, self.shape.frame.function))
            at = self.prefix.at
            self.numbered = tuple((at + begin, at + end) for (begin, end), text in texts if _DIGITS.search(text))
        self.begin, self.behind = self.prefix.begin, self.prefix.end

    def stream(self, raw: bytes) -> str:
        """The rank or process of a line of this form, "" where the line does not say."""
        whose = raw[self.begin : self.behind]
        name = self.names.get(whose)
        return name if name is not None else keep(self.names, whose, self.prefix.stream(raw.decode()))

    def words(self, raw: bytes) -> bytes:
        """The own text of a line of this form."""
        return raw[self.prefix.at : self.end]

    def shape_in(self, words: str) -> Shape:
        """The shape of a line of this form, whose own text is `words`."""
        if self.spans is None:
            return self.shape
        frame, dump = self.frame_in(words), self.shape.dump
        if dump is None:
            return Shape(FRAME, None, "", frame)
        by_py_spy = dump.frame is None
        part = DumpPart(dump.begins, "", None, None if by_py_spy else frame, frame if by_py_spy else None)
        return Shape(self.shape.is_, part)

    def frame_in(self, words: str) -> Frame:
        """The frame in the own text of a line of this form, which has one."""
        assert self.spans is not None
        (file, file_end), (line, line_end), (function, function_end) = self.spans
        return Frame(words[file:file_end], int(words[line:line_end]), words[function:function_end])


def template_of(text: str, prefix: Prefix) -> Template | None:
    """The form of a printable ASCII line, or None where its digits stand in something else than a frame."""
    words = text[prefix.at :].rstrip()
    shape = shape_of(words)
    spans = spans_of(words, shape)
    if spans is None and not _without_digits(shape):
        return None
    return Template(prefix=prefix, end=prefix.at + len(words), shape=shape, spans=spans)


def _without_digits(shape: Shape) -> bool:
    named = shape.exception is not None and _DIGITS.search(shape.exception.name) is not None
    return shape.frame is None and shape.dump is None and not named and not _DIGITS.search(shape.text)
