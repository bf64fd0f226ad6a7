"""A snapshot of a compile cache: one tar file with a manifest that has every file's SHA-256, mode and time.

The tar is written aside, synced and renamed, so that a snapshot is whole or not there. The manifest is its last member but
one, followed by the manifest's own hash: a cut-off file has none. Left out, and listed: locks, temporary files, torn and
foreign entries.

A snapshot holds pickles and libraries, which torch will run: restore only what you would run. It is keyed by the fingerprint
of the environment that took it (`here.fingerprint`).

Known limits: precompiled C++ headers are in a snapshot only where they are in the cache's folder, which is so unless
TORCHINDUCTOR_CACHE_DIR names another; without them the first start compiles one header (some 15 s). The commands that
compile C++ kernels name torch's own folder: restored for a torch installed elsewhere, C++ kernels are compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import stat
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from diagnostics.caches import here
from diagnostics.caches.entries import LEFT, LOCKS, LOOKED_UP, Entry
from diagnostics.caches.errors import CacheError, NotObservedError
from diagnostics.caches.hashes import PIECE_BYTES, HashingReader
from diagnostics.caches.inventory import Inventory
from diagnostics.caches.scan import File, opened

VERSION = 1
_MANIFEST, _HASH = "manifest.json", "manifest.sha256"
_FILES = "cache/"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A snapshot's manifest; `files` by their path in the cache."""

    path: Path
    directory: str
    directory_mode: int
    created_seconds: float
    fingerprint: dict[str, Any]
    torch_folder: str | None
    bound_to: dict[str, int]  # folders that kernels name and read from, with their number
    files: dict[str, dict[str, Any]]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(int(file["bytes"]) for file in self.files.values())


def write(inventory: Inventory, path: Path) -> tuple[Snapshot, list[str]]:
    """Write a snapshot; returns it and what was left out. Raises CacheError, and OSError where it cannot be written."""
    if path.exists():
        raise CacheError(f"{path} is there already: name another file, or delete it")
    if inventory.scan.unread:
        raise NotObservedError(
            f"not written, it would not be whole: {'; '.join(inventory.scan.unread[:3])}; repair that, or move it away"
        )
    kept = [entry for entry in inventory.entries if _why_left_out(entry) is None]
    if not any(entry.part in LOOKED_UP for entry in kept):
        raise CacheError(f"{inventory.directory} holds nothing compiled that is of use here ({', '.join(inventory.states)})")
    left_out = [f"{e.path}: {why}" for e in inventory.entries if e.part not in {LOCKS, LEFT} and (why := _why_left_out(e))]
    left_out += [f"{count} {part}" for part in (LOCKS, LEFT) if (count := sum(e.part == part for e in inventory.entries))]
    manifest: dict[str, Any] = {
        "version": VERSION,
        "kind": "snapshot",
        "directory": str(inventory.directory),
        "directory_mode": stat.S_IMODE(inventory.directory.stat().st_mode),
        "created_seconds": time.time(),
        "fingerprint": here.fingerprint(),
        "torch_folder": here.torch_folder(),
        "bound_to": _bound_to(kept),
        "files": {},
    }
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with aside.open("xb") as raw:
            with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
                for file in sorted((file for entry in kept for file in entry.files), key=lambda file: file.path):
                    manifest["files"][file.path] = _add(tar, inventory.directory, file)
                _add_manifest(tar, manifest)
            raw.flush()
            os.fsync(raw.fileno())
        aside.rename(path)
        sync_folder(path.absolute().parent)
    finally:
        aside.unlink(missing_ok=True)
    return read(path), left_out


def read(path: Path) -> Snapshot:
    """The manifest of a snapshot. Raises CacheError on anything else."""
    try:
        with tarfile.open(path, "r:") as tar:
            content, digest = _member(tar, _MANIFEST), _member(tar, _HASH).decode("ascii", errors="replace").strip()
    except OSError as error:
        raise CacheError(f"cannot read {path}: {error.strerror or error}: name a file that snapshot wrote") from None
    except (tarfile.TarError, KeyError, ValueError) as error:
        raise CacheError(f"{path} is no whole snapshot ({error}): it was cut off, or is another file") from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise CacheError(f"{path} is damaged: its manifest has another hash than written")
    try:
        return _parsed(path, json.loads(content))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheError(f"{path} is no snapshot of this version ({type(error).__name__}: {error})") from None


def unpack(snapshot: Snapshot, folder: Path) -> None:
    """Write all files into a new `folder`, each checked against its hash. Raises CacheError, OSError."""
    folder.mkdir(mode=0o700)
    with tarfile.open(snapshot.path, "r:") as tar:
        members = {member.name: member for member in tar.getmembers()}
        for name, expected in snapshot.files.items():
            member = members.get(_FILES + name)
            if member is None or not member.isreg():
                raise CacheError(f"{snapshot.path} is damaged: {name} is missing")
            source = tar.extractfile(member)
            assert source is not None
            _unpack_file(cast("BinaryIO", source), folder / name, expected, f"{snapshot.path}: {name}")
    folder.chmod(snapshot.directory_mode)
    for place, _, _ in os.walk(folder):
        sync_folder(Path(place))


def _parsed(path: Path, value: dict[str, Any]) -> Snapshot:
    if (value["kind"], value["version"]) != ("snapshot", VERSION):
        raise ValueError(f"version {value['version']} of {value['kind']}, expected {VERSION} of snapshot")
    for name in value["files"]:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"it names a file outside the cache: {name}")
    names = ("directory", "directory_mode", "created_seconds", "fingerprint", "torch_folder", "bound_to", "files")
    return Snapshot(path=path, **{name: value[name] for name in names})


def sync_folder(folder: Path) -> None:
    """Make renames in it last through a power cut, where the system can."""
    with contextlib.suppress(OSError), _descriptor(folder) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def _descriptor(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _unpack_file(source: BinaryIO, path: Path, expected: dict[str, Any], what: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    reader = HashingReader(source)
    with path.open("xb") as target:
        while piece := reader.read(PIECE_BYTES):
            target.write(piece)
        target.flush()
        os.fsync(target.fileno())
    if reader.sha256.hexdigest() != expected["sha256"]:
        raise CacheError(f"{what} is damaged: its content has another hash than written")
    path.chmod(int(expected["mode"]) & 0o777)
    os.utime(path, ns=(int(expected["mtime_ns"]), int(expected["mtime_ns"])))


def _why_left_out(entry: Entry) -> str | None:
    if entry.part == LOCKS:
        return "a lock"
    if entry.part == LEFT:
        return "temporary"
    return entry.damage or entry.foreign


def _bound_to(kept: list[Entry]) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in kept:
        if entry.bound_to is not None:
            root = entry.bound_to.removesuffix(f"/{entry.path}")
            found[root] = found.get(root, 0) + 1
    return found


def _add(tar: tarfile.TarFile, directory: Path, file: File) -> dict[str, Any]:
    """Add one file; returns its line of the manifest. torch never changes a file in place: if one changed, nothing is written."""
    try:
        with opened(directory / file.path) as source:
            reader = HashingReader(source)
            member = tarfile.TarInfo(_FILES + file.path)
            member.size, member.mtime, member.mode = file.size_bytes, file.mtime_ns // 10**9, file.mode
            tar.addfile(member, cast("BinaryIO", reader))
            status = os.fstat(source.fileno())
    except OSError as error:
        raise NotObservedError(f"not written, {file.path} could not be read: {error.strerror or error}") from None
    if (status.st_size, status.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
        raise NotObservedError(f"not written, {file.path} changed meanwhile: a process compiles, wait for it")
    line = {"bytes": file.size_bytes, "mtime_ns": file.mtime_ns, "mode": file.mode}
    return {**line, "sha256": reader.sha256.hexdigest()}


def _add_manifest(tar: tarfile.TarFile, manifest: dict[str, Any]) -> None:
    content = json.dumps(manifest, sort_keys=True).encode()
    for name, data in ((_MANIFEST, content), (_HASH, hashlib.sha256(content).hexdigest().encode())):
        member = tarfile.TarInfo(name)
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    if file is None:
        raise KeyError(name)
    return file.read()
