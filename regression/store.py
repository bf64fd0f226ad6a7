"""The history: one JSON object a line, only ever appended to, each line on disk before `append` returns. Imports no torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Store:
    """A history file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, values: dict[str, Any]) -> None:
        """Add one line in one write. After a crash the file holds the whole line, or a torn one that `read` reports."""
        line = json.dumps(values, allow_nan=False).encode() + b"\n"
        created = not self.path.exists()
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if self._is_torn(descriptor):
                line = b"\n" + line
            if os.write(descriptor, line) != len(line):
                raise OSError(f"{self.path}: the disk took only a part of the line")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if created:
            _sync_directory(self.path.parent)

    def read(self) -> tuple[list[dict[str, Any]], list[str]]:
        """All whole lines, and a sentence for each that is torn or foreign."""
        if not self.path.exists():
            return [], []
        entries, problems = [], []
        for number, line in enumerate(self.path.read_bytes().split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if isinstance(value, dict):
                entries.append(value)
            else:
                problems.append(f"{self.path}, line {number}: torn or not ours ({len(line)} bytes), skipped")
        return entries, problems

    @staticmethod
    def _is_torn(descriptor: int) -> bool:
        size = os.fstat(descriptor).st_size
        return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
