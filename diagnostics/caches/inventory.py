"""What lies in a compile cache: parts, graphs, kernels, who wrote them, what is torn, who uses it - and its states.

States, several at once: "absent" no folder · "cold" nothing of use here · "warm" entries of use here, as far as is observed ·
"foreign" entries of another torch, Triton, CUDA, Python or device · "torn" cut-off or empty entries, files of a writer that
died · "contended" two live processes or two users use it. Whether a run hit or missed the cache is kept nowhere on disk:
`last_read_seconds` is what the file system tells, and fxprobe counts hits and misses while a program runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from diagnostics.caches import contents, here
from diagnostics.caches.entries import AUTOGRAD, COMPILED, GRAPHS, LEFT, LOCKS, LOOKED_UP, Entry, Writer, entries, writing_process
from diagnostics.caches.scan import Scan, opened, scan
from diagnostics.caches.sources import UnknownTorch
from diagnostics.caches.users import User, alive_since, users

VERSION = 1
PROBLEMS = ("foreign", "torn", "contended")


@dataclass(kw_only=True)
class Inventory:
    """One cache. `problems` are reasons to distrust the rest: what could not be read, dates that cannot be."""

    directory: Path
    scan: Scan
    entries: list[Entry]
    users: list[User] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was not observed, and is no reason to distrust the rest

    @property
    def torn(self) -> list[Entry]:
        """Damaged entries and left-overs of writers that are gone."""
        return [entry for entry in self.entries if entry.damage is not None]

    @property
    def foreign(self) -> list[Entry]:
        """Entries of no use here."""
        return [entry for entry in self.entries if entry.foreign is not None]

    @property
    def contended(self) -> bool:
        """Two live processes or two users."""
        return len(self.users) > 1 or len({user.uid for user in self.users} | {file.uid for file in self.scan.files}) > 1

    @property
    def states(self) -> tuple[str, ...]:
        """The states, the most important last."""
        useful = [e for e in self.entries if e.part in LOOKED_UP and e.foreign is None and e.damage is None]
        present = {"foreign": bool(self.foreign), "torn": bool(self.torn), "contended": self.contended}
        return ("warm" if useful else "cold", *(name for name in PROBLEMS if present[name]))

    @property
    def problems(self) -> list[str]:
        """What was not looked at or cannot be believed."""
        return [*self.scan.unread, *self.scan.doubtful]


def take(directory: Path, *, now_seconds: float | None = None) -> Inventory:
    """Look at one cache. Raises CacheError."""
    now = time.time() if now_seconds is None else now_seconds
    found = scan(directory, now)
    inventory = Inventory(directory=found.directory, scan=found, entries=entries(found.files))
    found.unread += contents.read(found.directory, inventory.entries)
    _judge(inventory)
    inventory.users, notes = users(found.directory, found.files)
    inventory.notes += notes
    return inventory


def _judge(inventory: Inventory) -> None:
    """Say which entries are foreign and which left-overs are torn."""
    unnamed = [e for e in inventory.entries if e.writer and e.writer.torch_key and not e.writer.torch]
    key = None
    if unnamed:
        try:
            key = here.torch_key()
        except UnknownTorch as error:
            inventory.notes.append(f"whose are {len(unnamed)} entries that name no torch but a hash of its sources: {error}")
    ours = here.fingerprint()
    for entry in inventory.entries:
        if entry.writer and key is not None and entry.writer.torch is None and entry.writer.torch_key == key:
            entry.writer = replace(entry.writer, torch=ours["torch"], torch_git=ours["torch_git"], cuda=ours["cuda"])
        entry.foreign = here.foreign(entry.writer, torch_key=key)
        if entry.part == LEFT:
            entry.damage = _left_over(entry)
        elif entry.part == LOCKS and entry.size_bytes:
            entry.damage = _dead_lock(inventory.directory, entry)
    for entry in inventory.entries:
        if entry.graphs:  # code that one graph of use still runs is of use
            reasons = [graph.foreign for graph in entry.graphs]
            entry.foreign = reasons[0] if all(reasons) else None
            entry.writer = next((graph.writer for graph in entry.graphs if graph.foreign is None), entry.writer)


def _left_over(entry: Entry) -> str | None:
    """Torn, unless the process that is writing it lives here; one of another machine or container cannot be seen."""
    pid = writing_process(entry.path)
    if pid is not None and alive_since(pid, entry.newest_ns):
        return None
    return "left by a process that ended while it wrote" if pid is not None else "left half-written; by whom is not observed"


def _dead_lock(directory: Path, entry: Entry) -> str | None:
    """Locks of the kind that holds as long as the file is there name a process; the usual ones are empty and block nobody."""
    try:
        with opened(directory / entry.files[0].path) as file:
            word = file.read(100).decode(errors="replace").split()[:1]
    except OSError:
        return None
    if not word or not word[0].isdigit() or alive_since(int(word[0]), entry.newest_ns):
        return None
    return f"a lock of process {word[0]}, which has ended"


def to_dict(inventory: Inventory, *, listing: bool = True) -> dict[str, Any]:
    """The inventory as JSON values; `listing` adds every file, for `diff`."""
    found = inventory.entries
    result: dict[str, Any] = {
        "version": VERSION,
        "kind": "inventory",
        "directory": str(inventory.directory),
        "states": list(inventory.states),
        "files": len(inventory.scan.files),
        "bytes": sum(file.size_bytes for file in inventory.scan.files),
        "entries": len(found),
        "parts": parts(found),
        "writers": writers(found),
        "graphs": [_row(entry) for entry in found if entry.part in {AUTOGRAD, GRAPHS}],
        "kernels": [_row(entry) for entry in found if entry.part in COMPILED and entry.part not in {AUTOGRAD, GRAPHS}],
        "torn": [{"path": entry.path, "why": entry.damage} for entry in inventory.torn],
        "users": [asdict(user) for user in inventory.users],
        "hits": None,
        "last_read_seconds": last_read_seconds(found),
        "problems": inventory.problems,
        "not_observed": inventory.notes,
    }
    if listing:
        result["listing"] = {file.path: {"bytes": file.size_bytes, "mtime_ns": file.mtime_ns} for file in inventory.scan.files}
    return result


def parts(found: Sequence[Entry]) -> list[dict[str, Any]]:
    """Entries, files, bytes and age of each part, the largest first."""
    rows = []
    for part in dict.fromkeys(entry.part for entry in found):
        own = [entry for entry in found if entry.part == part]
        rows.append(
            {
                "part": part,
                "entries": len(own),
                "files": sum(len(entry.files) for entry in own),
                "bytes": sum(entry.size_bytes for entry in own),
                "oldest_seconds": min(entry.newest_ns for entry in own) / 1e9,
                "newest_seconds": max(entry.newest_ns for entry in own) / 1e9,
            }
        )
    return sorted(rows, key=lambda row: -row["bytes"])


def writers(found: Sequence[Entry]) -> list[dict[str, Any]]:
    """Entries and bytes by who wrote them; what says nothing is one row of its own."""
    names = ("torch", "torch_hash", "torch_git", "cuda", "triton", "device", "foreign")
    totals: dict[tuple[Any, ...], list[int]] = {}
    for entry in found:
        if entry.part in COMPILED:
            w = entry.writer or Writer()
            short = None if w.torch else w.torch_hash
            total = totals.setdefault((w.torch, short, w.torch_git, w.cuda, w.triton, w.device, entry.foreign), [0, 0])
            total[0] += 1
            total[1] += entry.size_bytes
    largest = sorted(totals.items(), key=lambda item: -item[1][1])
    return [{**dict(zip(names, values, strict=True)), "entries": count, "bytes": size} for values, (count, size) in largest]


def last_read_seconds(found: Sequence[Entry]) -> float | None:
    """When an entry was last read after it was written: the last hit, to a day where the disk is mounted as usual."""
    times = [read for entry in found if entry.part in COMPILED and (read := entry.read_ns) is not None]
    return max(times) / 1e9 if times else None


def _row(entry: Entry) -> dict[str, Any]:
    return {
        "part": entry.part,
        "name": entry.name,
        "key": entry.key,
        "files": len(entry.files),
        "bytes": entry.size_bytes,
        "written_seconds": entry.newest_ns / 1e9,
        "writer": None if entry.writer is None else asdict(entry.writer),
        "foreign": entry.foreign,
        "damage": entry.damage,
    }
