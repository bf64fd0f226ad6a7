"""Standard output and error whose reader may go away (`| head -1`): a command goes on, its exit code stays its own. No torch.

A signal that ends the process, as in C, would also end it for a pipe of a child process, and a run for a closed terminal.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, TextIO


def outlive_reader() -> None:
    """From now on what nobody reads goes nowhere, without an error. For commands; another program's output stays as it is.

    What standard error cannot take, as on a full disk, goes nowhere, too: there is no other place to say it.
    """
    sys.stdout = _outliving(sys.stdout, BrokenPipeError)
    sys.stderr = _outliving(sys.stderr, OSError)


def _outliving(old: TextIO, why: type[OSError]) -> TextIO:
    if not isinstance(old, io.TextIOWrapper):  # closed from the start, or taken by another program
        return old
    with contextlib.suppress(why):
        old.flush()
    raw = _Outliving(old.fileno(), "wb", closefd=False)
    raw.why = why
    return io.TextIOWrapper(
        raw if old.write_through else io.BufferedWriter(raw),  # python -u
        encoding=old.encoding, errors=old.errors, line_buffering=old.line_buffering, write_through=old.write_through,
    )  # fmt: skip


class _Outliving(io.FileIO):
    why: type[OSError]  # what is outlived

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except self.why:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # for child processes, too
            os.close(nowhere)
            return super().write(data)
