"""How fast is triage? `python -m diagnostics.logs.speed [--megabytes N] [--errors SHARE] [--kind KIND] [--folder DIR]`.

Writes a log of a training run (N megabytes; of its lines, SHARE belong to failures of a kind), reads it line by line in plain
Python, then with triage, deletes it, and prints for both MB/s (10^6 bytes, of processor time) and triage's peak memory.

Kinds: `tracebacks`, each whole, of ranks in turn · `mixed`, those of eight ranks line by line · `chains` of two exceptions ·
`distinct`, no two alike: other line numbers, addresses and messages · `dumps` of all threads by faulthandler.
Exit codes: 0 measured · 2 bad usage or no room for the log.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from diagnostics.logs.groups import Groups
from diagnostics.logs.parts import read_log

_T = TypeVar("_T")
_RANKS = 8
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
_LINK = ("", "The above exception was the direct cause of the following exception:", "")
_THREAD = (
    "Thread 0x{a:016x} [pt_autograd_{t}] (most recent call first):", '  File "/v/torch/autograd/function.py", line 311 in apply',
    '  File "/home/me/train.py", line {n} in forward', '  File "/usr/lib/python3.12/threading.py", line 1012 in run', "",
)  # fmt: skip
_KINDS: dict[str, tuple[str, ...]] = {
    "tracebacks": _TRACEBACK,
    "mixed": _TRACEBACK,
    "chains": (*_TRACEBACK, *_LINK, *_TRACEBACK),
    "distinct": _DISTINCT,
    "dumps": ("Timeout (0:01:00)!", *_THREAD * 4),
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
        plain_lines, plain = _timed(lambda: _plain(path))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        groups = Groups()
        search, triage = _timed(lambda: read_log(path, groups))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = sum(group.count for group in groups.ordered())
    print(  # noqa: T201 - the result
        f"{size / 1e6:.0f} MB, {plain_lines:,} lines; plain loop {size / 1e6 / plain:.0f} MB/s ({plain:.1f} s); triage "
        f"{size / 1e6 / triage:.0f} MB/s "
        f"({triage:.1f} s), {found:,} failures found in {search.lines:,} lines, peak memory {peak / 1024:.0f} MiB "
        f"({(peak - before) / 1024:.0f} MiB more)"
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
        yield f"[rank{rank}]: {stamp} INFO trainer: {numbers}\n"
        debt += errors / max(1e-9, 1 - errors)
        while debt >= 1:
            lines = next(failures)
            debt -= len(lines)
            yield from lines


def _failures(kind: str) -> Iterator[list[str]]:
    """One failure after the other, or one of each rank, line by line."""
    alike = _RANKS if kind == "mixed" else 1
    for number in itertools.count():
        ranks = range(number, number + alike)
        address = number * 2654435761 % 2**44
        yield [f"[rank{rank % _RANKS}]: {line.format(n=number, a=address, t=rank)}\n" for line in _KINDS[kind] for rank in ranks]


def _plain(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _timed(act: Callable[[], _T]) -> tuple[_T, float]:
    started = time.process_time()
    result = act()
    return result, time.process_time() - started


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
    if options.megabytes < 1 or not 0 <= options.errors < 1:
        parser.error("use at least 1 for --megabytes, and 0 or above and below 1 for --errors")
    if options.folder is not None and not options.folder.is_dir():
        parser.error(f"--folder {options.folder}: there is no such directory")
    return options


if __name__ == "__main__":
    sys.exit(main())
