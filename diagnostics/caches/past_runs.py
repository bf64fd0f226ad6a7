"""What run logs tell of a compile cache: which run used it, and how often it found there what it looked for.

The trainer ends each run with an event `compile_cache` in its events.jsonl. A log without one says nothing of hits: the run goes
on, was killed, or recorded none. Standard library only.

Known limits: one event is of one process; other programs' runs are counted by `python -m diagnostics.fxprobe` while they run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NAME = "events.jsonl"
_EVENT = "compile_cache"
_PARTS = ("graphs", "autograd")


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """One run's use of a cache. Counts are by outcome: hits, misses, bypassed."""

    log: str
    time_seconds: float
    directory: str
    state: str  # cold, warm, restored, or torch's own
    graphs: dict[str, int] = field(default_factory=dict)
    autograd: dict[str, int] = field(default_factory=dict)


def read(folders: Sequence[Path]) -> tuple[list[PastRun], list[str]]:
    """The runs below `folders`, the last one first, and what could not be told."""
    runs: list[PastRun] = []
    notes: list[str] = []
    for folder in folders:
        logs = [folder] if folder.is_file() else _logs(folder, notes)
        if not logs:
            notes.append(f"{folder}: there is no {_NAME} in it: name the --output of runs, or a folder above")
        for log in logs:
            try:
                found = list(_events(log))
            except OSError as error:
                notes.append(f"{log}: {error.strerror or error}")
                continue
            if not found:
                notes.append(f"{log}: nothing of hits and misses: the run goes on, was killed, or recorded none")
            runs += found
    return sorted(runs, key=lambda run: -run.time_seconds), notes


def _logs(folder: Path, notes: list[str]) -> list[Path]:
    def told(error: OSError) -> None:
        notes.append(f"{error.filename}: {error.strerror}")

    found = (Path(where) / _NAME for where, _, names in os.walk(folder, onerror=told) if _NAME in names)
    return sorted(log for log in found if log.is_file())  # no pipe, no folder


def _events(log: Path) -> Iterator[PastRun]:
    with log.open("rb") as file:
        for line in file:
            if _EVENT.encode() not in line:
                continue
            try:
                event = json.loads(line)
            except ValueError:  # the line that was being written when the run was killed
                continue
            if isinstance(event, dict) and event.get("name") == _EVENT and (run := _run(str(log), event)) is not None:
                yield run


def _run(log: str, event: dict[str, Any]) -> PastRun | None:
    fields, when = event.get("fields"), event.get("time_seconds")
    if not isinstance(fields, dict) or not isinstance(when, int | float):
        return None
    graphs, autograd = ({k: v for k, v in _dict(fields.get(part)).items() if isinstance(v, int)} for part in _PARTS)
    return PastRun(
        log=log,
        time_seconds=when,
        directory=str(fields.get("directory")),
        state=str(fields.get("state")),
        graphs=graphs,
        autograd=autograd,
    )


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
