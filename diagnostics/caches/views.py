"""Rows for the terminal: an inventory, a difference, what a prune would move."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from diagnostics.caches.difference import Change, State
from diagnostics.caches.entries import Entry
from diagnostics.caches.past_runs import PastRun
from diagnostics.dated.entry import shown
from diagnostics.tables import Table
from diagnostics.terminal import print_detail, print_table

_COLOURS = {"warm": "green", "cold": "yellow", "absent": "yellow", "foreign": "red", "torn": "red", "contended": "red"}
_NOT_OBSERVED = "not observed"
_NO_HITS = (
    "not observed: a cache keeps no count. Runs of the trainer do: --runs DIR reads them. Of other programs, python -m "
    "diagnostics.fxprobe counts hits and misses while they run"
)


def print_inventory(console: Console, values: dict[str, Any], *, max_rows: int | None) -> None:
    """One cache, as `inventory.to_dict` describes it."""
    states = ", ".join(f"[{_COLOURS[state]}]{state}[/]" for state in values["states"])
    size = f"{values['entries']:,} entries, {values['files']:,} files, {megabytes(values['bytes'])}"
    console.print(f"[bold]{escape(values['directory'])}[/]: {states}; {size}", highlight=False)
    print_table(console, _parts(values["parts"]))
    print_table(console, _writers(values["writers"]), max_rows=max_rows)
    print_table(console, _compiled("Graphs", values["graphs"]), max_rows=max_rows)
    print_table(console, _compiled("Kernels and code", values["kernels"]), max_rows=max_rows)
    print_table(
        console, Table("Torn", ("entry", "what"), tuple((row["path"], row["why"]) for row in values["torn"])), max_rows=max_rows
    )
    users = tuple((str(user["pid"]), str(user["uid"]), user["command"], user["how"]) for user in values["users"])
    print_table(console, Table("Processes", ("process", "user", "command", "why"), users))
    read = values["last_read_seconds"]
    hits = values["hits"]
    print_detail(console, "hits and misses of the last runs", _NO_HITS if hits is None else f"of {len(hits)} runs, above")
    print_detail(
        console,
        "an entry was last read",
        _NOT_OBSERVED if read is None else f"{shown(read)} (to a day, as disks are usually mounted)",
    )
    print_notes(console, "problem", values["problems"])
    print_notes(console, _NOT_OBSERVED, values["not_observed"])


def print_runs(console: Console, runs: Sequence[PastRun], notes: Sequence[str], *, max_rows: int | None) -> None:
    """What run logs tell, the last run first; of which nothing is told."""
    rows = tuple(
        (shown(run.time_seconds), run.log, run.directory, run.state, _outcomes(run.graphs), _outcomes(run.autograd))
        for run in runs
    )
    headers = ("ended", "run", "cache", "which was", "graphs: hits + misses", "autograd: hits + misses")
    print_table(console, Table("Runs", headers, rows), max_rows=max_rows)
    print_notes(console, _NOT_OBSERVED, notes)


def _outcomes(counts: dict[str, int]) -> str:
    bypassed = counts.get("bypassed", 0)
    return f"{counts.get('hits', '?')} + {counts.get('misses', '?')}" + (f", {bypassed} not cacheable" if bypassed else "")


def print_difference(console: Console, before: State, after: State, changes: Sequence[Change], *, max_rows: int | None) -> None:
    """Counts, then every change."""
    counts = Counter(change.kind for change in changes)
    words = ", ".join(f"{counts[kind]:,} {kind}" for kind in ("came", "went", "rewritten", "date") if counts[kind])
    console.print(f"{escape(before.what)} -> {escape(after.what)}: {words or 'no difference'}", style="bold", highlight=False)
    rows = tuple(
        (change.kind + _content(change), change.part, change.path, _bytes(change.bytes_before), _bytes(change.bytes_after))
        for change in changes
    )
    print_table(console, Table("Changes", ("what", "part", "file", "bytes before", "bytes after"), rows), max_rows=max_rows)
    print_notes(console, _NOT_OBSERVED, [*before.notes, *after.notes])


def print_chosen(console: Console, chosen: Sequence[tuple[Entry, str]], *, max_rows: int | None) -> None:
    """What a prune would move."""
    rows = tuple((entry.part, entry.name or "", entry.path, f"{entry.size_bytes:,}", why) for entry, why in chosen)
    print_table(console, Table("To move into the trash", ("part", "name", "entry", "bytes", "why"), rows), max_rows=max_rows)


def print_notes(console: Console, label: str, notes: Sequence[str], *, max_notes: int = 10) -> None:
    """Sentences, each on a line, and how many are left."""
    for note in notes[:max_notes]:
        console.print(f"[yellow]{label}[/]: {escape(note)}", highlight=False)
    if len(notes) > max_notes:
        console.print(f"... and {len(notes) - max_notes} more: --json FILE has all of them", highlight=False)


def megabytes(size_bytes: int) -> str:
    """Bytes for people."""
    return f"{size_bytes / 1e6:,.1f} MB" if size_bytes >= 50_000 else f"{size_bytes:,} bytes"


def _parts(rows: Sequence[dict[str, Any]]) -> Table:
    now = time.time()
    return Table(
        "Parts",
        ("part", "entries", "files", "size", "age in days, newest to oldest"),
        tuple(
            (row["part"], f"{row['entries']:,}", f"{row['files']:,}", megabytes(row["bytes"]),
             f"{(now - row['newest_seconds']) / 86400:.1f} to {(now - row['oldest_seconds']) / 86400:.1f}")
            for row in rows
        ),
    )  # fmt: skip


def _writers(rows: Sequence[dict[str, Any]]) -> Table:
    return Table(
        "Written by",
        ("torch", "CUDA", "Triton", "device", "entries", "size", "of use here"),
        tuple(
            (_torch(row), row["cuda"] or "", row["triton"] or "", row["device"] or "", f"{row['entries']:,}",
             megabytes(row["bytes"]), _use(row))
            for row in rows
        ),
    )  # fmt: skip


def _use(row: dict[str, Any]) -> str:
    if row["foreign"]:
        return f"no: {row['foreign']}"
    return "yes" if row["torch"] or (row["triton"] and not row["torch_hash"]) else _NOT_OBSERVED


def _torch(row: dict[str, Any]) -> str:
    return row["torch"] or (f"hash {row['torch_hash'][:12]}" if row["torch_hash"] else _NOT_OBSERVED)


def _compiled(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    return Table(
        title,
        ("name", "part", "key", "size", "written"),
        tuple(
            (row["name"] or _NOT_OBSERVED, row["part"], row["key"][:12], megabytes(row["bytes"]), shown(row["written_seconds"]))
            for row in rows
        ),
    )


def _content(change: Change) -> str:
    if change.kind != "date":
        return ""
    return " (same content)" if change.same_content else " (content not observed)"


def _bytes(size: int | None) -> str:
    return "" if size is None else f"{size:,}"
