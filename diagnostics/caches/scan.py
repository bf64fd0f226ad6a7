"""All files below one folder, with what the file system says of them. Follows no links and changes nothing.

Reading a file sets its access time, by which one can tell which entries are still used: `opened` avoids that where the
system allows it (Linux, a file of one's own or root).
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from diagnostics.caches.errors import CacheError, NotObservedError
from diagnostics.dated.entry import believable

MAX_FILES = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """One regular file; `path` is relative to the folder, with `/`."""

    path: str
    size_bytes: int
    mtime_ns: int
    atime_ns: int
    mode: int
    uid: int
    device: int
    inode: int


@dataclass(kw_only=True)
class Scan:
    """What `scan` found. `unread` could not be looked at or leaves the folder; `doubtful` has a date that cannot be."""

    directory: Path
    uid: int
    files: list[File] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    doubtful: list[str] = field(default_factory=list)


def scan(directory: Path, now_seconds: float) -> Scan:
    """Look through `directory`. Raises CacheError where there is no such folder, NotObservedError where it cannot be read."""
    try:
        place = directory.resolve(strict=True)
        status = place.stat()
        if not stat.S_ISDIR(status.st_mode):
            raise CacheError(f"{directory} is no folder: name the folder of a compile cache")
        os.scandir(place).close()
    except FileNotFoundError:
        raise CacheError(f"there is no folder {directory}") from None
    except PermissionError as error:
        raise NotObservedError(f"{directory}: {error.strerror}: run as its owner") from None
    except (OSError, RuntimeError) as error:  # a loop of links
        raise CacheError(f"{directory}: {error}") from None
    found = Scan(directory=place, uid=status.st_uid)
    _walk(found, now_seconds)
    return found


def _walk(found: Scan, now_seconds: float) -> None:
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(found.directory / folder) as listed:
                entries = sorted(listed, key=lambda entry: entry.name, reverse=True)
        except FileNotFoundError:  # deleted meanwhile
            continue
        except OSError as error:
            found.unread.append(f"{folder or found.directory}: {error.strerror}")
            continue
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                found.folders.append(path)
                waiting.append(path)
            elif entry.is_symlink():
                _note_link(found, path)
            else:
                _note(found, path, now_seconds)
        if len(found.files) > MAX_FILES:
            found.unread.append(f"only the first {MAX_FILES:,} files were looked at")
            return


def _note(found: Scan, path: str, now_seconds: float) -> None:
    try:
        status = (found.directory / path).lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        found.unread.append(f"{path}: {error.strerror}")
        return
    if not stat.S_ISREG(status.st_mode):
        found.unread.append(f"{path}: neither a file nor a folder")
        return
    if not believable(status.st_mtime, now_seconds):
        found.doubtful.append(f"{path}: its date is before 2000 or in the future")
    found.files.append(
        File(
            path=path,
            size_bytes=status.st_size,
            mtime_ns=status.st_mtime_ns,
            atime_ns=status.st_atime_ns,
            mode=stat.S_IMODE(status.st_mode),
            uid=status.st_uid,
            device=status.st_dev,
            inode=status.st_ino,
        )
    )


def _note_link(found: Scan, path: str) -> None:
    """Note a link; torch writes none. What is behind one is not looked at."""
    target = Path(os.path.realpath(found.directory / path))
    where = "leaves the cache" if not target.is_relative_to(found.directory) else "stays in the cache"
    found.unread.append(f"{path}: a symbolic link that {where}: not followed")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file to read it, links not followed, its access time kept where the system allows that. Raises OSError."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags | getattr(os, "O_NOATIME", 0))
    except PermissionError:  # only the owner may keep the access time
        descriptor = os.open(path, flags)
    with os.fdopen(descriptor, "rb") as file:
        yield file
