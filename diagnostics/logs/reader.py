"""A log file as blocks of whole lines, and one line as plain text of one rank. Reads forward, keeps one block in memory.

Lines are numbered by line feeds, as an editor numbers them. Text is what `encodings` finds; a line
that is neither is read as Latin-1. Colours and cursor movements are removed, a progress bar's carriage returns split
a line, and what loggers and launchers put before a line (`[rank0]:`, `[default1]:`, `(Worker pid=7)`, dates) is taken off:
the rank becomes the line's stream, so that interleaved ranks are read apart.

Limits: compressed and binary files are refused; the two halves of a terminal that was split side by side are not told apart.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, NamedTuple

from diagnostics.logs.encodings import decoder, encoding
from diagnostics.logs.shapes import Shape, shape_of
from diagnostics.logs.templates import MAX_TEXT, Prefix, Template, keep, template_of, zeroed

BLOCK_BYTES = 1 << 20  # also the longest line: a longer one is cut, at a carriage return where it has one
HEAD_BYTES = 1 << 16
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\^_=>()][0B]?|[\x00\x08\x0e\x0f]")
_PREFIX = re.compile(
    r"""\[(?:rank|default|local_rank|worker|node)[ _:]?(?P<rank>\d+)\]:?\ ?
      | \[\d+,(?P<mpi>\d+)\]<std(?:out|err)>:\ ?
      | (?P<srun>\d{1,4}):[ ]
      | \((?P<actor>[\w.]+\ pid=\d+[^)]*)\)[ ]
      | (?P<date>\[?\d{4}-\d\d-\d\d[T\ ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|\ ?[+-]\d\d:?\d\d)?\]?:?[\ \t]?(?:std(?:out|err)\ [FP]\ )?)
      | (?P<glog>\[?[IWEF]\d{3,4}\ \d\d:\d\d:\d\d\.\d+\ +(?:\d+\ )?\S+:\d+\]\ ?(?:\[[-\w]+/[-\w/]+\]\ )?)
      | (?P<clock>\[\d\d:\d\d:\d\d\]\ )""",
    re.VERBOSE,
)
_MAX_PREFIXES = 4
_PREFIX_BEGINS = frozenset("[(0123456789IWEF")
_DATES = {"date", "glog", "clock"}
_STREAM_NAMES = {"rank": "rank", "mpi": "rank", "srun": "rank", "actor": "actor"}


class Line(NamedTuple):
    """One line. `stream` names whose it is ("" where the log does not say); `text` keeps its indentation."""

    stream: str
    text: str
    shape: Shape
    dated: bool = False  # a logger put a date before it


def blocks(file: BinaryIO, end: int | None = None) -> Iterator[bytes]:
    """The file's content, up to byte `end` of it, as UTF-8 or Latin-1 blocks that end with a line. Raises Unreadable."""
    head = file.read(HEAD_BYTES if end is None else min(HEAD_BYTES, end))
    return whole_lines(itertools.chain([head], pieces(file, end)), decoder(encoding(head)))


def size_now(file: BinaryIO) -> int | None:
    """Bytes of an open file at this moment, to end there however fast it grows; None for what tells no size, as in /proc."""
    return os.fstat(file.fileno()).st_size or None


def pieces(file: BinaryIO, end: int | None = None, size: int | None = None) -> Iterator[bytes]:
    """What follows in the file, up to byte `end` of it, `size` bytes at once."""
    size = BLOCK_BYTES if size is None else size
    while piece := file.read(size if end is None else min(size, end - file.tell())):
        yield piece


def whole_lines(read: Iterable[bytes], decode_piece: Callable[[bytes], bytes]) -> Iterator[bytes]:
    """Pieces, decoded, as blocks that end with a line."""
    kept = b""
    for piece in read:
        kept += decode_piece(piece)
        end = _end_of_lines(kept)
        if end:
            yield kept[:end]
            kept = kept[end:]
    if kept:
        yield kept


def lines(raw: bytes, key: bytes | None = None) -> tuple[Line, ...]:
    """The parts of one raw line, without its line feed: more than one where carriage returns split it. `key` is `zeroed(raw)`."""
    known = _known.get(raw)
    if known is not None:
        return known
    template = template_for(raw, zeroed(raw) if key is None else key)
    if template is None:
        return keep(_known, raw, _lines(raw)) if len(raw) <= MAX_TEXT else _lines(raw)
    words = template.words(raw).decode()
    return keep(_known, raw, (Line(template.stream(raw), words, template.shape_in(words), template.prefix.dated),))


def template_for(raw: bytes, key: bytes) -> Template | None:
    """The form of a line, where it has one. `key` is `zeroed(raw)`."""
    if key in _templates:
        return _templates[key]
    return keep(_templates, key, _template(raw)) if len(raw) <= MAX_TEXT else None


def _lines(raw: bytes) -> tuple[Line, ...]:
    """The same, looked at anew."""
    text = decode(raw)
    if text.isprintable():  # a quick look: most lines have neither colours nor carriage returns
        return (_line(text),)
    parts = [part for part in _ESCAPES.sub("", text).split("\r") if part]
    return tuple(_line(part) for part in parts) or (_line(""),)


def _template(raw: bytes) -> Template | None:
    text = decode(raw)
    return template_of(text, _prefix(text)) if raw.isascii() and text.isprintable() else None


_templates: dict[bytes, Template | None] = {}  # by line `zeroed`; None for lines that have no form
_known: dict[bytes, tuple[Line, ...]] = {}


def decode(raw: bytes) -> str:
    """UTF-8, or Latin-1 where it is not that."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _line(text: str) -> Line:
    prefix = _prefix(text)
    words = text[prefix.at :].rstrip()
    return Line(prefix.stream(text), words, shape_of(words), prefix.dated)


def _prefix(text: str) -> Prefix:
    whose, begin, end, dated, at = "", 0, 0, False, 0
    for _ in range(_MAX_PREFIXES):
        found = _PREFIX.match(text, at) if text[at : at + 1] in _PREFIX_BEGINS else None
        if found is None:
            break
        at, name = found.end(), found.lastgroup or ""
        if name in _DATES:
            dated = True
        else:
            whose, (begin, end) = _STREAM_NAMES[name], found.span(name)
    return Prefix(whose, begin, end, dated, at)


def _end_of_lines(kept: bytes) -> int:
    end = kept.rfind(b"\n") + 1
    if not end and len(kept) >= BLOCK_BYTES:
        return kept.rfind(b"\r") + 1 or len(kept)
    return end
