"""Which live processes use a folder, from /proc: files open or mapped in it, file locks held, TORCHINDUCTOR_CACHE_DIR.

A process that read an entry and closed it leaves no trace: Triton's kernels are seen only by the variable. Other users'
processes can be looked at by root alone; how many could not be is said. Without /proc nothing is observed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from diagnostics.caches.scan import File

_PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class User:
    """One live process; `holds` says whether it has files of the folder open, mapped or locked, or only names the folder."""

    pid: int
    uid: int
    command: str
    holds: bool
    how: str


def users(directory: Path, files: Iterable[File]) -> tuple[list[User], list[str]]:
    """The processes that use `directory`, without this one, and what could not be looked at."""
    if not (_PROC / "self/fd").is_dir():
        return [], ["no /proc here: which processes use the cache is not observed"]
    found, hidden = [], 0
    lockers = _lockers({(file.device, file.inode) for file in files})
    for name in os.listdir(_PROC):  # noqa: PTH208 - names alone, of some thousand
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            seen = _how(_PROC / name, directory, locks=int(name) in lockers)
            if seen is not None:
                found.append(_user(int(name), *seen))
        except PermissionError:
            hidden += _is_a_program(_PROC / name)
        except OSError:
            continue  # it has ended
    notes = [f"whether {hidden} processes that may not be looked at (other users' as a rule) use the cache"] if hidden else []
    return sorted(found, key=lambda user: user.pid), notes


def alive_since(pid: int, mtime_ns: int) -> bool:
    """Whether the process that wrote a file then still runs: one of that id that was started later is another."""
    try:
        return psutil.Process(pid).create_time() * 1e9 <= mtime_ns + 1e9
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _how(process: Path, directory: Path, *, locks: bool) -> tuple[bool, str] | None:
    """Whether it holds files of `directory`, and how that is known."""
    prefix = f"{directory}/"
    if locks:
        return True, "holds a lock"
    for link in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith(prefix):  # noqa: PTH115 - twice as fast
                return True, "has a file open"
    mapped = (process / "maps").read_bytes()
    if f" {prefix}".encode() in mapped:
        return True, "runs code of it"
    if b"python" not in mapped:  # a shell, or what stands behind a pipe: the variable is only passed on
        return None
    variables = (process / "environ").read_bytes().split(b"\0")
    wanted = os.fsencode(directory)
    for variable in variables:
        name, _, value = variable.partition(b"=")
        if name in {b"TORCHINDUCTOR_CACHE_DIR", b"TRITON_CACHE_DIR"} and os.path.realpath(value) == wanted:
            return False, f"has {name.decode()} set to it"
    return None


def _is_a_program(process: Path) -> bool:
    """Threads of the kernel have no command line."""
    try:
        return bool((process / "cmdline").read_bytes())
    except OSError:
        return False


def _user(pid: int, holds: bool, how: str) -> User:
    command = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return User(pid=pid, uid=(_PROC / str(pid)).stat().st_uid, command=command[:200], holds=holds, how=how)


def _lockers(inodes: set[tuple[int, int]]) -> set[int]:
    """Processes that hold a lock on one of these files, by /proc/locks."""
    found: set[int] = set()
    try:
        lines = (_PROC / "locks").read_text(encoding="utf-8").splitlines()
    except OSError:
        return found
    for line in lines:
        fields = line.split()
        if "->" in fields or len(fields) < 6:
            continue
        major, minor, inode = fields[5].split(":")
        if (os.makedev(int(major, 16), int(minor, 16)), int(inode)) in inodes:
            found.add(int(fields[4]))
    return found
