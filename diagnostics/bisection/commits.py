"""Commits between a good and a bad one, chosen by git itself, and worktrees to run them in.

Which commit divides the rest best says `git rev-list --bisect-all`. A worktree is made for each commit under the cache and
removed at the end. Of the user's repository only `.git/worktrees` changes meanwhile: no file, index or branch of the checkout.
No hooks are run. Limit: submodules and Git LFS files are not fetched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from diagnostics.bisection.outcomes import BadInput, CannotBuild, NotObserved, Outcome
from diagnostics.environments.masking import masked

_GIT_SECONDS = 600
_KEPT = ("GIT_CEILING_DIRECTORIES", "GIT_SSL_CAINFO")  # others, such as GIT_DIR, would name another repository


@dataclass(frozen=True, kw_only=True)
class FoundCommit:
    """The first bad commit; or None, and those among which it is."""

    culprit: str | None
    among: tuple[str, ...] = ()


def first_bad(
    good: str, bad: str, *, between: Callable[[str, Sequence[str]], list[str]], outcome_of: Callable[[str], Outcome]
) -> FoundCommit:
    """Bisect. `between(bad, goods)` lists the commits of bad that are in none of goods, the best divider first."""
    goods, set_aside = [good], set()
    while True:
        others = [commit for commit in between(bad, goods) if commit != bad]
        candidates = [commit for commit in others if commit not in set_aside]
        if not candidates:
            return FoundCommit(culprit=None, among=(bad, *others)) if others else FoundCommit(culprit=bad)
        match outcome_of(candidates[0]):
            case Outcome.BAD:
                bad = candidates[0]
            case Outcome.GOOD:
                goods.append(candidates[0])
            case _:
                set_aside.add(candidates[0])


class Repository:
    """What git knows of a repository."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.root = Path(self.git("rev-parse", "--show-toplevel", what=f"{directory} is in no git repository")).resolve()
        self.inner = directory.resolve().relative_to(self.root)  # where in it the command is run

    def full(self, commit: str) -> str:
        """The hash of a commit. Raises BadInput."""
        what = f"{commit!r} is no commit of {self.root}"
        return self.git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}", what=what)

    def check_order(self, good: str, bad: str) -> None:
        """Raises BadInput unless `good` is an ancestor of `bad`."""
        if good == bad:
            raise BadInput(f"the good and the bad commit are the same, {good[:12]}")
        base = self._base(good, bad)
        if base == good:
            return
        hint = f"; their common ancestor is {base[:12]}: is that one good?" if base else ""
        exchanged = ": they are exchanged" if base == bad else hint
        raise BadInput(f"the good commit {good[:12]} is no ancestor of the bad one {bad[:12]}{exchanged}")

    def between(self, bad: str, goods: Sequence[str]) -> list[str]:
        """See `first_bad`."""
        listed = self.git("rev-list", "--bisect-all", bad, "--not", *goods, what="git cannot list the commits")
        return [line.split()[0] for line in listed.splitlines()]

    def described(self, commit: str) -> str:
        """Short hash, date and subject, masked."""
        return masked(self.git("show", "--no-patch", "--format=%h %cs %s", commit, what=f"git cannot show {commit}"))

    def _base(self, one: str, other: str) -> str:
        try:
            return self.git("merge-base", one, other, what="")
        except BadInput:
            return ""

    def git(self, *arguments: str, what: str) -> str:
        """Git's answer. Raises BadInput (`what`, and git's words) where it refuses, NotObserved where it does not answer."""
        git = shutil.which("git")
        if git is None:
            raise BadInput("git is not installed: commits cannot be bisected")
        variables = {
            key: value for key, value in os.environ.items() if not key.startswith("GIT_") or key == "GIT_CEILING_DIRECTORIES"
        }
        command = (git, "-c", f"core.hooksPath={os.devnull}", "--no-optional-locks", *arguments)
        try:
            done = subprocess.run(
                command, cwd=self._directory, env=variables, capture_output=True, text=True, check=False, timeout=_GIT_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotObserved(f"{what}: {error}") from error
        if done.returncode != 0:
            raise BadInput(f"{what}: {done.stderr.strip() or f'git ended with {done.returncode}'}")
        return done.stdout.strip()


class Worktrees:
    """Clean checkouts under `folder`, which is nobody else's. A context manager: they are removed at its end."""

    def __init__(self, repository: Repository, folder: Path) -> None:
        self.repository = repository
        self._folder = folder
        self._made: set[Path] = set()

    def __enter__(self) -> Self:
        self._remove()  # what a killed run left
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def of(self, commit: str) -> Path:
        """The checkout of `commit`. Raises CannotBuild where it has no such folder as the command is run in; NotObserved."""
        path = self._folder / commit[:16]
        if path not in self._made:
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                self.repository.git(
                    *("worktree", "add", "--force", "--detach", "--quiet", str(path), commit),
                    what=f"git cannot check {commit} out",
                )
            except BadInput as error:
                raise NotObserved(str(error)) from error
            self._made.add(path)
        if not (path / self.repository.inner).is_dir():
            raise CannotBuild(f"commit {commit[:12]} has no folder {self.repository.inner}")
        return path

    def _remove(self) -> None:
        """All of this folder, and no other: `git worktree prune` would forget the user's on a disk that is not mounted."""
        for path in sorted(self._folder.glob("*")):
            with contextlib.suppress(BadInput, NotObserved):  # one that was half made
                self.repository.git("worktree", "remove", "--force", "--force", str(path), what=f"git cannot remove {path}")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._made.clear()
