"""The two builds that a comparison runs: the working tree, and a commit in a git worktree with its own environment.

The worktree lies in a temporary directory beside a lock that the process holds as long as it lives, however it ends. So a
comparison that was killed is known by its free lock, and the next one removes what it left (`remove_leftovers`). SIGTERM ends
a comparison as Ctrl-C does: the segment that runs is ended and the worktree is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

CACHE = Path.home() / ".cache/dflash-harness"  # environments of baselines
_PREFIX = "dflash-baseline-"
_LOCK = "owner.lock"
_GIT_SECONDS = 300
_INSTALL_SECONDS = 3600


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


class SideError(RuntimeError):
    """The baseline cannot be had, or one side does not run; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two builds."""

    name: str  # "baseline" or "candidate"
    directory: Path  # its code
    python: str
    planted: tuple[str, ...] = ()  # flags beside the workload's: a planted slowdown


@contextlib.contextmanager
def baseline_side(commit: str, *, root: Path, cache: Path, tell: Callable[[str], None]) -> Iterator[Side]:
    """The build of `commit` of the repository at `root`, for the length of the block. Raises SideError; Terminated on SIGTERM."""
    full = full_commit(commit, root=root)
    for left in remove_leftovers(root):
        tell(f"removed the worktree of a comparison that was killed: {left}")
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix=_PREFIX) as parent, filelock.FileLock(Path(parent) / _LOCK):
        directory = Path(parent) / full[:12]
        try:
            _git(root, "worktree", "add", "--detach", str(directory), full, what=f"cannot check out {full}")
            yield Side(name="baseline", directory=directory, python=environment_of(directory, root=root, cache=cache))
        finally:
            if directory.exists():
                _git(root, "worktree", "remove", "--force", str(directory), what=f"cannot remove the worktree {directory}")


def full_commit(commit: str, *, root: Path) -> str:
    """The hash of a commit of the repository at `root`. Raises SideError."""
    what = f"{commit!r} is no commit of {root}"
    return _git(root, "rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}", what=what)


def remove_leftovers(root: Path) -> list[Path]:
    """Remove the worktrees of comparisons whose process is gone; returns them. Those of living ones stay."""
    listed = _git(root, "worktree", "list", "--porcelain", what=f"{root} is no git repository").splitlines()
    paths = [Path(line.removeprefix("worktree ")) for line in listed if line.startswith("worktree ")]
    removed = []
    for path in paths:
        if path.parent.name.startswith(_PREFIX) and path.parent.is_dir() and _is_free(path.parent / _LOCK):
            shutil.rmtree(path.parent, ignore_errors=True)
            removed.append(path)
    _git(root, "worktree", "prune", what="cannot prune worktrees")
    return removed


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM raises Terminated inside the block; where signals cannot be handled (not the main thread) it ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_it(*_: object) -> None:
        raise Terminated("ended by SIGTERM")

    before = signal.signal(signal.SIGTERM, raise_it)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def environment_of(directory: Path, *, root: Path, cache: Path) -> str:
    """A Python with the packages that the code in `directory` asks for: this one, or one made once in `cache`."""
    wanted = dependencies_hash(directory)
    if wanted == dependencies_hash(root):
        return sys.executable
    environment = cache / wanted
    python = environment / "bin" / "python"
    if not (environment / "complete").exists():
        shutil.rmtree(environment, ignore_errors=True)
        constraints = directory / "constraints.txt"
        pinned = ["-c", str(constraints)] if constraints.exists() else []
        _install([sys.executable, "-m", "venv", str(environment)])
        _install([str(python), "-m", "pip", "install", "--quiet", *pinned, *_dependencies(directory)])
        (environment / "complete").touch()
    return str(python)


def dependencies_hash(directory: Path) -> str:
    """Of what a checkout asks for: equal hashes may share an environment."""
    constraints = directory / "constraints.txt"
    lines = constraints.read_text().splitlines() if constraints.exists() else []
    pinned = sorted(line for line in lines if line.strip() and not line.startswith("#"))
    return hashlib.sha256(json.dumps([pinned, _dependencies(directory)]).encode()).hexdigest()[:16]


def _is_free(lock: Path) -> bool:
    """Whether no process holds the lock. A directory without one is of a comparison killed before it took it, or older."""
    try:
        with filelock.FileLock(lock, timeout=0):
            return True
    except (filelock.Timeout, OSError):
        return False


def _dependencies(directory: Path) -> list[str]:
    try:
        content: dict[str, Any] = tomllib.loads((directory / "pyproject.toml").read_text())
        return sorted(content["project"]["dependencies"])
    except (OSError, tomllib.TOMLDecodeError, KeyError) as error:
        raise SideError(f"{directory} has no pyproject.toml with project.dependencies ({error})") from error


def _install(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_INSTALL_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SideError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise SideError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _git(root: Path, *arguments: str, what: str) -> str:
    git = shutil.which("git")
    if git is None:
        raise SideError("a baseline commit needs git, which is not installed")
    done = subprocess.run((git, *arguments), cwd=root, capture_output=True, text=True, check=False, timeout=_GIT_SECONDS)
    if done.returncode != 0:
        raise SideError(f"{what}: {done.stderr.strip()}")
    return done.stdout.strip()
