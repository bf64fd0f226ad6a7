"""Is a file of a compile cache whole? Read its frame, never its meaning: unpickling a stranger's file runs its code.

Checked: pickles (their frames end where the file does), ELF libraries and cubins (their section table lies inside), JSON.
Texts are only checked for being empty.
"""

from __future__ import annotations

import json
import os
import pickletools
import struct
from pathlib import PurePosixPath
from typing import BinaryIO

_MAX_JSON_BYTES = 16 << 20
_ELF = (".so", ".o", ".cubin", ".hsaco")
_MAY_BE_EMPTY = (".lock", ".load_ok", ".py", ".txt")
_MAX_LOOSE_OPCODES = 100_000  # between frames there are few


def damage(file: BinaryIO, path: str, *, pickled: bool) -> str | None:
    """What is wrong with this file, or None. Raises OSError."""
    size = os.fstat(file.fileno()).st_size
    suffix = PurePosixPath(path).suffix
    if size == 0:
        return None if suffix in _MAY_BE_EMPTY or PurePosixPath(path).name == "lock" else "empty"
    if pickled:
        return _pickle(file, size)
    if suffix in _ELF:
        return _elf(file, size, suffix)
    if suffix in {".json", ".best_config"}:
        return _json(file, size)
    return None


def _pickle(file: BinaryIO, size: int) -> str | None:
    try:
        end = _end_of_pickle(file, size)
    except (ValueError, struct.error, OverflowError, MemoryError):
        return "cut off or not a pickle"
    if end is None or end == size:
        return None
    return f"cut off: {size:,} bytes of at least {end:,}" if end > size else "something follows its end"


def _end_of_pickle(file: BinaryIO, size: int) -> int | None:
    """Where it ends: steps over its frames, and over the opcodes between them without running them. None: too long to read."""
    file.seek(0)
    for number, (opcode, argument, position) in enumerate(pickletools.genops(file)):
        if number == 0 and opcode.name != "PROTO":
            break
        if opcode.name == "STOP":
            return (position or 0) + 1
        if number > _MAX_LOOSE_OPCODES:
            return None
        if opcode.name == "FRAME":
            end = file.tell() + int(argument or 0)
            if end > size:
                return end
            file.seek(end - 1)
            if file.read(1) == b"." and end == size:
                return end
    raise ValueError("no pickle")


def _elf(file: BinaryIO, size: int, suffix: str) -> str | None:
    file.seek(0)
    head = file.read(64)
    if head[:4] != b"\x7fELF":
        return None if suffix == ".o" else "not an ELF library"  # another system's objects
    if len(head) < 64:
        return "cut off"
    if head[4] != 2 or head[5] != 1:
        return None  # 32 bits or big endian: not read
    (sections_at,) = struct.unpack_from("<Q", head, 40)
    section_bytes, sections = struct.unpack_from("<HH", head, 58)
    end = sections_at + section_bytes * sections
    return f"cut off: {size:,} bytes of at least {end:,}" if end > size else None


def _json(file: BinaryIO, size: int) -> str | None:
    if size > _MAX_JSON_BYTES:
        return None
    file.seek(0)
    try:
        json.loads(file.read())
    except (ValueError, RecursionError):
        return "cut off or not JSON"
    return None
