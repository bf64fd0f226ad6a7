"""Prepared examples that need not fit into memory: decoded once into a flat file, then read one by one from any place in it.

Training reads examples in an order by key, all over the data, and Parquet can only be decoded by row groups of thousands.
So the first reader writes the examples of a split one after the other into `records.bin`, and where each begins into
`offsets.bin`; every later one opens these. Nothing is mapped: a read is one `pread`, so memory stays with the kernel's page
cache, and the process holds a few bytes an example (`dflash.data.packing`) whatever the tokens amount to.

A spool belongs to the bytes of its prepared data (the digest of the marker is in its name), is written aside and renamed, and
is made by one process while others wait. Every record carries a CRC-32, which is checked at every read.

Known limit: 4 bytes a token on disk, about twice the Parquet file; spools of data that is gone may be deleted by hand.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tempfile
import weakref
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import filelock
import numpy as np

from dflash.batch import Example
from dflash.data.examples import iterate_examples, load_meta
from dflash.data.meta import MARKER_FILE, DataError, Split
from dflash.files import sync

RECORDS_FILE, OFFSETS_FILE, SPOOLED_FILE = "records.bin", "offsets.bin", "SPOOLED"
_HEAD = struct.Struct("<II")  # bytes of the sample id, CRC-32 of all that follows
_OFFSETS = struct.Struct("<qq")
_READ_BYTES = 4 << 20  # of one read when all records are read in order


def open_spool(prepared: Path, split: Split, spools: Path) -> SpooledExamples:
    """The examples of one split, spooled below `spools` unless they are already.

    Raises DataError when the prepared data, or the disk, cannot be used.
    """
    load_meta(prepared)
    digest = hashlib.sha256((prepared / MARKER_FILE).read_bytes()).hexdigest()[:16]
    directory = spools / f"{digest}-{split}"
    try:
        spools.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(spools / f".{digest}-{split}.lock"):
            if not (directory / SPOOLED_FILE).is_file():
                _write(prepared, split, directory)
        return SpooledExamples(directory)
    except OSError as error:
        raise DataError(f"{directory}: cannot spool the data ({error}): make room, or name another --data.spool") from error


class SpooledExamples(Sequence[Example]):
    """A spool as a sequence of examples; safe to read from several threads. Raises DataError on damage."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        marker = json.loads((directory / SPOOLED_FILE).read_text(encoding="utf-8"))
        self._count = int(marker["examples"])
        for name in (RECORDS_FILE, OFFSETS_FILE):
            found = (directory / name).stat().st_size
            if found != marker[name]:
                raise DataError(f"{directory / name} has {found} bytes, {marker[name]} were written: remove {directory}")
        self._records = self._opened(RECORDS_FILE)
        self._offsets = self._opened(OFFSETS_FILE)

    def _opened(self, name: str) -> int:
        """A descriptor that is closed when this object is gone."""
        descriptor = os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, number: int) -> Example: ...

    @overload
    def __getitem__(self, number: slice) -> list[Example]: ...

    def __getitem__(self, number: int | slice) -> Example | list[Example]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(self._count))]
        if not -self._count <= number < self._count:
            raise IndexError(number)
        start, stop = _OFFSETS.unpack(os.pread(self._offsets, 16, 8 * (number % self._count)))
        return self._decode(os.pread(self._records, stop - start, start))

    def __iter__(self) -> Iterator[Example]:
        records_file, offsets_file = self._directory / RECORDS_FILE, self._directory / OFFSETS_FILE
        with offsets_file.open("rb") as offsets, records_file.open("rb", _READ_BYTES) as records:
            start = int.from_bytes(offsets.read(8), "little")
            for _ in range(self._count):
                stop = int.from_bytes(offsets.read(8), "little")
                yield self._decode(records.read(stop - start))
                start = stop

    def _decode(self, record: bytes) -> Example:
        name_bytes, crc = _HEAD.unpack_from(record) if len(record) >= _HEAD.size else (0, -1)
        if zlib.crc32(memoryview(record)[_HEAD.size :]) != crc:
            raise DataError(f"{self._directory / RECORDS_FILE} is damaged: remove {self._directory}, it is made again")
        begin = _HEAD.size + name_bytes
        words = np.frombuffer(record, dtype="<i4", offset=begin)
        return Example(
            sample_id=record[_HEAD.size : begin].decode("utf-8", "surrogatepass"),
            ids=np.where(words < 0, ~words, words).astype(np.int32),
            loss_mask=words < 0,
        )


def _write(prepared: Path, split: Split, directory: Path) -> None:
    aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".partial", dir=directory.parent))
    try:
        count, size = 0, 0
        with (aside / RECORDS_FILE).open("wb") as records, (aside / OFFSETS_FILE).open("wb") as offsets:
            offsets.write(size.to_bytes(8, "little"))
            for example in iterate_examples(prepared, split):
                size += records.write(_encode(example))
                offsets.write(size.to_bytes(8, "little"))
                count += 1
        marker: dict[str, Any] = {"examples": count, RECORDS_FILE: size, OFFSETS_FILE: 8 * (count + 1)}
        (aside / SPOOLED_FILE).write_text(json.dumps(marker) + "\n", encoding="utf-8")
        for name in (RECORDS_FILE, OFFSETS_FILE, SPOOLED_FILE):
            sync(aside / name)
        shutil.rmtree(directory, ignore_errors=True)  # of a spool that was deleted in part
        aside.rename(directory)
        sync(directory.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _encode(example: Example) -> bytes:
    """Head, sample id, and the ids as int32 in which the supervised ones are inverted."""
    ids = example.ids.astype("<i4")
    payload = example.sample_id.encode("utf-8", "surrogatepass") + np.where(example.loss_mask, ~ids, ids).tobytes()
    return _HEAD.pack(len(payload) - 4 * len(ids), zlib.crc32(payload)) + payload
