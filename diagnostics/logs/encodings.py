"""Which encoding a log has, by its first bytes, and its pieces as UTF-8 or Latin-1.

UTF-16 and UTF-32 are known by their mark, or by their line feeds. Two programs may have written one file: ASCII that follows
UTF-16 is read as it is, and zero bytes in other files are dropped, so that UTF-16 that was appended to them is read as far as
it is Latin-1.

Limit: where a file changes its encoding a line may be lost.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable

_PART_BYTES = 1 << 12
_LEAST_ASCII = 64  # bytes without a zero that cannot be UTF-16 by chance
_BOMS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)
_WIDE = ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be")
_MOST_FEEDS = 0.8
_COMPRESSED = {
    b"\x1f\x8b": "zcat",
    b"BZh": "bzcat",
    b"\xfd7zXZ": "xzcat",
    b"\x28\xb5\x2f\xfd": "zstdcat",
    b"PK\x03\x04": "unzip -p",
}
_CONTROLS = bytes(set(range(1, 32)) - set(b"\b\t\n\v\f\r\x1b\a"))
_REPLACED = "\ufffd".encode()
_MOST_STRANGE = 0.02  # of the bytes of a text


class Unreadable(Exception):
    """The file cannot be read as text; the message says what it is and what to do."""


def encoding(head: bytes) -> str:
    """The encoding of a file that begins with `head`. Raises Unreadable."""
    for mark, tool in _COMPRESSED.items():
        if head.startswith(mark):
            raise Unreadable(f"it is compressed: {tool} it and give `-` to read standard input")
    for bom, name in _BOMS:
        if head.startswith(bom):
            return name
    name = _by_line_feeds(head) or "utf-8"
    text = decoder(name)(head)  # without zeros: a file that a power failure cut may end in them
    strange = len(text) - len(text.translate(None, _CONTROLS)) + (text.count(_REPLACED) if name != "utf-8" else 0)
    if strange > _MOST_STRANGE * len(text) or (head and not text):
        raise Unreadable("it is binary, not a log: give text files")
    return name


def decoder(name: str) -> Callable[[bytes], bytes]:
    """What makes UTF-8 or Latin-1 of a file's pieces, given in order."""
    if name == "utf-8":
        return lambda piece: piece.replace(b"\0", b"") if b"\0" in piece else piece
    decode = codecs.getincrementaldecoder(name)(errors="replace").decode
    if name == "utf-8-sig":
        return lambda piece: decode(piece).replace("\0", "").encode()
    return lambda piece: b"".join(_part(piece[at : at + _PART_BYTES], decode) for at in range(0, len(piece), _PART_BYTES))


def _part(part: bytes, decode: Callable[[bytes], str]) -> bytes:
    wide = part.rfind(b"\0") + 1
    if len(part) - wide < _LEAST_ASCII or not part[wide:].isascii():
        return decode(part).encode()
    return decode(part[:wide]).encode() + part[wide:]


def _by_line_feeds(head: bytes) -> str | None:
    """The wide encoding in which nearly all line feeds are characters."""
    feeds = head.count(b"\n")
    if not feeds or b"\0" not in head:
        return None
    for name in _WIDE:
        if head.decode(name, errors="replace").count("\n") > _MOST_FEEDS * feeds:
            return name
    return None
