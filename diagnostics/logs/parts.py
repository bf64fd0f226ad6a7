"""One log file, read whole: a large one in parts, by as many processes as there are CPUs, and put together again.

A part is read from some lines before it, which brings the readers of tracebacks and dumps to the state that they would have
there, and on behind its end until all that began in it has ended. What begins in a part is counted by that part only, so
nothing is lost at a cut or counted twice. What is found is what one process finds, with these limits: whose a frame is, where
tracebacks of one stream were cut, can hang on lines far before, so that counts of such logs differ by a percent or so; of more
than 500 signatures others may be left ungrouped. Standard input, small files and other encodings than UTF-8 and Latin-1 are read
by one process.

A file that is still written to is read as far as it reached when it was opened. One that is renamed, replaced or deleted
meanwhile is read whole all the same, or, in parts where there is no /proc, is said to be. One that was truncated or rewritten is
said to be, if it is shorter or begins otherwise now.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import BinaryIO, NamedTuple

from diagnostics.logs.encodings import Unreadable, decoder, encoding
from diagnostics.logs.groups import Groups
from diagnostics.logs.reader import BLOCK_BYTES, HEAD_BYTES, pieces, whole_lines
from diagnostics.logs.search import LogSearch

_PART_BYTES = 1 << 24
_BEFORE_BYTES, _MOST_BEFORE_BYTES = 1 << 19, 1 << 23  # read before a part: this, or more
_BEFORE_LINES = 8000  # where the bytes allow
_BEHIND_BYTES = 1 << 16  # read at once behind a part
_MAX_PROCESSES = 16
_ENCODING = "utf-8"


class Read(NamedTuple):
    """How much of a log was read."""

    log: str
    lines: int
    bytes: int
    unread: str = ""  # why that is not all that was there


class _Part(NamedTuple):
    path: Path
    begin: int  # byte
    end: int | None  # None: the end of the file
    opened: Path | None = None  # where this very file is, whatever gets its name meanwhile
    inode: int | None = None  # None: any


class _Found(NamedTuple):
    groups: Groups
    lines_before: int  # that were read before the part
    lines: int
    bytes: int


def read_log(path: Path, groups: Groups) -> Read:
    """Search one file. Raises Unreadable with what was found and what to do."""
    if path.is_dir():
        raise Unreadable("it is a folder: name log files, for example with a * at its end")
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or not about.st_size:  # a pipe, or a file of the system's that tells no size
                return _read_alone(path, file, None, groups)
            head = file.read(HEAD_BYTES)
            parts = list(_parts(path, file, head, about.st_size))
            if len(parts) > 1 and _num_processes() > 1:
                read = _read_parts(path, parts, groups)
            else:
                file.seek(0)
                read = _read_alone(path, file, about.st_size, groups)
            return read._replace(unread=_unread(file, head, about.st_size))
    except OSError as error:
        raise Unreadable(f"{error.strerror or error}: check the name and the right to read it") from error


def _read_alone(path: Path, file: BinaryIO, end: int | None, groups: Groups) -> Read:
    search = LogSearch(str(path), groups)
    search.read(file, end)
    return Read(search.log, search.lines, search.bytes)


def _unread(file: BinaryIO, head: bytes, size: int) -> str:
    """Why not all was read of a file that began with `head` and had `size` bytes when it was opened, "" where it was."""
    file.seek(0)
    if file.read(len(head)) == head and os.fstat(file.fileno()).st_size >= size:
        return ""
    return "it was truncated or rewritten while it was read: read it again"


def _parts(path: Path, file: BinaryIO, head: bytes, size: int) -> Iterator[_Part]:
    """Parts that begin with a line: one, where the file is small or in a wide encoding."""
    opened, inode, begin = Path(f"/proc/{os.getpid()}/fd/{file.fileno()}"), os.fstat(file.fileno()).st_ino, 0
    if size >= 2 * _PART_BYTES and encoding(head) == _ENCODING:
        for at in range(_PART_BYTES, size - _PART_BYTES, _PART_BYTES):
            end = _next_line(file, at)
            if end is not None:
                yield _Part(path, begin, end, opened, inode)
                begin = end
    yield _Part(path, begin, size, opened, inode)


def _next_line(file: BinaryIO, at: int) -> int | None:
    """Where a line begins, at byte `at` or soon behind it."""
    file.seek(at)
    found = file.read(BLOCK_BYTES).find(b"\n")
    return at + found + 1 if found >= 0 else None


def _read_parts(path: Path, parts: list[_Part], groups: Groups) -> Read:
    try:
        with ProcessPoolExecutor(_num_processes(), multiprocessing.get_context("spawn"), _leave_interrupts) as pool:
            try:
                return _put_together(path, pool.map(_read_part, parts), groups)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    except BrokenProcessPool as error:
        raise Unreadable("a process that read a part of it was killed: give `-` to read standard input by one process") from error


def _put_together(path: Path, parts: Iterable[_Found], groups: Groups) -> Read:
    num_lines = num_bytes = 0
    for found in parts:
        groups.add_all(found.groups, num_lines - found.lines_before)
        num_lines, num_bytes = num_lines + found.lines, num_bytes + found.bytes
    return Read(str(path), num_lines, num_bytes)


def _read_part(part: _Part) -> _Found:
    """What begins in a part."""
    search, decode = LogSearch(str(part.path), Groups()), decoder(_ENCODING)
    with _open(part) as file:
        file.seek(_begin_before(file, part.begin))
        search.counted = range(0)
        for block in whole_lines(pieces(file, part.begin), decode):
            search.read_block(block)
        lines_before, bytes_before = search.lines, search.bytes
        search.counted = range(lines_before + 1, sys.maxsize)
        for block in whole_lines(pieces(file, part.end), decode):
            search.read_block(block)
        lines, num_bytes = search.lines, search.bytes - bytes_before
        search.counted = range(lines_before + 1, lines + 1)
        for block in whole_lines(pieces(file, None, _BEHIND_BYTES), decode):
            if not search.is_open_since(lines):
                break
            search.read_block(block)
        search.finish()
    return _Found(search.groups, lines_before, lines - lines_before, num_bytes)


def _open(part: _Part) -> BinaryIO:
    """The file that was opened at first: by its name only where there is no other way. Raises Unreadable."""
    try:
        file = (part.opened or part.path).open("rb")
    except OSError:
        file = part.path.open("rb")
    if part.inode not in {None, os.fstat(file.fileno()).st_ino}:
        file.close()
        raise Unreadable("another file got its name while it was read: read it again")
    return file


def _begin_before(file: BinaryIO, begin: int) -> int:
    """Where reading begins for the state at byte `begin`."""
    most = max(0, begin - _MOST_BEFORE_BYTES)
    file.seek(most)
    text = file.read(begin - most)
    at = len(text)
    for _ in range(_BEFORE_LINES):
        at = text.rfind(b"\n", 0, max(at, 0))
    return min(max(0, begin - _BEFORE_BYTES), most + at + 1)


def _leave_interrupts() -> None:
    """Ctrl-C reaches all processes of a terminal: the first one ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _num_processes() -> int:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cpus, _MAX_PROCESSES)
