"""A record of the history, and the Parquet file that holds it. Imports no torch.

A record is a JSON object with `kind`, `series` and `time` (UTC, ISO 8601). Its file has columns for queries and the whole
record as canonical JSON; its identity is the hash of that JSON, whatever wrote the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA_VERSION = 1
KINDS = ("measurement", "acceptance", "night", "alert")  # a night: what the nightly run found beside a measurement
SCHEMA = pa.schema(
    [
        ("schema_version", pa.int32()),
        ("kind", pa.string()),
        ("series", pa.string()),
        ("time", pa.string()),
        ("name", pa.string()),
        ("tokens_per_second", pa.float64()),
        ("tokens_per_second_per_device", pa.float64()),
        ("invalid", pa.list_(pa.string())),
        ("problems", pa.list_(pa.string())),
        ("reason", pa.string()),  # of an acceptance or an alert
        ("record", pa.string()),
    ]
)


class StoreError(ValueError):
    """A record or file that is not one of ours; the message says why."""


def columns_of(record: dict[str, Any]) -> dict[str, Any]:
    """One row of a record's file. Raises StoreError."""
    if record.get("kind") not in KINDS:
        raise StoreError(f"a record of kind {record.get('kind')!r}: known are {', '.join(KINDS)}")
    try:
        utc = datetime.fromisoformat(record["time"]).utcoffset() == timedelta(0)
        series, text = record["series"], canonical(record)
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"not a record: {type(error).__name__}: {error}") from error
    if not series or not utc:
        raise StoreError(f"a record of series {series!r} at {record['time']}: needs a series, and a time in UTC")
    given = {column.name: record.get(column.name) for column in SCHEMA if column.name not in ("schema_version", "record")}
    lists = {name: list(record.get(name, ())) for name in ("invalid", "problems")}
    return {"schema_version": SCHEMA_VERSION, **given, **lists, "record": text}


def canonical(record: dict[str, Any]) -> str:
    """The one way to write a record."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)


def identity_of(text: str) -> str:
    """The identity of a record written by `canonical`."""
    return hashlib.sha256(text.encode()).hexdigest()


def upgraded(record: dict[str, Any]) -> dict[str, Any]:
    """A line of the earlier JSONL history as a record; others as they are. Raises ValueError on what is neither."""
    if "kind" not in record and isinstance(record.get("result"), dict):
        rates = {name: record["result"].get(name) for name in ("tokens_per_second", "tokens_per_second_per_device")}
        record = {"kind": "measurement", **record, **rates}
    columns_of(record)
    return record


def read_rows(path: Path, *, expected: int | None = None) -> list[dict[str, Any]]:
    """The rows of a file in this format. Raises StoreError on any other."""
    try:
        table = pq.read_table(path, partitioning=None)
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"{path}: torn or no Parquet ({str(error).partition('.')[0]})") from error
    versions = set(table["schema_version"].to_pylist()) if "schema_version" in table.column_names else {None}
    if versions - {SCHEMA_VERSION}:
        raise StoreError(f"{path}: schema version {sorted(map(str, versions))}, this program reads {SCHEMA_VERSION}")
    if not table.schema.equals(SCHEMA) or expected not in (None, len(table)):
        raise StoreError(f"{path}: {len(table)} rows with columns of another kind of file")
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def write_table(path: Path, table: pa.Table) -> None:
    """Aside, on disk, then renamed."""
    aside = path.with_name(f".{path.stem}.{os.getpid()}-{secrets.token_hex(4)}.aside")
    with aside.open("wb") as file:
        pq.write_table(table, file, compression="zstd")
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
