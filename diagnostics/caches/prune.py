"""Move entries out of a compile cache into the trash: old, foreign or torn ones, or the oldest until it is small enough.

Only what is recognised as an entry is moved. Of a graph, what looks it up goes first, so that a start meanwhile compiles
anew and finds nothing half. The moves are one rename each: a killed prune has moved some, and `--undo` puts them back.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diagnostics.caches import trash
from diagnostics.caches.entries import AUTOGRAD, GRAPHS, LOCKS, OTHER, Entry
from diagnostics.caches.errors import CacheError, NotObservedError, RefusedError
from diagnostics.caches.inventory import Inventory
from diagnostics.caches.trash import Thrown

_DAY_SECONDS = 86400.0
_YOUNG_SECONDS = 600.0  # what looks torn may be being written, by a compiler or on another machine


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What goes; a rule that is None or False is not applied."""

    older_than_days: float | None = None
    max_bytes: int | None = None
    foreign: bool = False
    torn: bool = False


def choose(inventory: Inventory, rules: Rules, now_seconds: float) -> list[tuple[Entry, str]]:
    """The entries that go, and why. Raises CacheError; NotObservedError where dates or files cannot be relied on."""
    if inventory.scan.unread:
        raise NotObservedError(f"nothing was moved: {'; '.join(inventory.scan.unread[:3])}")
    if inventory.scan.doubtful and (rules.older_than_days is not None or rules.max_bytes is not None):
        raise NotObservedError(f"nothing was moved, ages are not known: {'; '.join(inventory.scan.doubtful[:3])}")
    if all(entry.part in {OTHER, LOCKS} for entry in inventory.entries) and inventory.entries:
        raise CacheError(f"{inventory.directory} holds nothing that torch or Triton keeps in a compile cache: name one")
    able = [entry for entry in inventory.entries if entry.part not in {OTHER, LOCKS} or entry.damage is not None]
    going: dict[str, tuple[Entry, str]] = {}
    for entry in able:
        age_days = (now_seconds - used_ns(entry) / 1e9) / _DAY_SECONDS
        if rules.torn and entry.damage is not None and not is_young(entry, now_seconds):
            going[entry.path] = (entry, f"torn: {entry.damage}")
        elif rules.foreign and entry.foreign is not None:
            going[entry.path] = (entry, f"foreign: {entry.foreign}")
        elif rules.older_than_days is not None and age_days > rules.older_than_days:
            going[entry.path] = (entry, f"not used for {age_days:.1f} days")
    if rules.max_bytes is not None:
        _until_small(able, going, rules.max_bytes, sum(file.size_bytes for file in inventory.scan.files))
    return sorted(going.values(), key=lambda pair: (pair[0].part not in {AUTOGRAD, GRAPHS}, pair[0].path))


def is_young(entry: Entry, now_seconds: float) -> bool:
    """Whether somebody may still be writing it."""
    return now_seconds - entry.newest_ns / 1e9 < _YOUNG_SECONDS


def used_ns(entry: Entry) -> int:
    """When it was last written, or read where the file system tells."""
    return max(entry.newest_ns, entry.read_ns or 0)


def prune(inventory: Inventory, chosen: Sequence[tuple[Entry, str]]) -> Thrown:
    """Move them. Raises RefusedError where a process uses the cache, CacheError; what was moved is then back."""
    holding = [user for user in inventory.users if user.holds]
    if holding:
        what = ", ".join(f"process {user.pid} ({user.command[:60]}) {user.how}" for user in holding[:3])
        raise RefusedError(f"{inventory.directory} is in use: {what}: end it first")
    paths = [path for entry, _ in chosen for path in entry.movable]
    with trash.held(inventory.directory):
        thrown = trash.new(inventory.directory, "prune", paths=paths)
        moved: list[tuple[Path, Path]] = []
        try:
            for path in paths:
                source, destination = inventory.directory / path, thrown.content / path
                if not source.exists():  # went with its folder, or meanwhile
                    continue
                destination.parent.mkdir(parents=True, exist_ok=True)
                source.rename(destination)
                moved.append((source, destination))
        except BaseException:
            for source, destination in reversed(moved):
                destination.rename(source)
            shutil.rmtree(thrown.folder)
            raise
        return thrown


def _until_small(able: Sequence[Entry], going: dict[str, tuple[Entry, str]], max_bytes: int, total_bytes: int) -> None:
    """Add the entries that were not used for longest until what stays is small enough."""
    left = total_bytes - sum(entry.size_bytes for entry, _ in going.values())
    for entry in sorted(able, key=used_ns):
        if left <= max_bytes:
            return
        if entry.path not in going:
            going[entry.path] = (entry, f"the cache is larger than {max_bytes:,} bytes")
            left -= entry.size_bytes
