"""The history: append-only Parquet, one file a record, named by the hash of its content. Imports no torch.

    DIR/records/HASH.parquet   one record: columns for queries, and the whole record as canonical JSON in `record`
    DIR/index.parquet          the columns of all records, for speed; derived, made again when it is missing or torn
    DIR/lock                   held by a writer from its first byte to the rename, and by `prune`

Records are of the kinds in `regression.records`. Equal records are one file, so importing twice
changes nothing. A writer writes aside, flushes to disk and renames: a kill leaves a whole record or a leftover that readers
report and `prune` removes. What cannot be read is skipped and reported, never deleted.

    python -m regression.store import DIR FILE...     JSONL (also of the earlier format), Parquet exports, other stores
    python -m regression.store export DIR --output FILE.jsonl|.parquet|.csv [--where SQL]
    python -m regression.store verify DIR
    python -m regression.store prune DIR [--older-than-days N]

Exit codes: 0 fine, 1 problems found, 2 bad usage. Known limit: over NFS the lock is as good as NFS's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import filelock
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from dflash.standard_output import outlive_reader
from regression.records import (
    SCHEMA,
    SCHEMA_VERSION,
    StoreError,
    canonical,
    columns_of,
    identity_of,
    read_rows,
    upgraded,
    write_table,
)

_INDEX_SCHEMA = pa.schema([("id", pa.string()), *(column for column in SCHEMA if column.name != "record")])
_NAME = re.compile(r"[0-9a-f]{64}\.parquet")
_LOCK_SECONDS = 60.0


class Store:
    """A history directory. Reading needs no lock: a record appears whole, by a rename."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._records = directory / "records"
        self._lock = filelock.FileLock(directory / "lock", timeout=_LOCK_SECONDS)

    def add(self, record: dict[str, Any]) -> str:
        """Keep one record; returns its id. It is on disk when this returns. Raises StoreError if it is not a record."""
        columns = columns_of(record)
        identity = identity_of(columns["record"])
        path = self._records / f"{identity}.parquet"
        self._records.mkdir(parents=True, exist_ok=True)
        with self._lock:
            if not self._is_whole(identity):
                write_table(path, pa.Table.from_pylist([columns], schema=SCHEMA))
        return identity

    def accept(
        self, series: str, reason: str, *, time: str | None = None, since: str | None = None, author: str = "unknown"
    ) -> str:
        """Record that a change of the level of `series` is accepted, beginning with the first measurement at or after `since`.

        Times are UTC, ISO 8601; without `time` it is now, without `since` it is `time`.
        """
        if not reason.strip():
            raise StoreError("an accepted change needs a reason: say why the new level is right")
        now = time or datetime.now(UTC).isoformat(timespec="seconds")
        return self.add(
            {"kind": "acceptance", "series": series, "time": now, "since": since or now, "reason": reason, "author": author}
        )

    def read(self, series: str | None = None) -> tuple[list[dict[str, Any]], list[str]]:
        """All records (of one series) by time, and a sentence for each file that is skipped."""
        frame, problems = self.frame()
        chosen = frame if series is None else frame[frame["series"] == series]
        records = []
        for identity in chosen["id"]:
            try:
                records.append(json.loads(self._load(identity)["record"]))
            except StoreError as error:
                problems.append(f"{error}, skipped")
        return records, problems

    def frame(self) -> tuple[pd.DataFrame, list[str]]:
        """The columns of all records as a table ordered by time, and a sentence for each file that is skipped."""
        identities, problems = self._list()
        index = self._index()
        known = set(index["id"]) if index is not None else set()
        rows = []
        for identity in sorted(identities - known):
            try:
                rows.append({"id": identity, **self._load(identity)})
            except StoreError as error:
                problems.append(f"{error}, skipped")
        new = pa.Table.from_pylist(rows, schema=_INDEX_SCHEMA).to_pandas()
        frame = new if index is None else pd.concat([index[index["id"].isin(identities)], new], ignore_index=True)
        if rows or len(known - identities):
            self._write_index(frame)
        return frame.sort_values(["time", "id"], ignore_index=True), problems

    def verify(self) -> tuple[int, list[str]]:
        """Read every file and compare its name with its content. Returns the number of good records and the problems."""
        identities, problems = self._list()
        good = 0
        for identity in sorted(identities):
            try:
                self._load(identity)
            except StoreError as error:
                problems.append(str(error))
            else:
                good += 1
        return good, problems

    def prune(self, *, older_than: timedelta | None = None) -> list[str]:
        """Remove what killed writers left behind, and all but acceptances older than so much; returns what was removed."""
        removed = []
        self._records.mkdir(parents=True, exist_ok=True)
        with self._lock:  # no writer is active now: everything aside is a leftover
            for path in self.directory.rglob(".*.aside"):
                path.unlink()
                removed.append(f"leftover {path.name}")
            if older_than is not None:
                frame, _ = self.frame()
                limit = (datetime.now(UTC) - older_than).isoformat(timespec="seconds")
                old = frame[(frame["kind"] != "acceptance") & (frame["time"] < limit)]
                for identity, kind in zip(old["id"], old["kind"], strict=True):
                    (self._records / f"{identity}.parquet").unlink()
                    removed.append(f"{kind} {identity}")
        return removed

    def _list(self) -> tuple[set[str], list[str]]:
        identities, problems = set(), []
        for entry in sorted(self._records.iterdir()) if self._records.is_dir() else ():
            if _NAME.fullmatch(entry.name):
                identities.add(entry.stem)
            elif entry.name.endswith(".aside"):
                problems.append(f"{entry}: half written, by a writer that was killed or is at work; skipped (prune removes it)")
            else:
                problems.append(f"{entry}: not a record's name, skipped")
        return identities, problems

    def _load(self, identity: str) -> dict[str, Any]:
        """The columns of one record. Raises StoreError if the file is torn, foreign or changed."""
        path = self._records / f"{identity}.parquet"
        (columns,) = read_rows(path, expected=1)
        if identity_of(columns["record"]) != identity:
            raise StoreError(f"{path}: its content is not what its name promises")
        if columns != columns_of(json.loads(columns["record"])):
            raise StoreError(f"{path}: its columns differ from its record")
        return columns

    def _is_whole(self, identity: str) -> bool:
        try:
            self._load(identity)
        except StoreError:
            return False
        return True

    def _index(self) -> pd.DataFrame | None:
        try:
            table = pq.read_table(self.directory / "index.parquet")
        except (OSError, pa.ArrowException):
            return None
        frame: pd.DataFrame = table.to_pandas()
        return frame if table.schema.equals(_INDEX_SCHEMA) and (frame["schema_version"] == SCHEMA_VERSION).all() else None

    def _write_index(self, frame: pd.DataFrame) -> None:
        table = pa.Table.from_pandas(frame, schema=_INDEX_SCHEMA, preserve_index=False)
        # It is only a cache: while somebody writes, or where nothing may be written, the next reader makes it.
        with contextlib.suppress(filelock.Timeout, OSError), self._lock.acquire(timeout=0):
            write_table(self.directory / "index.parquet", table)


def read_file(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The records in a JSONL file, a Parquet export or another store, and a sentence for each that is none."""
    if path.is_dir():
        return Store(path).read()
    if path.suffix == ".parquet":
        return [json.loads(row["record"]) for row in read_rows(path)], []
    records, problems = [], []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            try:
                records.append(upgraded(json.loads(line)))
            except (ValueError, AttributeError) as error:
                problems.append(f"{path}, line {number}: torn or not ours, skipped ({error})")
    return records, problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _options(arguments)
    try:
        lines, problems = options.run(options)
    except (StoreError, OSError, duckdb.Error) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stderr.write("".join(f"problem: {problem}\n" for problem in problems))
    return 1 if problems else 0


def _import(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    store, problems, given = Store(options.store), [], 0
    before = len(store.frame()[0])
    for path in options.files:
        records, found = read_file(path)
        given += len(records)
        problems += found
        for record in records:
            store.add(record)
    return [f"{len(store.frame()[0]) - before} new records of {given}"], problems


def _export(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    frame, problems = Store(options.store).frame()
    if options.where:
        connection = duckdb.connect()
        connection.register("history", frame)
        frame = connection.sql(f"select * from history where {options.where} order by time, id").df()  # noqa: S608 - the user's own SQL, on a table in memory
    wanted = set(frame["id"])
    output: Path = options.output
    if output.suffix == ".csv":
        frame.to_csv(output, index=False)
    else:
        records, _ = Store(options.store).read()
        chosen = [record for record in records if identity_of(canonical(record)) in wanted]
        if output.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist([columns_of(record) for record in chosen], schema=SCHEMA), output)
        else:
            output.write_text("".join(f"{canonical(record)}\n" for record in chosen), encoding="utf-8")
    return [f"{len(wanted)} records in {output}"], problems


def _verify(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    good, problems = Store(options.store).verify()
    return [f"{good} records are whole"], problems


def _prune(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    days = options.older_than_days
    removed = Store(options.store).prune(older_than=None if days is None else timedelta(days=days))
    return [*(f"removed {what}" for what in removed), f"{len(removed)} files removed"], []


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m regression.store", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run in (("import", _import), ("export", _export), ("verify", _verify), ("prune", _prune)):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("store", type=Path, metavar="DIR", help="the history")
        if name == "import":
            command.add_argument("files", type=Path, nargs="+", metavar="FILE")
        if name == "export":
            command.add_argument("--output", type=Path, required=True, metavar="FILE", help=".jsonl, .parquet or .csv")
            command.add_argument("--where", metavar="SQL", help="which rows, for example \"kind = 'measurement'\"")
        if name == "prune":
            command.add_argument("--older-than-days", type=float, metavar="N", help="also remove old records; acceptances stay")
    options = parser.parse_args(arguments)
    if options.run is not _import and not options.store.is_dir():
        parser.error(f"there is no directory {options.store}")
    if options.run is _export and options.output.suffix not in (".jsonl", ".parquet", ".csv"):
        parser.error(f"--output {options.output}: use a name that ends in .jsonl, .parquet or .csv")
    return options


if __name__ == "__main__":
    outlive_reader()
    sys.exit(main())
