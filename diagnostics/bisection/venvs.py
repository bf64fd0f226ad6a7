"""Virtual environments of exact versions, made once and kept in the cache; with uv where it is installed, else with pip.

    CACHE/environments/KEY/            the environment; `complete` in it says that everything was installed
    CACHE/environments/KEY.lock        held while it is made

KEY is of the Python, the versions and the options: another bisection finds it again. An environment without `complete` was
broken off, and is made anew. The installer inherits the lock, so that one that outlived a killed bisection is waited for.
Limit: nothing is ever thrown away here; deleting the folder is safe while nothing runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diagnostics.bisection.outcomes import BadInput, CannotBuild, NotObserved
from diagnostics.environments.masking import masked
from diagnostics.output import say

_INSTALL_SECONDS = 3600
_REASON = re.compile(r"error|conflict|no solution|because|requires|depends on", re.IGNORECASE)
_ADVICE = re.compile(r"for help visit|remove package versions|loosen the range")
# Words of pip and uv that blame neither the versions nor a package's build: nothing is concluded from them.
_OUTSIDE = re.compile(
    r"No space left|Temporary failure in name resolution|Name or service not known|Connection (?:refused|reset|error|timed out)|"
    r"ConnectionError|NewConnectionError|ConnectTimeout|ReadTimeout|timed out|50[0234] (?:Server|Bad|Service|Gateway)|dns error|"
    r"error sending request|Permission denied|Read-only file system|Killed",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Environments:
    """Makes and finds environments."""

    folder: Path
    python: str  # that they are made of
    options: tuple[str, ...]  # for the installer
    installer: str  # "uv" or "pip"

    def key(self, pins: Sequence[str]) -> str:
        """Of an environment."""
        return hashlib.sha256(json.dumps([self._python_is, sorted(pins), self.options]).encode()).hexdigest()[:20]

    def python_of(self, pins: Sequence[str]) -> Path:
        """The Python of the environment with exactly these versions. Raises CannotBuild, NotObserved."""
        path = self.folder / self.key(pins)
        python = path / "bin" / "python"
        self.folder.mkdir(parents=True, exist_ok=True)
        with _locked(Path(f"{path}.lock")) as held:
            if not (path / "complete").exists() or not python.exists():
                shutil.rmtree(path, ignore_errors=True)
                self._make(path, python, pins, held)
                told = {"pins": [masked(pin) for pin in pins], "installer": self.installer}
                (path / "complete").write_text(json.dumps(told, indent=1) + "\n")
        return python

    def _make(self, path: Path, python: Path, pins: Sequence[str], held: int) -> None:
        uv = shutil.which("uv") or "uv"
        made = _run([uv, "venv", "--quiet", "--python", self.python, str(path)] if self.installer == "uv"
                    else [self.python, "-m", "venv", "--without-pip", str(path)], held)  # fmt: skip
        if made is not None:
            raise NotObserved(f"cannot make a virtual environment of {self.python}: {made}")
        if not pins:
            return
        listed = path / "requirements.txt"
        listed.write_text("\n".join(pins) + "\n", encoding="utf-8")
        start = [uv, "pip", "install", "--python", str(python)] if self.installer == "uv" else [
            *(sys.executable, "-m", "pip", "--python", str(python), "install", "--no-input", "--disable-pip-version-check")
        ]  # fmt: skip
        refused = _run([*start, *self.options, "-r", str(listed)], held)
        listed.unlink()  # a URL in it may hold a token
        if refused is not None:
            if _OUTSIDE.search(refused):
                raise NotObserved(f"{self.installer} failed for a reason outside of the versions: {refused}")
            raise CannotBuild(refused)

    @functools.cached_property
    def _python_is(self) -> str:
        code = "import sys; print(sys.version, sys.base_prefix)"
        try:
            return subprocess.run((self.python, "-c", code), capture_output=True, text=True, check=True, timeout=60).stdout
        except (OSError, subprocess.SubprocessError) as error:
            raise BadInput(f"--python {self.python} does not run: {error}") from error


def chosen_installer(asked: str) -> str:
    """Uv or pip. Raises BadInput where what was asked for is not there."""
    has = {"uv": shutil.which("uv") is not None, "pip": importlib.util.find_spec("pip") is not None}
    if asked != "auto":
        if not has[asked]:
            raise BadInput(f"--installer {asked}: it is not installed beside {sys.executable}")
        return asked
    for name, is_there in has.items():
        if is_there:
            return name
    raise BadInput("neither uv nor pip is there to make environments with: install one")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Hold a lock; it stays held as long as a process has the file descriptor that this gives, which filelock keeps to itself."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"bisect: waits until another installer is done with {path.with_suffix('')}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _run(command: list[str], held: int) -> str | None:
    """None, or the last words of what failed. The command inherits the lock `held`."""
    limits: dict[str, Any] = {"check": False, "timeout": _INSTALL_SECONDS, "stdin": subprocess.DEVNULL, "pass_fds": (held,)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, **limits)  # noqa: PLW1510 - check is among them
    except subprocess.TimeoutExpired:
        return f"timed out after {_INSTALL_SECONDS} s"
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return None
    words = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    told = [line for line in words if _REASON.search(line) and not _ADVICE.search(line)]
    return masked(" / ".join((told or words or [f"exit code {done.returncode}"])[:6]))[:600]
