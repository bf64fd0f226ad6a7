"""What came, went and was rewritten between two states of a cache: folders, snapshots, inventories in JSON, in any mix.

A file of equal size and date counts as equal. Of another date only: its content decides where both sides have it (folders,
snapshots); an inventory has no content, and "date" says so.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from diagnostics.caches import archive, hashes
from diagnostics.caches.entries import entries
from diagnostics.caches.errors import CacheError
from diagnostics.caches.scan import File, scan


@dataclass(kw_only=True)
class State:
    """One side: bytes, mtime_ns and, where known, sha256 of each file."""

    what: str
    files: dict[str, dict[str, Any]]
    directory: Path | None = None
    notes: list[str] = field(default_factory=list)

    def sha256(self, path: str) -> str | None:
        """Of a file's content; None where there is none to look at."""
        known = self.files[path].get("sha256")
        if known is not None or self.directory is None:
            return None if known is None else str(known)
        try:
            return hashes.of_file(self.directory / path)
        except OSError as error:
            self.notes.append(f"{path}: {error.strerror}")
            return None


@dataclass(frozen=True, kw_only=True)
class Change:
    """One file. `kind`: came, went, rewritten, date (equal size and another date; its content is not known, or equal)."""

    kind: str
    path: str
    part: str
    bytes_before: int | None
    bytes_after: int | None
    same_content: bool | None = None


def load(path: Path) -> State:
    """Read a folder, a snapshot or an inventory. Raises CacheError."""
    if path.is_dir():
        found = scan(path, time.time())
        files = {file.path: {"bytes": file.size_bytes, "mtime_ns": file.mtime_ns} for file in found.files}
        return State(what=f"folder {path}", files=files, directory=found.directory, notes=found.unread)
    if not path.is_file():
        raise CacheError(f"there is no {path}: name a folder, a snapshot, or an inventory written with --json")
    with path.open("rb") as file:
        looks_like_json = file.read(1) == b"{"
    if looks_like_json:
        return _inventory(path)
    snapshot = archive.read(path)
    return State(what=f"snapshot {path}", files=snapshot.files)


def difference(before: State, after: State) -> list[Change]:
    """All changes, by path."""
    parts = _parts({**before.files, **after.files})
    found = []
    for path in sorted(parts):
        one, other = before.files.get(path), after.files.get(path)
        kind, same = _kind(before, after, path)
        if kind is not None:
            found.append(
                Change(
                    kind=kind,
                    path=path,
                    part=parts[path],
                    bytes_before=None if one is None else int(one["bytes"]),
                    bytes_after=None if other is None else int(other["bytes"]),
                    same_content=same,
                )
            )
    return found


def _kind(before: State, after: State, path: str) -> tuple[str | None, bool | None]:
    """How the file changed, None where it did not, and whether its content is the same, None where that is not known."""
    one, other = before.files.get(path), after.files.get(path)
    if one is None or other is None:
        return ("came" if one is None else "went"), None
    if one["bytes"] != other["bytes"]:
        return "rewritten", False
    same_date = one["mtime_ns"] == other["mtime_ns"]
    if same_date and None in {one.get("sha256"), other.get("sha256")}:
        return None, None
    first, second = before.sha256(path), after.sha256(path)
    same = None if first is None or second is None else first == second
    if same is False:
        return "rewritten", False
    return (None if same_date else "date"), same


def to_dict(before: State, after: State, changes: list[Change]) -> dict[str, Any]:
    """The difference as JSON values."""
    return {
        "version": 1,
        "kind": "difference",
        "before": before.what,
        "after": after.what,
        "changes": [asdict(change) for change in changes],
        "not_observed": [*before.notes, *after.notes],
    }


def _inventory(path: Path) -> State:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        caches = value["caches"] if value["kind"] == "inventories" else [value]
        files = caches[0]["listing"]
        files = {name: {"bytes": int(file["bytes"]), "mtime_ns": int(file["mtime_ns"])} for name, file in files.items()}
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise CacheError(f"{path} is no inventory ({type(error).__name__}: {error}): write one with inventory --json") from None
    notes = [f"{path} holds {len(caches)} caches: the first, {caches[0]['directory']}, was compared"] if len(caches) > 1 else []
    return State(what=f"inventory {path}", files=files, notes=notes)


def _parts(files: dict[str, dict[str, Any]]) -> dict[str, str]:
    made = [File(path=path, size_bytes=0, mtime_ns=0, atime_ns=0, mode=0, uid=0, device=0, inode=0) for path in files]
    return {file.path: entry.part for entry in entries(made) for file in entry.files}
