"""SHA-256 of files, read in pieces."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

from diagnostics.caches.scan import opened

PIECE_BYTES = 1 << 20


def of_file(path: Path) -> str:
    """Raises OSError."""
    found = hashlib.sha256()
    with opened(path) as file:
        while piece := file.read(PIECE_BYTES):
            found.update(piece)
    return found.hexdigest()


class HashingReader:
    """A file that is hashed while somebody else reads it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        """As a file's."""
        piece = self._file.read(size)
        self.sha256.update(piece)
        return piece
