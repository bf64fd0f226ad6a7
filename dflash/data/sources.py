"""Rows of prompts from wherever they are: files, directories, globs, URLs, saved data sets, the hub.

    prompts.jsonl, prompts.json (lines, or one array), prompts.jsonl.gz, prompts.parquet, 'part-*.parquet', a directory of them
    s3://bucket/prompts.parquet, or any other URL that fsspec opens, globs and directories too
    a directory written by `datasets.Dataset.save_to_disk`
    owner/name or owner/name:configuration, a data set of the hub

Files are read in the order of their names, a batch of rows at a time. What cannot be read raises `DataError` with the place,
before anything is answered.

Of a directory, the files directly in it that end in .jsonl, .ndjson or .parquet are read (compressed or not), and no others:
a pattern such as 'folder/**/*.json' says more.

Known limits: a JSON file that is one array is read as a whole; S3 needs the package s3fs.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from dflash.data.meta import DataError

Row = tuple[str, dict[str, Any]]  # where it stands ("line 3"), and its fields

_PARQUET, _JSON = (".parquet",), (".jsonl", ".ndjson", ".json")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_GLOB = frozenset("*?[")
_ROWS_AT_A_TIME = 1024


def read_rows(source: str, *, split: str, stream: bool) -> Iterator[Row]:
    """The rows of `source`, one after the other; `split` and `stream` are for data sets only.

    Raises DataError when there is nothing to read, and on whatever cannot be read.
    """
    if "://" in source:
        return _file_rows(*_open_url(source), source)
    path = Path(source)
    if any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        return _saved_rows(path, split)
    if path.exists() or path.is_absolute() or _kind(source) is not None or _GLOB & set(source):
        return _file_rows(fsspec.filesystem("file"), source, source)
    return _hub_rows(source, split, stream=stream)


def _open_url(url: str) -> tuple[Any, str]:
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = "pip install 'dflash-harness[s3]'" if url.startswith(("s3://", "s3a://")) else "install that package"
        raise DataError(f"cannot open {url}: {error}; {package}, or copy the file here") from error
    except ValueError as error:
        raise DataError(f"cannot open {url}: {error}; use a URL that fsspec knows, or a file") from error
    return filesystem, path


def _file_rows(filesystem: Any, path: str, source: str) -> Iterator[Row]:
    files = _files(filesystem, path, source)
    for file in files:
        where = f"{PurePosixPath(file).name}, " if len(files) > 1 else ""
        name = file if len(files) > 1 else source
        with _readable(name):
            rows = _parquet_rows if _kind(file) == "parquet" else _json_rows
            for place, row in rows(filesystem, file, name):
                yield f"{where}{place}", row


def _files(filesystem: Any, path: str, source: str) -> list[str]:
    """The files that `path` names, in the order of their names."""
    with _readable(source):
        if filesystem.isfile(path):
            return [path]
        if filesystem.isdir(path):
            inside = [str(file) for file in filesystem.ls(path, detail=False)]
            files = sorted(file for file in inside if _kind(file) is not None and PurePosixPath(file).suffix != ".json")
            problem = f"the directory {source} holds no .jsonl, .ndjson or .parquet files"
        elif _GLOB & set(path):
            files = sorted(str(file) for file in filesystem.glob(path) if _kind(str(file)))
            problem = f"no .jsonl, .ndjson, .json or .parquet file matches the pattern {source}"
        else:
            files, problem = [], f"{source} does not exist"
    if not files:
        raise DataError(f"{problem}: pass files, a directory of them, a saved data set, or a hub name, as --prompts")
    return files


def _kind(name: str) -> str | None:
    suffixes = PurePosixPath(name).suffixes
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    return "parquet" if last in _PARQUET else "json" if last in _JSON else None


def _json_rows(filesystem: Any, file: str, name: str) -> Iterator[Row]:
    with filesystem.open(file, "rb", compression="infer") as lines:
        begun = False
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            if not begun and line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
                yield from _array_rows(line + lines.read(), name)
                return
            row = _parsed(line, f"{name}, line {number}", first=not begun)
            begun = True
            if not isinstance(row, dict):
                raise DataError(f"{name}, line {number}: a JSON {type(row).__name__}; expected one object per line")
            yield f"line {number}", row


def _array_rows(content: bytes, name: str) -> Iterator[Row]:
    for number, row in enumerate(_parsed(content, name, first=True), start=1):
        if not isinstance(row, dict):
            raise DataError(f"{name}, item {number}: a JSON {type(row).__name__}; expected an array of objects")
        yield f"item {number}", row


def _parsed(content: bytes, place: str, *, first: bool) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig" if first else "utf-8"))
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if content.strip().count(b"\n") else f"column {error.pos + 1}"
        raise DataError(f"{place}: no JSON ({error.msg}, {where}); expected one object per line") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: no JSON ({error}); expected one object per line") from error


def _parquet_rows(filesystem: Any, file: str, name: str) -> Iterator[Row]:
    try:
        with filesystem.open(file, "rb") as content, pq.ParquetFile(content) as table:
            number = 0
            for batch in table.iter_batches(batch_size=_ROWS_AT_A_TIME):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except pa.ArrowException as error:
        raise DataError(f"{name} is not a readable Parquet file: {error}") from error
    except OSError as error:
        raise DataError(f"{name} is not a readable Parquet file, or was cut: {error}") from error


@contextlib.contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {name} ({type(error).__name__}: {error}): check the file and the way to it") from error


def _saved_rows(path: Path, split: str) -> Iterator[Row]:
    """Rows of a directory written by `save_to_disk`; of several splits, the one that is asked for."""
    import datasets  # noqa: PLC0415 - takes seconds, and files do not need it

    try:
        saved = datasets.load_from_disk(str(path))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{path} is not a readable saved data set ({type(error).__name__}: {error}): save it again") from error
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise DataError(f"{path} has no split {split!r}, found {', '.join(saved)}: name one with --split")
        saved = saved[split]
    yield from ((f"row {number}", dict(row)) for number, row in enumerate(saved, start=1))


def _hub_rows(source: str, split: str, *, stream: bool) -> Iterator[Row]:
    import datasets  # noqa: PLC0415 - see _saved_rows

    name, _, configuration = source.partition(":")
    try:
        rows = datasets.load_dataset(name, configuration or None, split=split, streaming=stream)
        for number, row in enumerate(rows, start=1):
            yield f"row {number}", row
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"cannot read {source!r} from the hub, split {split!r} ({type(error).__name__}: {error}): "
            "pass a file, a directory, a URL, or the hub name of a data set (owner/name:configuration)"
        ) from error
