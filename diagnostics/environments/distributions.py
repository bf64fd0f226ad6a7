"""What is installed in this Python: version, date, and a hash of what the files ought to be.

The hash is over the paths and hashes in a distribution's RECORD, without what the installer adds (INSTALLER, scripts with the
path of the environment, compiled files): one wheel has one hash wherever and by whatever it was installed, and two builds
of one version have two. Nothing is imported, nothing of the files themselves is read (`edits` does that).

Limits: of a name that is found twice on sys.path the first is the one that is imported, the others are named. A distribution
without RECORD (egg-info, some system packages) has no hash.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import importlib.metadata
import json
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diagnostics.environments.masking import masked

HASH_CHARACTERS = 12
RUN_AT_START = ("sitecustomize.py", "usercustomize.py")  # beside *.pth
_OF_THE_INSTALLER = ("INSTALLER", "REQUESTED", "RECORD", "RECORD.jws", "RECORD.p7s", "direct_url.json", "uv_cache.json")


@dataclass(frozen=True)
class RecordedFile:
    """One line of RECORD."""

    path: str  # relative to `Distribution.base`
    digest: str  # "sha256=..." or empty
    size_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """One installed distribution."""

    name: str  # normalised
    version: str
    base: Path  # the folder that RECORD's paths start from
    metadata: Path | None  # its .dist-info
    installed_seconds: float | None  # date of RECORD, which is written last
    record: str | None  # see the module
    installer: str | None
    source: str | None  # where it was installed from, if not by name; masked
    is_editable: bool = False
    at_start: tuple[str, ...] = ()  # files that Python runs at its start, as in RECORD
    shadowed: tuple[str, ...] = ()  # further copies behind it on sys.path: "1.0 in FOLDER"

    def to_dict(self) -> dict[str, Any]:
        """JSON values for a document."""
        return {
            "name": self.name,
            "version": self.version,
            "record": self.record,
            "installed": None
            if self.installed_seconds is None
            else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.installed_seconds)),
            "installer": self.installer,
            "source": self.source,
            "editable": self.is_editable,
            "folder": masked(str(self.base)),
            "shadowed": list(self.shadowed),
        }

    @property
    def identity(self) -> str:
        """Version and hash in one string, equal where the same thing is installed."""
        return f"{self.version} [{self.record}]" if self.record else self.version


def installed() -> list[Distribution]:
    """Every distribution that this Python sees, by name."""
    found: dict[str, Distribution] = {}
    behind: dict[str, list[str]] = {}
    for one in _all():
        if one.name in found:
            if one.metadata != found[one.name].metadata:
                behind.setdefault(one.name, []).append(f"{one.version} in {masked(str(one.base))}")
            continue
        found[one.name] = one
    return [_with_shadowed(found[name], behind.get(name, [])) for name in sorted(found)]


def recorded_files(one: Distribution) -> list[RecordedFile]:
    """The lines of RECORD; empty where there is none."""
    if one.metadata is None or one.installed_seconds is None:
        return []
    try:
        return _cached_files(str(one.metadata), one.installed_seconds)
    except (OSError, ValueError):
        return []


def content_hash(files: Iterable[RecordedFile]) -> str | None:
    """See the module; None where no file has a hash."""
    lines = sorted(f"{each.path},{each.digest}" for each in files if each.digest and _is_of_the_wheel(each.path))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:HASH_CHARACTERS] if lines else None


def _all() -> Iterator[Distribution]:
    for each in importlib.metadata.distributions():
        metadata: Path | None = getattr(each, "_path", None)
        if metadata is None or not isinstance(metadata, Path):
            yield from _read(each, None, None)
            continue
        try:
            changed = (metadata / "RECORD").stat().st_mtime_ns
        except OSError:
            changed = None
        yield from _read(each, metadata, changed) if changed is None else _cached(str(metadata), changed)


@functools.lru_cache(maxsize=4096)
def _cached(metadata: str, record_ns: int) -> tuple[Distribution, ...]:
    """A RECORD that has not changed since need not be read again in this process."""
    return _read(importlib.metadata.PathDistribution(Path(metadata)), Path(metadata), record_ns)


@functools.lru_cache(maxsize=16)  # a fingerprint looks at a few distributions, again and again
def _cached_files(metadata: str, _record_seconds: float) -> list[RecordedFile]:
    return list(_lines((Path(metadata) / "RECORD").read_text(encoding="utf-8")))


def _read(each: importlib.metadata.Distribution, metadata: Path | None, record_ns: int | None) -> tuple[Distribution, ...]:
    try:
        name, version = each.metadata["Name"], each.version
    except (KeyError, OSError, ValueError):
        return ()
    if not name:  # a leftover folder of pip: diagnostics.timeline tells of those
        return ()
    record = each.read_text("RECORD") if record_ns is not None else None
    files = list(_lines(record or ""))
    source, editable = _source(each.read_text("direct_url.json"))
    return (
        Distribution(
            name=re.sub(r"[-_.]+", "-", name).lower(),
            version=str(version),
            base=Path(str(each.locate_file(""))),
            metadata=metadata,
            installed_seconds=None if record_ns is None else record_ns / 1e9,
            record=content_hash(files),
            installer=(each.read_text("INSTALLER") or "").strip() or None,
            source=source,
            is_editable=editable,
            at_start=tuple(one.path for one in files if one.path.endswith(".pth") or one.path in RUN_AT_START),
        ),
    )


def _source(text: str | None) -> tuple[str | None, bool]:
    try:
        values = json.loads(text) if text else {}
    except ValueError:
        return "direct_url.json is damaged", False
    if not isinstance(values, dict):
        return "direct_url.json is damaged", False
    commit = (values.get("vcs_info") or {}).get("commit_id")
    url = masked(str(values.get("url", ""))) + (f"@{commit}" if commit else "")
    return url or None, bool((values.get("dir_info") or {}).get("editable"))


def _lines(text: str) -> Iterator[RecordedFile]:
    plain = '"' not in text
    rows = (line.rsplit(",", 2) for line in text.splitlines()) if plain else csv.reader(text.splitlines())
    for row in rows:
        if len(row) == 3:
            yield RecordedFile(row[0], row[1], int(row[2]) if row[2].isdigit() else None)


def _is_of_the_wheel(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    of_installer = folder.endswith(".dist-info") and name in _OF_THE_INSTALLER
    return not (of_installer or path.startswith(("../", "/")) or path.endswith(".pyc"))


def _with_shadowed(one: Distribution, behind: list[str]) -> Distribution:
    return Distribution(**{**vars(one), "shadowed": tuple(behind)}) if behind else one
