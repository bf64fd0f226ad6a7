"""Standard output whose reader may go away (`| head -1`): a command goes on, and its exit code stays its own. Imports no torch.

A signal that ends the process, as in C, would also end it for a pipe of a child process, and a run for a closed terminal.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any


def outlive_reader() -> None:
    """From now on what nobody reads goes nowhere, without an error. For commands; another program's output stays as it is."""
    old = sys.stdout
    if not isinstance(old, io.TextIOWrapper):  # closed from the start, or taken by another program
        return
    old.flush()
    raw = _Outliving(old.fileno(), "wb", closefd=False)
    sys.stdout = io.TextIOWrapper(
        raw if old.write_through else io.BufferedWriter(raw),  # python -u
        encoding=old.encoding, errors=old.errors, line_buffering=old.line_buffering, write_through=old.write_through,
    )  # fmt: skip


class _Outliving(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # for child processes, too
            os.close(nowhere)
            return super().write(data)
