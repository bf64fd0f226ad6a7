"""What a run goes on from: nothing, a checkpoint when asked, or, where torchrun starts it again, what is whole of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from filelock import FileLock, Timeout

from dflash import checkpoint
from dflash.checkpoint import TrainState
from dflash.config import RunConfig
from dflash.errors import CheckpointError

RESULT_FILE = "result.json"
LOCK_FILE = ".in-use"
_LOCK_SECONDS = 5.0  # a run that was killed may still be ending


@contextlib.contextmanager
def held(config: RunConfig) -> Iterator[list[str]]:
    """Keep other runs out of the output directory, which is made for a first start.

    Raises CheckpointError while another run is in it. Storage that cannot lock is used without: yields the notice that says so.
    """
    if config.resume and not config.output.is_dir():  # nothing to resume, which is told by whoever looks for it
        yield []
        return
    config.output.mkdir(parents=True, exist_ok=True)
    lock, notices = FileLock(config.output / LOCK_FILE, timeout=_LOCK_SECONDS), []
    try:
        lock.acquire()
    except Timeout:
        raise CheckpointError(f"{config.output} is in use by another run: wait until it ends, or use another --output") from None
    except NotImplementedError as error:
        notices.append(f"{config.output} cannot be locked ({error}): whether another run uses it is not known")
    try:
        yield notices
    finally:
        lock.release()


def last_checkpoint(config: RunConfig) -> str | None:
    """The newest complete checkpoint; a measuring run that resumed nothing has none."""
    complete = checkpoint.list_complete(config.output)
    return str(checkpoint.checkpoint_dir(config.output) / complete[-1]) if complete else None


def set_aside(config: RunConfig, *, leads: bool) -> list[str]:
    """Nobody is there to remove a damaged checkpoint when torchrun starts a run again."""
    return checkpoint.set_aside_damaged(config.output) if leads else []


def restarted(config: RunConfig) -> RunConfig:
    """Torchrun runs the first command again: go on from what the run before has saved, if anything."""
    return dataclasses.replace(config, resume=bool(checkpoint.list_complete(config.output)))


def finished(config: RunConfig) -> dict[str, Any] | None:
    """The result of a run that had ended when torchrun started it again, because something failed after that."""
    path = config.output / RESULT_FILE
    if not config.resume or not path.exists():
        return None
    if checkpoint.list_complete(config.output)[-1] != checkpoint.step_name(config.optim.steps):
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def saved_state(config: RunConfig) -> TrainState | None:
    """What `--resume` goes on from; None at a first start.

    Raises CheckpointError where the run is finished, and where checkpoints are in the way of a first start.
    """
    existing = checkpoint.list_complete(config.output)
    if config.resume:
        state = checkpoint.load(checkpoint.resolve(config.output, "last"))
        if state.step >= config.optim.steps:
            raise CheckpointError(
                f"{config.output} is finished: its last checkpoint is of step {state.step} of {config.optim.steps}"
            )
        return state
    if existing:
        raise CheckpointError(
            f"{config.output} already holds checkpoints up to {existing[-1]}: use --resume to go on, or another --output"
        )
    return None
