"""What messages of some kinds say in numbers: who held the memory, which rank did not come, which worker ended how."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from functools import lru_cache

_SIZE = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB|TiB)"
_BYTES = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_OOM_SAYS = {
    "tried": rf"Tried to allocate {_SIZE}",
    "capacity": rf"total capacit?y of {_SIZE}",
    "free": rf"of which {_SIZE} is free",
    "process": rf"this process has {_SIZE} memory in use",
    "allocated": rf"Of the allocated memory {_SIZE} is allocated by PyTorch",
    "reserved": rf"{_SIZE} is reserved by PyTorch but unallocated",
}
_OOM = {name: re.compile(words) for name, words in _OOM_SAYS.items()}
_OTHER_PROCESS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_MODULE = re.compile(r"No module named ['\"]?([\w.]+)|requires (?:the )?`?([Aa]ccelerate)`?|pip install ['\"`]?([\w-]+)")
_FOUND_VERSION = re.compile(r"found version (\d+)")
_EXIT = re.compile(r"exit ?code *: *(-?\d+)")
_LOCAL_RANK = re.compile(r"local_rank: (\d+)")
_PATH = re.compile(r"['\"](/[^'\"]+)['\"]")
_LIMIT = re.compile(r"hit config\.(\w+) \((\d+)\)(?:\s+function: (.+?)(?=\s+last reason|\n|$))?")
_DEVICE = re.compile(r"GPU (\d+) has a total")


@lru_cache(64)
def facts(kind: str, text: str) -> tuple[str, ...]:
    """Sentences, or none where the message says nothing more."""
    read = _READERS.get(kind)
    return tuple(read(" ".join(text.split()))) if read is not None else ()


def _oom(text: str) -> list[str]:
    sizes = {name: _size(found.groups()) for name, pattern in _OOM.items() if (found := pattern.search(text))}
    others = [(int(pid), _size((number, unit))) for pid, number, unit in _OTHER_PROCESS.findall(text)]
    told = []
    if {"capacity", "tried"} <= sizes.keys():
        device = _DEVICE.search(text)
        free = f", {_gib(sizes['free'])} free" if "free" in sizes else ""
        told.append(f"GPU {device[1] if device else '?'}: {_gib(sizes['tried'])} asked for, of {_gib(sizes['capacity'])}{free}")
    told += [f"process {pid} held {_gib(held)}: another process is on this GPU" for pid, held in others]
    if "allocated" in sizes:
        held = sizes["allocated"]
        told.append(f"this process's tensors held {_gib(held)}")
        unused = sizes.get("reserved", 0)
        if unused > max(sizes.get("tried", 0), held / 4):
            told.append(
                f"{_gib(unused)} lay unused in PyTorch's cache: fragmentation, try PYTORCH_ALLOC_CONF=expandable_segments:True"
            )
        outside = sizes.get("process", 0) - held - unused
        if outside > held:
            told.append(f"{_gib(outside)} of this process are not PyTorch's: NCCL, CUDA contexts, other libraries")
    return told or ["the message does not say what held the memory"]


def _missing(text: str) -> list[str]:
    names = dict.fromkeys(name for found in _MODULE.findall(text) for name in found if name)
    return [f"missing: {name}" for name in names]


def _driver(text: str) -> list[str]:
    found = _FOUND_VERSION.search(text)
    if found is None:
        return []
    number = int(found[1])
    return [f"the driver serves CUDA {number // 1000}.{number % 1000 // 10}; the installed torch was built for a newer one"]


def _worker(text: str) -> list[str]:
    codes = [int(code) for code in _EXIT.findall(text)]
    rank = _LOCAL_RANK.search(text)
    whose = f"local rank {rank[1]}: " if rank else ""
    return list(dict.fromkeys(f"{whose}exit code {code}{_signal_name(code)}" for code in codes))


def _limit(text: str) -> list[str]:
    return [
        f"{name} of {number}{f' in {function.strip()}' if function else ''}" for name, number, function in _LIMIT.findall(text)
    ]


def _path(text: str) -> list[str]:
    return [f"file: {path}" for path in dict.fromkeys(_PATH.findall(text))][:2]


def _signal_name(code: int) -> str:
    try:
        return f" ({signal.Signals(-code).name})" if code < 0 else ""
    except ValueError:
        return ""


def _size(found: tuple[str | int, ...]) -> float:
    return float(found[0]) * _BYTES[str(found[1])]


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**29 else f"{size / 2**20:.1f} MiB"


_READERS: dict[str, Callable[[str], list[str]]] = {
    "cuda-oom": _oom, "missing-dependency": _missing, "driver-mismatch": _driver, "dead-worker": _worker, "F7": _limit,
    "cache-race": _path, "cache-damaged": _path, "disk-full": _path,
}  # fmt: skip
TELLING = {*_READERS, "nccl-timeout"}  # kinds whose messages say something in numbers


class Collectives:
    """What the watchdog's lines say of each rank."""

    _timed_out = re.compile(r"\[Rank (\d+)\].*WorkNCCL\(SeqNum=(\d+), OpType=(\w+)")
    _last = re.compile(r"Rank (\d+)\].*last enqueued NCCL work: (-?\d+), last completed NCCL work: (-?\d+)")

    def __init__(self) -> None:
        self._waited: dict[int, str] = {}
        self._enqueued: dict[int, int] = {}

    def add(self, text: str) -> None:
        """Read one line of the watchdog."""
        if (found := self._timed_out.search(text)) is not None:
            self._waited.setdefault(int(found[1]), f"{found[3]} {found[2]}")
        if (found := self._last.search(text)) is not None:
            self._enqueued[int(found[1])] = int(found[2])

    def add_all(self, later: Collectives) -> None:
        """Add what a later part of the log said."""
        self._waited = {**later._waited, **self._waited}
        self._enqueued.update(later._enqueued)

    def sentences(self) -> list[str]:
        """Who waited for what, and who is missing."""
        told = []
        by_work: dict[str, list[int]] = {}
        for rank, work in sorted(self._waited.items()):
            by_work.setdefault(work, []).append(rank)
        told += [f"waited in {work}: {_ranks(ranks)}" for work, ranks in by_work.items()]
        silent = sorted(set(range(max(self._waited, default=-1) + 1)) - self._waited.keys())
        if silent:
            told.append(f"no time-out was printed by {_ranks(silent)}: look there first")
        if len(by_work) > 1:
            told.append("ranks waited in different collectives: they took different paths, or one is behind")
        least = min(self._enqueued.values(), default=0)
        behind = sorted(rank for rank, number in self._enqueued.items() if number == least)
        if self._enqueued and len(behind) < len(self._enqueued):
            told.append(f"{_ranks(behind)} had enqueued least ({least} collectives): it came last")
        return told


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:32]))}"
