"""Commits and checkouts of git repositories. Asks git, which is told to write nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from diagnostics.dated.entry import Entry, Found, believable
from diagnostics.environments.masking import masked

_MAX_COMMITS = 1000
_SECONDS = 30.0


def find(repository: Path, now_seconds: float) -> Found:
    """Commits reachable from HEAD by commit date, and what moved HEAD by the reflog."""
    git = shutil.which("git")
    if git is None:
        return Found(notes=[f"git is not installed: commits of {repository} were not looked at"])
    found = Found()
    try:
        commits = _run(git, repository, "log", f"-n{_MAX_COMMITS}", "--format=%ct%x00%h %s")
        moves = _run(git, repository, "log", "-g", f"-n{_MAX_COMMITS}", "--date=unix", "--format=%gd%x00%h %gs")
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        return Found(
            notes=[f"{repository}: git does not answer ({reason[0] if reason else error}): its commits were not looked at"]
        )
    for line in commits.splitlines():
        seconds, _, text = line.partition("\0")
        if believable(float(seconds), now_seconds):
            found.entries.append(
                Entry(
                    time_seconds=float(seconds),
                    kind="commit",
                    what=f"commit {masked(text)}",
                    where=str(repository),
                    how="git log",
                )
            )
    for line in moves.splitlines():
        selector, _, text = line.partition("\0")
        seconds = selector.rpartition("{")[2].rstrip("}")
        if seconds.isdigit() and "commit" not in text.partition(" ")[2][:8]:
            found.entries.append(
                Entry(
                    time_seconds=float(seconds),
                    kind="checkout",
                    what=f"HEAD moved: {masked(text)}",
                    where=str(repository),
                    how="git reflog",
                )
            )
    return found


def _run(git: str, repository: Path, *arguments: str) -> str:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    command = (git, "-C", str(repository), *arguments)
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=True, timeout=_SECONDS, env=environment
    ).stdout
