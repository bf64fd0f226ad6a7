"""Walk folders once and say what is what: site-packages, compile caches, repositories, logs, checkpoints. Follows no links."""

from __future__ import annotations

import os
import re
import site
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diagnostics.caches.here import inductor_directory, triton_directory

MAX_FILES = 500_000
_SKIPPED = {".git", "node_modules", "__pycache__", ".nox", ".mypy_cache", ".ruff_cache", "proc", "sys", "dev"}
_CACHE = re.compile(r"^torchinductor(?:_.*)?$|^inductor_cache$|^triton_cache$")
_CACHE_PARTS = {"fxgraph", "aotautograd"}
_LOG = re.compile(
    r"\.(?:log|out|err)(?:\.\d+)?$|^(?:events\.jsonl|stderr|stdout|stdout\.txt|stderr\.txt|output\.log|nohup\.out)$"
)
_SYSTEM_LOGS = {"dpkg.log", "kern.log", "syslog", "dmesg", "messages"}
_CHECKPOINT = re.compile(r"\.(?:safetensors|pt|pth|ckpt|bin|distcp)$")


@dataclass(kw_only=True)
class Places:
    """Folders and files by what they are."""

    site_packages: list[Path] = field(default_factory=list)
    caches: list[Path] = field(default_factory=list)
    repositories: list[Path] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)
    system_logs: list[Path] = field(default_factory=list)
    checkpoints: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def places(folders: Sequence[Path]) -> Places:
    """Look through `folders`."""
    found, count = Places(), 0
    for folder in folders:
        for path, directories, files in _walk(folder, found.notes):
            count += len(files)
            if count > MAX_FILES:
                found.notes.append(f"only the first {MAX_FILES:,} files were looked at: name smaller folders")
                return found
            _sort(found, path, directories, files)
    return found


def usual() -> Places:
    """What a run on this machine uses when no folder is named: this machine's, and the current folder."""
    try:
        return with_machine(places([Path.cwd()]))
    except FileNotFoundError:
        return with_machine(Places(notes=["the current folder was deleted: not looked at"]))


def with_machine(found: Places) -> Places:
    """Beside what was found: this Python's packages, this user's compile caches and the system's logs."""
    found.caches += [path for path in (inductor_directory(), triton_directory()) if path not in found.caches]
    own = [Path(name) for name in (*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else []))]
    found.site_packages += [path for path in own if path.is_dir() and path not in found.site_packages and str(path) in sys.path]
    found.system_logs += [Path("/var/log") / name for name in sorted(_SYSTEM_LOGS) if (Path("/var/log") / name).is_file()]
    return found


def _walk(folder: Path, notes: list[str]) -> Iterator[tuple[Path, list[str], list[str]]]:
    def missed(error: OSError) -> None:
        notes.append(f"{error.filename}: {error.strerror}: not looked at")

    for name, directories, files in os.walk(folder, onerror=missed):
        directories.sort()
        yield Path(name), directories, sorted(files)


def _sort(found: Places, path: Path, directories: list[str], files: list[str]) -> None:
    """File one folder, and keep the walk out of what is looked at elsewhere by leaving it out of `directories`."""
    if (path / ".git").exists():
        found.repositories.append(path)
    if path.name in {"site-packages", "dist-packages"}:
        found.site_packages.append(path)
        directories.clear()
        return
    if _CACHE.match(path.name) or _CACHE_PARTS & set(directories) or path.match(".triton/cache"):
        found.caches.append(path)
        directories.clear()
        return
    directories[:] = [name for name in directories if name not in _SKIPPED]
    for name in files:
        if name in _SYSTEM_LOGS:
            found.system_logs.append(path / name)
        elif _LOG.search(name) and not (path / name).is_fifo():  # to open one waits for its writer
            found.logs.append(path / name)
        elif _CHECKPOINT.search(name):
            found.checkpoints.append(path / name)
