"""What a process under the probes leaves on disk while it runs, so that a crash, `os._exit` or SIGKILL loses nothing seen.

One file a process: JSON lines. The first says what the process is, `torch` which torch it imported, `seen` one place and how
often it was seen so far (a later line of the same number replaces it), `end` that its exit handlers ran. A line is one
`write` to a file opened for it, so that a program that closes all its files, or changes its directory, does no harm.
Standard library only; this module imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diagnostics.output import say
from diagnostics.records import Observation

# The program may replace them, or take them away while the interpreter ends.
_open, _write, _close, _dumps = os.open, os.write, os.close, json.dumps
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT


class Journal:
    """Writes the file of this process."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._complained = False
        self.restart()

    def restart(self) -> None:
        """Begin a new file: at the start, and in a forked child."""
        self._path = f"{self._directory}/{os.getpid()}-{os.urandom(4).hex()}.jsonl"
        self._put(
            "process",
            {
                "pid": os.getpid(),
                "parent_pid": os.getppid(),
                "command": _command(),
                "rank": os.environ.get("RANK"),
                "python": sys.version.split()[0],
            },
        )

    def torch(self, version: str) -> None:
        """The process has imported torch."""
        self._put("torch", version)

    def seen(self, number: int, observation: Observation) -> None:
        """Place `number` as it is now."""
        self._put("seen", {"number": number, "observation": observation.to_dict()})

    def end(self) -> None:
        """The exit handlers of the process ran."""
        self._put("end", True)

    def _put(self, kind: str, value: Any) -> None:
        line = (_dumps({kind: value}) + "\n").encode()
        try:
            file = _open(self._path, _FLAGS, 0o600)
            try:
                _write(file, line)
            finally:
                _close(file)
        except FileNotFoundError:
            return  # fxprobe has ended before its descendant and removed the directory; nobody will read it
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        """Once: what is lost must be known, and the program must go on."""
        if not self._complained:
            self._complained = True
            say(f"fxprobe: what process {os.getpid()} sees is lost from here: {error}")


@dataclass(frozen=True, kw_only=True)
class ProcessRecord:
    """One process of the observed program."""

    pid: int
    parent_pid: int
    command: str
    rank: str | None  # torchrun's RANK
    torch: str | None  # its version; None: never imported
    ended: bool  # its exit handlers ran
    observations: tuple[Observation, ...]

    @property
    def label(self) -> str:
        """How people tell it from the others."""
        return f"rank {self.rank} (pid {self.pid})" if self.rank is not None else f"pid {self.pid} ({self.command})"

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON values."""
        return dataclasses.asdict(self)


def read_journals(directory: Path) -> tuple[ProcessRecord, ...]:
    """All processes, those without a parent among them first. A line that was cut by a crash is left out."""
    records = [record for path in directory.glob("*.jsonl") if (record := _read(path)) is not None]
    known = {record.pid for record in records}
    return tuple(sorted(records, key=lambda record: (record.parent_pid in known, record.pid)))


def _read(path: Path) -> ProcessRecord | None:
    process: dict[str, Any] | None = None
    torch, ended, entries = None, False, dict[int, Observation]()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        process = values.get("process", process)
        torch = values.get("torch", torch)
        ended = ended or "end" in values
        if "seen" in values:
            entries[values["seen"]["number"]] = Observation.from_dict(values["seen"]["observation"])
    if process is None:
        return None
    return ProcessRecord(
        pid=process["pid"],
        parent_pid=process["parent_pid"],
        command=process["command"],
        rank=process["rank"],
        torch=torch,
        ended=ended,
        observations=tuple(entries.values()),
    )


def _command() -> str:
    """The program of this process: its script or module, without the interpreter."""
    words = sys.orig_argv[1:]
    if "--multiprocessing-fork" in words:
        return "multiprocessing child"
    while words[:1] and words[0].startswith("-") and words[0] not in ("-m", "-c"):
        words = words[1:]
    if words[:1] == ["-m"]:
        return f"-m {words[1]}" if len(words) > 1 else "-m"
    return Path(words[0]).name if words else "python"
