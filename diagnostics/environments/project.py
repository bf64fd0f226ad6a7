"""The code in the current directory: its commit, and a hash of everything that differs from it. Changes nothing there."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

from diagnostics.environments.masking import masked

_GIT_SECONDS = 30
_MAX_UNTRACKED_BYTES = 64 * 2**20


def state() -> dict[str, Any] | None:
    """Commit, whether files differ from it, and a hash of the differences; None without repository or git.

    `diff` is equal where the same changes lie on the same commit; untracked files count, ignored ones do not.
    """
    try:
        commit = _git("rev-parse", "HEAD").strip().decode()
        dirty = bool(_git("status", "--porcelain").strip())
        return {"commit": commit, "dirty": dirty, "diff": _diff_hash() if dirty else None}
    except (OSError, subprocess.SubprocessError):
        return None


def remotes() -> dict[str, str]:
    """The remotes' addresses without credentials; empty where there are none."""
    try:
        lines = _git("remote", "--verbose").decode(errors="replace").splitlines()
    except (OSError, subprocess.SubprocessError):
        return {}
    pairs = [line.split()[:2] for line in lines if line.endswith("(fetch)")]
    return {pair[0]: masked(pair[1]) for pair in pairs if len(pair) == 2}


def _diff_hash() -> str:
    digest = hashlib.sha256(_git("diff", "--no-ext-diff", "--no-textconv", "--binary", "HEAD"))
    root = Path(_git("rev-parse", "--show-toplevel").decode().strip())
    read_bytes = 0
    for name in sorted(filter(None, _git("ls-files", "--others", "--exclude-standard", "-z", "--full-name").split(b"\0"))):
        path = root / name.decode(errors="surrogateescape")
        digest.update(b"\0" + name + b"\0")
        size_bytes = path.stat(follow_symlinks=False).st_size
        read_bytes += size_bytes
        digest.update(path.read_bytes() if path.is_file() and read_bytes < _MAX_UNTRACKED_BYTES else str(size_bytes).encode())
    return digest.hexdigest()[:12]


def _git(*arguments: str) -> bytes:
    """Git's answer. Raises OSError without git, SubprocessError where it fails. Takes no lock and writes no index."""
    git = shutil.which("git")
    if git is None:
        raise FileNotFoundError("git")
    command = (git, "--no-optional-locks", *arguments)
    return subprocess.run(command, capture_output=True, check=True, timeout=_GIT_SECONDS).stdout
