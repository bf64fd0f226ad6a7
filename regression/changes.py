"""What changed between two measurements: the difference of their fingerprints, and the commits between them.

Which differences there are, and which come first, says `diagnostics.environments.differences`, as for its own command.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from diagnostics.environments.differences import compare
from regression.measurement import Measurement

_GIT_SECONDS = 60
_MAX_COMMITS = 20
_MAX_TOLD = 6


def environment_changes(measurements: Sequence[Measurement]) -> dict[datetime, str]:
    """For measurements of one workload by time: what differs from the one before, the code apart, the likeliest cause first.

    What is unlikely to change the speed is left out: a night is marked only where something could.
    """
    found = {}
    for before, after in itertools.pairwise(measurements):
        changed = [
            one for one in compare(before.fingerprint, after.fingerprint).differences if not one.is_code and one.is_suspect
        ]
        if changed:
            more = f"; and {len(changed) - _MAX_TOLD} more" if len(changed) > _MAX_TOLD else ""
            found[datetime.fromisoformat(after.time)] = "; ".join(one.sentence for one in changed[:_MAX_TOLD]) + more
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


def _log(span: str) -> list[str] | None:
    """One line a commit, or None where git knows no such range."""
    git = shutil.which("git")
    if git is None:
        return None
    command = (git, "log", "--oneline", "--no-decorate", span, "--")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_GIT_SECONDS)
    return done.stdout.splitlines() if done.returncode == 0 else None
