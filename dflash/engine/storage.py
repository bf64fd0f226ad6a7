"""Whether all ranks reach one output directory, and the data, found out before anything is loaded.

All machines of a run share `--output`: rank 0 saves there, and every rank reads what was saved. A machine on which the storage
is not mounted would make the directory on its own disk, and fail only when a checkpoint is wanted. So rank 0 writes a mark of
this start into it, and the others must find that mark.
"""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path

from dflash.data.meta import DataError, load_meta
from dflash.data.synthetic import is_synthetic
from dflash.engine.launch import Agreement, Launch, host

_MARK = ".reached-by-rank-0"


def check_storage(output: Path, launch: Launch, agreement: Agreement) -> None:
    """Make the directory, or end all ranks (exit code 2), told once, where one of them cannot reach it or write there."""
    mark, own = output / _MARK, uuid.uuid4().hex
    error = None
    try:
        output.mkdir(parents=True, exist_ok=True)
        if launch.rank == 0:
            mark.write_text(own)
    except OSError as found:
        error = f"{_who(launch)} cannot write to the output directory {output} ({found}): mount it, or name another --output"
    written = agreement.everyone("making the output directory", {"mark": own}, error, lasting=False)[0]["mark"]
    agreement.everyone("finding the output directory", {}, _unseen(mark, written, launch), lasting=False)
    if launch.rank == 0:
        with contextlib.suppress(FileNotFoundError):
            mark.unlink()


def check_data(path: Path, agreement: Agreement) -> None:
    """End all ranks (exit code 2), told once, where one of them does not find prepared data; it is read and compared later."""
    error, lasting = None, True
    try:
        if not is_synthetic(path):
            load_meta(path)
    except DataError as found:
        error = str(found)
    except OSError as found:
        error, lasting = f"{type(found).__name__}: {found}", False  # storage may come back
    agreement.everyone("finding the data", {}, error, lasting=lasting)


def _unseen(mark: Path, written: str, launch: Launch) -> str | None:
    """What is wrong where this rank does not see what rank 0 wrote."""
    try:
        if mark.read_text() == written:
            return None
        found = "another run's mark"
    except OSError as error:
        found = str(error)
    return (
        f"{_who(launch)} does not see in the output directory {mark.parent} what rank 0 wrote there ({found}): mount the same "
        f"storage on all machines, or name another --output"
    )


def _who(launch: Launch) -> str:
    return f"rank {launch.rank} on {host()}"
