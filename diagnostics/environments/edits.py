"""Installed files against RECORD: which were edited, which are gone, and what runs at the start of Python beside them.

Quick: every file's size and date are looked at, and those whose size differs or that are younger than RECORD are hashed, like
all Python files of `FULLY` (what traces and compiles). `everything` hashes all. Limits of the quick way: an edit that keeps
the size and an old date is seen in `FULLY` only; after `MAX_BYTES` of suspects the rest is counted as not hashed.
"""

from __future__ import annotations

import base64
import hashlib
import os
import site
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diagnostics.environments.distributions import HASH_CHARACTERS, RUN_AT_START, Distribution, RecordedFile, recorded_files

FULLY = ("torch", "triton")
MAX_BYTES = 256 * 2**20
_SLACK_SECONDS = 2.0  # RECORD and the last files are written in one go


@dataclass(kw_only=True)
class Check:
    """What was found; paths as in RECORD."""

    edited: dict[str, list[str]] = field(default_factory=dict)  # by distribution: "PATH [hash of what is there now]"
    gone: dict[str, list[str]] = field(default_factory=dict)
    unreadable: dict[str, list[str]] = field(default_factory=dict)  # "PATH: reason"
    num_files: int = 0  # looked at
    num_hashed: int = 0
    num_not_hashed: int = 0  # suspects after MAX_BYTES
    without_record: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON values for a document."""
        return dict(vars(self))

    @property
    def is_clean(self) -> bool:
        """Nothing was edited and nothing is gone."""
        return not self.edited and not self.gone


def check(distributions: Iterable[Distribution], *, everything: bool = False, suffixes: tuple[str, ...] = ()) -> Check:
    """Compare the files of `distributions` with RECORD; with `suffixes` only files that end so, without hashing `FULLY`."""
    found = Check()
    suspects: list[tuple[Distribution, RecordedFile, str]] = []
    for one in sorted(distributions, key=lambda each: (each.name not in FULLY, each.name)):
        files = recorded_files(one)
        if not files and not one.is_editable:
            found.without_record.append(one.name)
        fully = everything or (one.name in FULLY and not suffixes)
        for each in files:
            if each.path.endswith(".pyc") or (suffixes and not each.path.endswith(suffixes)):
                continue
            path = os.path.join(one.base, each.path)  # noqa: PTH118 - 50,000 times: a Path each would double the time
            found.num_files += 1
            if _is_suspect(found, one, each, path, fully=fully, everything=everything):
                suspects.append((one, each, path))
    _hash_suspects(found, suspects, max_bytes=None if everything else MAX_BYTES)
    return found


def startup_files(distributions: Iterable[Distribution]) -> dict[str, str]:
    """Files of site-packages that Python runs at its start and that belong to no distribution, with a hash of each."""
    folders = {Path(path) for path in (*site.getsitepackages(), site.getusersitepackages())} & {Path(path) for path in sys.path}
    owned = {str((one.base / path).resolve()) for one in distributions for path in one.at_start}
    paths = [
        path for folder in sorted(folders) for path in (*sorted(folder.glob("*.pth")), *(folder / name for name in RUN_AT_START))
    ]
    return {path.name: _short_hash(path) for path in paths if path.is_file() and str(path.resolve()) not in owned}


def _is_suspect(found: Check, one: Distribution, each: RecordedFile, path: str, *, fully: bool, everything: bool) -> bool:
    """Whether the file has to be hashed; what is gone is noted here."""
    try:
        state = os.stat(path)  # noqa: PTH116 - as above
    except (FileNotFoundError, NotADirectoryError):
        found.gone.setdefault(one.name, []).append(each.path)
        return False
    except OSError as error:
        found.unreadable.setdefault(one.name, []).append(f"{each.path}: {error.strerror}")
        return False
    if not each.digest:
        return False
    if each.size_bytes is not None and state.st_size != each.size_bytes:
        found.edited.setdefault(one.name, []).append(f"{each.path} [{_short_hash(Path(path))}]")
        return False
    is_younger = one.installed_seconds is None or state.st_mtime > one.installed_seconds + _SLACK_SECONDS
    return everything or is_younger or (fully and path.endswith(".py"))


def _hash_suspects(found: Check, suspects: Sequence[tuple[Distribution, RecordedFile, str]], *, max_bytes: int | None) -> None:
    read_bytes = 0
    for one, each, path in suspects:
        if max_bytes is not None and read_bytes > max_bytes:
            found.num_not_hashed += 1
            continue
        read_bytes += each.size_bytes or 0
        algorithm, _, wanted = each.digest.partition("=")
        try:
            digest = _digest(path, algorithm)
        except (OSError, ValueError) as error:
            found.unreadable.setdefault(one.name, []).append(f"{each.path}: {error}")
            continue
        found.num_hashed += 1
        if digest != wanted:
            found.edited.setdefault(one.name, []).append(f"{each.path} [{_short_hash(Path(path))}]")


def _digest(path: str, algorithm: str) -> str:
    """As RECORD writes it. Raises OSError, and ValueError for an unknown algorithm."""
    with Path(path).open("rb") as file:
        return base64.urlsafe_b64encode(hashlib.file_digest(file, algorithm).digest()).rstrip(b"=").decode()


def _short_hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:HASH_CHARACTERS]
    except OSError as error:
        return f"not observed: {error.strerror}"
