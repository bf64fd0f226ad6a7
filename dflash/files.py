"""Files that survive a crash. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file's content, or a directory's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Write aside, sync, rename: whoever reads `path`, now or after a crash, finds the old content or the new, and all of it."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    aside = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        as_others_are(aside)  # mkstemp makes it private
        aside.replace(path)
        sync(path.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            aside.unlink()


def as_others_are(path: Path) -> None:
    """Give a file the rights of a new one; safetensors makes its files private."""
    path.chmod(0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
