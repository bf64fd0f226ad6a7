"""What restore and prune take away is moved into `.NAME.trash` beside the cache, one folder a command, and can come back.

`record.json` says what the command did and is written before anything moves; `content` is what was taken away. Moves are
renames on one file system. Two folders are swapped in one step (renameat2), so a killed restore leaves the old or the new.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from diagnostics.caches.archive import sync_folder
from diagnostics.caches.errors import CacheError, RefusedError
from diagnostics.output import write_text

_SWAP = 2  # RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS
_AT_FDCWD = -100


@dataclass(frozen=True, kw_only=True)
class Thrown:
    """One folder of the trash; `record` is JSON: what, the cache's folder, and what the command needs to undo itself."""

    folder: Path
    record: dict[str, Any]

    @property
    def content(self) -> Path:
        """What was taken away."""
        return self.folder / "content"

    def note(self, **values: Any) -> Thrown:
        """Add to the record, on disk too."""
        record = {**self.record, **values}
        write_text(self.folder / "record.json", json.dumps(record, indent=1))
        sync_folder(self.folder)
        return Thrown(folder=self.folder, record=record)


def place(directory: Path) -> Path:
    """The trash of a cache."""
    return directory.parent / f".{directory.name}.trash"


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """One command at a time on a cache. Raises RefusedError where another runs, CacheError where nothing can be written."""
    try:
        place(directory).mkdir(mode=0o700, exist_ok=True)
        with FileLock(place(directory) / "lock", timeout=0):
            yield
    except Timeout:
        raise RefusedError(f"another command works on {directory}: wait for it") from None
    except OSError as error:
        raise CacheError(f"{directory}: {error.strerror or error} ({error.filename}): nothing was changed by this step") from None
    finally:
        with contextlib.suppress(OSError):
            if [path.name for path in place(directory).iterdir()] in ([], ["lock"]):
                shutil.rmtree(place(directory))


def new(directory: Path, what: str, **values: Any) -> Thrown:
    """A new folder of the trash, its record written."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = (f"{stamp}-{what}", *(f"{stamp}-{what}-{number}" for number in range(2, 1000)))
    folder = next(place(directory) / name for name in names if not (place(directory) / name).exists())
    folder.mkdir()
    return Thrown(folder=folder, record={}).note(what=what, directory=str(directory), time_seconds=time.time(), **values)


def thrown(directory: Path) -> list[Thrown]:
    """What is in the trash, the oldest first."""
    found = []
    for path in sorted(place(directory).glob("*/record.json")):
        try:
            found.append(Thrown(folder=path.parent, record=json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError) as error:
            raise CacheError(f"{path} cannot be read ({error}): look into {path.parent} yourself") from None
    return sorted(found, key=lambda one: float(one.record["time_seconds"]))


def swap(one: Path, other: Path) -> None:
    """Exchange two folders in one step. Raises OSError, CacheError where this system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = (os.fsencode(one), os.fsencode(other))
    if sys.platform == "darwin" and hasattr(libc, "renamex_np"):
        failed = libc.renamex_np(*names, ctypes.c_uint(_SWAP))
    elif hasattr(libc, "renameat2"):
        failed = libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(_SWAP))
    else:
        raise CacheError(f"this system cannot swap two folders in one step: move {other} away yourself, then restore")
    if failed:
        number = ctypes.get_errno()
        raise CacheError(
            f"{other} cannot be swapped in one step ({os.strerror(number)}): move it away yourself, then restore into its place"
        )
    sync_folder(one.parent)
    sync_folder(other.parent)


def empty(directory: Path) -> list[Path]:
    """Delete what is in the trash; returns the folders. Nothing else ever deletes it."""
    found = [one.folder for one in thrown(directory)]
    for folder in found:
        shutil.rmtree(folder)
    return found
