"""A database for what need not be in memory while a command runs: SQLite in a file that has no name.

The file is made in a directory of the caller's choice, so that it takes room where the result will, and its name is removed at
once: whatever ends the process, nothing is left. Nothing is journaled or flushed, because nothing outlives the process. The
cache is small, whatever the tables hold.

Known limits: sorting goes through SQLite's own temporary files (SQLITE_TMPDIR, else /var/tmp); one thread at a time.
"""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dflash.data.meta import DataError

CACHE_KIB = 4096


def scratch_database(directory: Path, *tables: str) -> sqlite3.Connection:
    """A new database with these tables, below the nearest directory that exists. Raises DataError when the disk refuses."""
    directory = next(place for place in (directory.absolute(), *directory.absolute().parents) if place.is_dir())
    with on_disk(directory):
        with tempfile.NamedTemporaryFile(prefix=".scratch.", suffix=".partial", dir=directory) as file:
            connection = sqlite3.connect(file.name, isolation_level=None, check_same_thread=False)
            for words in ("journal_mode=OFF", "synchronous=OFF", "locking_mode=EXCLUSIVE", f"cache_size=-{CACHE_KIB}"):
                connection.execute(f"PRAGMA {words}")
            for table in tables:
                connection.execute(f"CREATE TABLE {table}")
        connection.execute("BEGIN")  # never committed: the file has no reader but this connection
    return connection


@contextlib.contextmanager
def on_disk(directory: Path) -> Iterator[None]:
    """Say what cannot be kept on the disk as DataError."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise DataError(f"{directory}: cannot keep prompts there while they are answered ({error}): make room") from error
