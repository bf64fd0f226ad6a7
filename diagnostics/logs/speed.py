"""How fast is triage? `python -m diagnostics.logs.speed [--megabytes N] [--errors SHARE] [--kind KIND] [--folder DIR]`.

Writes a log of a training run (N megabytes; of its lines, SHARE belong to failures of a kind), reads it line by line in plain
Python, then with triage, deletes it, and prints for both MB/s (10^6 bytes), of elapsed time and of the processor time of all
processes, and triage's peak memory.

Kinds: `tracebacks`, each whole, of ranks in turn · `same`, all with the same line numbers · `mixed`, those of eight ranks line
by line · `chains` of two exceptions · `distinct`, no two alike: other line numbers and addresses · `worded`, messages with other
words each time, too · `dumps` of all threads by faulthandler · `lines`, error messages without a traceback.
Exit codes: 0 measured · 2 bad usage or no room for the log.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from dflash.standard_output import outlive_reader
from diagnostics.logs.groups import Groups
from diagnostics.logs.parts import read_log

_T = TypeVar("_T")
_RANKS = 8
_LETTERS = str.maketrans("0123456789", "ghijklmnop")
_TRACEBACK = (
    "Traceback (most recent call last):", '  File "/home/me/train.py", line {n}, in step', "    loss = self.drafter(batch)",
    '  File "/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1776, in _wrapped_call_impl',
    "    return self._call_impl(*args, **kwargs)", "           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
    "RuntimeError: The size of tensor a ({n}) must match the size of tensor b (7)",
)  # fmt: skip
_DISTINCT = (
    *_TRACEBACK[:3], '  File "/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1{n}, in _wrapped_call_impl',
    *_TRACEBACK[4:6], "RuntimeError: <Tensor at 0x{a:x}> of step {n} has {a} elements",
)  # fmt: skip
_WORDED = (*_DISTINCT[:-1], "RuntimeError: {w} {w} of <Tensor at 0x{a:x}> is not in {w} {n}")
_LINK = ("", "The above exception was the direct cause of the following exception:", "")
_THREAD = (
    "Thread 0x{a:016x} [pt_autograd_{t}] (most recent call first):", '  File "/v/torch/autograd/function.py", line 311 in apply',
    '  File "/home/me/train.py", line {n} in forward', '  File "/usr/lib/python3.12/threading.py", line 1012 in run', "",
)  # fmt: skip
_KINDS: dict[str, tuple[str, ...]] = {
    "tracebacks": _TRACEBACK,
    "same": tuple(line.replace("{n}", "1234") for line in _TRACEBACK),
    "mixed": _TRACEBACK,
    "chains": (*_TRACEBACK, *_LINK, *_TRACEBACK),
    "distinct": _DISTINCT,
    "worded": _WORDED,
    "dumps": ("Timeout (0:01:00)!", *_THREAD * 4),
    "lines": ("RuntimeError: CUDA error: an illegal memory access was encountered ({n})",),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write, read twice, print."""
    options = _options(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "train.log"
        try:
            write(path, options.megabytes * 10**6, options.errors, options.kind)
        except OSError as error:
            print(f"speed: cannot write {path}: {error}", file=sys.stderr)  # noqa: T201 - a message of the command
            return 2
        size = path.stat().st_size
        plain_lines, plain, _ = _timed(lambda: _plain(path))
        groups = Groups()
        read, triage, processor = _timed(lambda: read_log(path, groups))
    own, others = (resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    found = sum(group.count for group in groups.ordered()) + groups.dropped
    print(  # noqa: T201 - the result
        f"{size / 1e6:.0f} MB, {plain_lines:,} lines; plain loop {size / 1e6 / plain:.0f} MB/s; triage {size / 1e6 / triage:.1f} "
        f"MB/s ({triage:.1f} s), of processor time {size / 1e6 / processor:.1f} MB/s ({processor:.1f} s); {found:,} failures in "
        f"{read.lines:,} lines; peak memory {own:.0f} MiB, and {others:.0f} MiB in each other process"
    )
    return 0


def write(path: Path, size: int, errors: float, kind: str = "tracebacks") -> None:
    """Write a log of about `size` bytes."""
    with path.open("w", encoding="utf-8") as file:
        written = 0
        lines = _lines(errors, kind)
        while batch := "".join(itertools.islice(lines, 1000)):
            written += file.write(batch)
            if written >= size:
                return


def _lines(errors: float, kind: str) -> Iterator[str]:
    debt = 0.0
    failures = _failures(kind)
    for step in itertools.count():
        rank = step % _RANKS
        stamp = f"2026-11-30 04:{step // 60 % 60:02d}:{step % 60:02d},{step % 1000:03d}"
        numbers = f"step {step} loss {1 + step % 97 / 97:.4f} grad_norm 0.93 lr 6.0e-04 tok/s 21503"
        if errors < 1:
            yield f"[rank{rank}]: {stamp} INFO trainer: {numbers}\n"
        debt += errors / (1 - errors) if errors < 1 else 1
        while debt > 0:
            lines = next(failures)
            debt -= len(lines)
            yield from lines


def _failures(kind: str) -> Iterator[list[str]]:
    """One failure after the other, or one of each rank, line by line."""
    alike = _RANKS if kind == "mixed" else 1
    for number in itertools.count():
        ranks = range(number, number + alike)
        address = number * 2654435761 % 2**44
        filled = {"n": number, "a": address, "w": _word(address)}
        yield [f"[rank{rank % _RANKS}]: {line.format(t=rank, **filled)}\n" for line in _KINDS[kind] for rank in ranks]


def _word(number: int) -> str:
    return f"{number:x}".translate(_LETTERS)


def _plain(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _timed(act: Callable[[], _T]) -> tuple[_T, float, float]:
    """What it gives, elapsed seconds, and seconds of all processors."""
    before, started = os.times(), time.perf_counter()
    result = act()
    elapsed, after = time.perf_counter() - started, os.times()
    return result, elapsed, sum(after[:4]) - sum(before[:4])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m diagnostics.logs.speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=200, metavar="N", help="size of the log (default 200)")
    parser.add_argument(
        "--errors", type=float, default=0.01, metavar="SHARE", help="share of lines that are tracebacks (default 0.01)"
    )
    parser.add_argument("--kind", choices=_KINDS, default="tracebacks", help="of the failures (default tracebacks)")
    parser.add_argument(
        "--folder", type=Path, default=None, metavar="DIR", help="where to write the log (default: the system's own place)"
    )
    options = parser.parse_args(arguments)
    if options.megabytes < 1 or not 0 <= options.errors <= 1:
        parser.error("use at least 1 for --megabytes, and 0 to 1 for --errors")
    if options.folder is not None and not options.folder.is_dir():
        parser.error(f"--folder {options.folder}: there is no such directory")
    return options


if __name__ == "__main__":
    outlive_reader()
    sys.exit(main())
