"""Changes that go together because one package excludes the other's old or new version, as torch does with triton.

Read from what the packages of the two ends require. It only orders the search: the installer is asked in the end.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from diagnostics.bisection.pins import Change

Group = tuple[Change, ...]


def groups(changes: Sequence[Change], good_python: Path, bad_python: Path) -> list[Group]:
    """The changes, those that exclude each other's halves in one group."""
    by_name = {change.name: change for change in changes}
    leader = {name: name for name in by_name}

    def find(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    for python, other_version in ((good_python, "after"), (bad_python, "before")):
        for name, wanted in _requirements(python):
            other = by_name.get(canonicalize_name(wanted.name))
            if name in by_name and other is not None and not _allows(wanted, getattr(other, other_version)):
                leader[find(name)] = find(other.name)
    found: dict[str, list[Change]] = {}
    for change in changes:
        found.setdefault(find(change.name), []).append(change)
    return [tuple(group) for group in found.values()]


def _requirements(python: Path) -> Iterable[tuple[str, Requirement]]:
    folders = [str(path) for path in python.parent.parent.glob("lib/python*/site-packages")]
    for distribution in importlib.metadata.distributions(path=folders):
        for line in distribution.requires or []:
            try:
                wanted = Requirement(line)
                is_needed = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
            except InvalidRequirement:
                continue
            if is_needed:
                yield canonicalize_name(distribution.metadata["Name"]), wanted


def _allows(wanted: Requirement, version: str | None) -> bool:
    if version is None:
        return False
    try:
        return "://" in version or wanted.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return True
