"""What changed between two measurements: the difference of their fingerprints, and the commits between them."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from regression.measurement import Measurement

_GIT_SECONDS = 60
_MAX_COMMITS = 20


@dataclass(frozen=True, kw_only=True)
class Change:
    """One value of the fingerprint that differs."""

    name: str  # "packages.torch"
    before: str
    after: str

    @property
    def sentence(self) -> str:
        """In one line."""
        return f"{self.name} {self.before} → {self.after}"


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """The values that differ between two fingerprints, nested ones by their path; absent ones are told as such."""
    return list(_differences("", before, after))


def environment_changes(measurements: Sequence[Measurement]) -> dict[datetime, str]:
    """For measurements of one workload by time: what differs from the one before, the code apart."""
    found = {}
    for before, after in itertools.pairwise(measurements):
        changed = [change.sentence for change in differences(before.fingerprint, after.fingerprint) if not _is_code(change)]
        if changed:
            found[datetime.fromisoformat(after.time)] = "; ".join(changed)
    return found


def commits(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The range of commits in a sentence, and the commits in it, newest first, where this repository has them."""
    one, two = ((fingerprint.get("git") or {}).get("commit") for fingerprint in (before, after))
    dirty = " with uncommitted changes" if (after.get("git") or {}).get("dirty") else ""
    if two is None:
        return "the commit is unknown: no repository, or no git", []
    if one is None or one == two:
        return f"commit {two[:12]}{dirty}{', as before' if one else '; the one before is unknown'}", []
    listed = _log(f"{one}..{two}")
    missing = "" if listed is not None else "; this repository does not have them"
    shown = (listed or [])[:_MAX_COMMITS]
    if listed and len(listed) > _MAX_COMMITS:
        shown.append(f"... and {len(listed) - _MAX_COMMITS} more")
    return f"{one[:12]}..{two[:12]}{dirty}{missing}", shown


def _differences(path: str, before: Any, after: Any) -> Iterator[Change]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted({*before, *after}):
            yield from _differences(f"{path}.{key}" if path else str(key), before.get(key), after.get(key))
    elif before != after:
        yield Change(name=path, before=_words(before), after=_words(after))


def _words(value: Any) -> str:
    return "none" if value is None else str(value)


def _is_code(change: Change) -> bool:
    return change.name == "git" or change.name.startswith("git.")


def _log(span: str) -> list[str] | None:
    """One line a commit, or None where git knows no such range."""
    git = shutil.which("git")
    if git is None:
        return None
    command = (git, "log", "--oneline", "--no-decorate", span, "--")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_GIT_SECONDS)
    return done.stdout.splitlines() if done.returncode == 0 else None
