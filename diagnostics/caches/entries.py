"""What a file of a compile cache belongs to, by its path: graphs, kernels, autotuning results, locks, left-overs.

Known limits: the layouts of torch 2.11 to 2.15 and Triton 3.6 to 3.9. What is not recognised is the part "other" and is
never pruned.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from diagnostics.caches.scan import File

GRAPHS, AUTOGRAD, TRITON = "FX graphs", "AOTAutograd", "Triton kernels"
CPP, PYTHON, AUTOTUNE = "C++ kernels", "Python code", "autotuning"
HEADERS, DYNAMO, LOCKS, LEFT, OTHER = "precompiled headers", "Dynamo", "locks", "temporary", "other"
COMPILED = (GRAPHS, AUTOGRAD, TRITON, CPP, PYTHON)
LOOKED_UP = (GRAPHS, AUTOGRAD, TRITON)  # what makes a start warm; the rest is found through them

_TRITON_KEY = r"(?:[A-Z2-7]{52}|[0-9a-f]{64})"
_TEMPORARY = re.compile(r"(?:^|/)(?:\.(\d+)\.\d+\.tmp$|tmp\.pid_(\d+)_[^/]*|tmp\.[0-9a-f-]{36}(?:/|$)|[^/]*\.o\.tmp$)")
_PATTERNS = tuple(
    (part, re.compile(pattern))
    for part, pattern in (
        (GRAPHS, r"^(fxgraph/[^/]+/([^/]+))/[^/]+$"),
        (AUTOGRAD, r"^(aotautograd/(?:[^/]{2}/)?([^/]{10,}))/[^/]+$"),
        (TRITON, rf"^((?:triton/(?:\d+/)?)?({_TRITON_KEY}))/.+$"),
        (AUTOTUNE, r"^([0-9a-z]{2}/([^/]+)\.best_config)$"),
        (PYTHON, r"^([a-z2-7]{2}/(c[a-z2-7]{51})\.py)$"),
        (CPP, r"^([a-z2-7]{2}/(c[a-z2-7]{51}))\.[^/]+$"),
        (HEADERS, r"^(precompiled_headers/([^/.]+))[^/]*$"),
        (DYNAMO, r"^(dynamo/([^/]+))(?:/.*)?$"),
        (LOCKS, r"^(locks/([^/]+))$|^(.*\.lock)$|^(.*/lock)$"),
    )
)
_WHOLE_FOLDER = (GRAPHS, AUTOGRAD, TRITON)


@dataclass(frozen=True, kw_only=True)
class Writer:
    """Who wrote an entry, as far as it says so; None is "not observed"."""

    torch: str | None = None
    torch_git: str | None = None
    torch_key: str | None = None  # torch's hash of its own sources, in the entry's words
    torch_hash: str | None = None  # a short name of the same
    cuda: str | None = None
    triton: str | None = None
    device: str | None = None  # "NVIDIA H200", or "cuda sm90" where only the architecture is known
    python: str | None = None  # as in a library's name: "312"


@dataclass(kw_only=True)
class Entry:
    """One thing that a cache can have or not have. `path` is its folder, or what its files' names begin with."""

    part: str
    key: str
    path: str
    files: list[File] = field(default_factory=list)
    name: str | None = None  # of the graph or kernel, None: not observed
    writer: Writer | None = None
    foreign: str | None = None  # why it is of no use here
    damage: str | None = None
    refers_to: tuple[str, ...] = ()  # keys of the code that it runs
    graphs: list[Entry] = field(default_factory=list)  # of code: the graphs that run it, as far as they are here
    bound_to: str | None = None  # an absolute folder that it names and reads from

    @property
    def size_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def newest_ns(self) -> int:
        """When the last of its files was written, in nanoseconds since 1970."""
        return max(file.mtime_ns for file in self.files)

    @property
    def read_ns(self) -> int | None:
        """When one of its files was last read after it was written; None where the file system does not tell."""
        read = [file.atime_ns for file in self.files if file.atime_ns > file.mtime_ns + 1_000_000_000]
        return max(read, default=None)

    @property
    def movable(self) -> tuple[str, ...]:
        """The paths to move so that all of it is gone: Triton takes a folder that is there for a kernel that is there."""
        return (self.path,) if self.part in _WHOLE_FOLDER else tuple(file.path for file in self.files)


def entries(files: Iterable[File]) -> list[Entry]:
    """Group files into entries, in the order of their paths."""
    found: dict[tuple[str, str], Entry] = {}
    for file in files:
        part, path, key = _belongs(file.path)
        entry = found.setdefault((part, path), Entry(part=part, key=key, path=path))
        entry.files.append(file)
    return sorted(found.values(), key=lambda entry: entry.path)


def writing_process(path: str) -> int | None:
    """The id of the process that was writing this temporary file, by its name."""
    match = _TEMPORARY.search(path)
    return None if match is None or not (match[1] or match[2]) else int(match[1] or match[2])


def of_part(found: Sequence[Entry], *parts: str) -> list[Entry]:
    """The entries of these parts."""
    return [entry for entry in found if entry.part in parts]


def _belongs(path: str) -> tuple[str, str, str]:
    """Part, path and key of the entry that a file is of."""
    if _TEMPORARY.search(path):
        return LEFT, path, PurePosixPath(path).name
    for part, pattern in _PATTERNS:
        if match := pattern.match(path):
            groups = [group for group in match.groups() if group is not None]
            return part, groups[0], PurePosixPath(groups[-1]).name
    return OTHER, path, PurePosixPath(path).name
