"""Put a snapshot in a cache's place, in one step: killed at any time, the cache is what it was or what the snapshot is.

The snapshot is unpacked and checked inside the trash; then the two folders are swapped, and the trash holds the old one.
Where there was no folder, or an empty one, it is one rename.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from diagnostics.caches import archive, here, trash
from diagnostics.caches.archive import Snapshot
from diagnostics.caches.entries import COMPILED, OTHER, entries
from diagnostics.caches.errors import CacheError, NotObservedError, RefusedError
from diagnostics.caches.scan import scan
from diagnostics.caches.trash import Thrown
from diagnostics.caches.users import users


def target(directory: Path) -> Path:
    """The folder itself where `directory` is a link to it."""
    return directory.resolve()


def check(snapshot: Snapshot, directory: Path) -> list[str]:
    """Whether it may be restored there; returns what to know. Raises RefusedError with the reason, or CacheError."""
    differences = here.differences(snapshot.fingerprint, here.fingerprint())
    if differences:
        raise RefusedError(f"{snapshot.path} is of another environment: {'; '.join(differences)}. Not restored")
    wanted = {str(directory.absolute()), str(target(directory))}
    if snapshot.bound_to and not wanted & {*snapshot.bound_to, snapshot.directory}:
        count, where = sum(snapshot.bound_to.values()), ", ".join(sorted(snapshot.bound_to))
        raise RefusedError(
            f"{count} graphs and kernels of {snapshot.path} name {where} and are read from there, not from {directory}: "
            f"restore with --directory {where}"
        )
    _check_place(target(directory))
    notes = []
    if snapshot.torch_folder != here.torch_folder():
        notes.append(f"torch is in {here.torch_folder()}, not in {snapshot.torch_folder}: C++ kernels are compiled again")
    return notes


def restore(snapshot: Snapshot, directory: Path) -> Thrown:
    """Restore it; returns where the old cache went. Raises CacheError; the cache is then as it was."""
    place = target(directory)
    place.parent.mkdir(parents=True, exist_ok=True)
    with trash.held(place):
        thrown = trash.new(place, "restore", snapshot=str(snapshot.path.absolute()))
        try:
            archive.unpack(snapshot, thrown.content)
            _check_place(place)
            thrown = thrown.note(new_inode=thrown.content.stat().st_ino)
            if place.exists() and any(place.iterdir()):
                trash.swap(thrown.content, place)
            else:
                os.rename(thrown.content, place)  # noqa: PTH104 - onto an empty folder: this one is documented to work
                archive.sync_folder(place.parent)
        except BaseException:
            if not _happened(thrown, place):
                shutil.rmtree(thrown.folder)
            raise
        return thrown


def undo(directory: Path) -> str:
    """Take the last restore or prune back; returns what was done. Raises CacheError where there is none."""
    place = target(directory)
    with trash.held(place):
        candidates = [one for one in trash.thrown(place) if not one.record.get("undone")]
        finished = [one for one in candidates if one.record["what"] != "restore" or _happened(one, place)]
        if not finished:
            raise CacheError(f"nothing to undo: {trash.place(place)} holds nothing that was taken from {place}")
        last = finished[-1]
        said = _undo_restore(last, place) if last.record["what"] == "restore" else _undo_prune(last, place)
        last.note(undone=time.time())
        return said


def _happened(thrown: Thrown, place: Path) -> bool:
    """Whether the swap or rename of a restore took place: then the new folder is no longer in the trash."""
    new = thrown.record.get("new_inode")
    return new is not None and place.is_dir() and not (thrown.content.is_dir() and thrown.content.stat().st_ino == new)


def _undo_restore(thrown: Thrown, place: Path) -> str:
    if thrown.content.is_dir():
        trash.swap(thrown.content, place)
        return f"{place} is again what it was; what had been restored is in {thrown.content}"
    place.rename(thrown.content)
    return f"{place} was not there before, or empty; what had been restored is in {thrown.content}"


def _undo_prune(thrown: Thrown, place: Path) -> str:
    back, kept = 0, []
    for name in thrown.record["paths"]:
        source, destination = thrown.content / name, place / name
        if not source.exists():
            continue
        if destination.exists():
            kept.append(name)
            continue
        destination.parent.mkdir(parents=True, exist_ok=True)
        source.rename(destination)
        back += 1
    more = f"; {len(kept)} were written again meanwhile and stay in {thrown.content}" if kept else ""
    return f"{back} files and folders are back in {place}{more}"


def _check_place(place: Path) -> None:
    """A folder that is replaced is a compile cache that nobody uses."""
    if not place.exists():
        return
    found = scan(place, time.time())
    known = entries(found.files)
    if found.unread:
        raise NotObservedError(f"{place}: {'; '.join(found.unread[:3])}: not replaced")
    if found.files and (
        not any(entry.part in COMPILED for entry in known) or sum(entry.part == OTHER for entry in known) > len(known) / 2
    ):
        raise CacheError(f"{place} is not empty and is no compile cache: name another folder with --directory")
    holding = [user for user in users(place, found.files)[0] if user.holds]
    if holding:
        what = ", ".join(f"process {user.pid} ({user.command[:60]}) {user.how}" for user in holding[:3])
        raise RefusedError(f"{place} is in use: {what}: end it first")
