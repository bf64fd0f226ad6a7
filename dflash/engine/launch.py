"""What torchrun says about this rank, and how all ranks agree before anything runs.

Bad input must end all ranks within seconds and be told once. So each rank puts what it has found on torchrun's store, all read
what the others put, and the lowest rank with something to say says it while the others wait for it and leave in silence.
torchrun itself then exits with 1, whatever the ranks exit with, and with `--max-restarts` starts them again: no exit code keeps
it from that. What no restart can mend is therefore noted on the store of torchrun's agent, which lasts as long as torchrun, and
ranks that are started again say the same once more and end before they look at anything.

Known limit: where each start has a store of its own (TORCH_DISABLE_SHARE_RDZV_TCP_STORE), the input is looked at again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Self

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from dflash.config import ConfigError

START_SECONDS = 300.0  # for all ranks to have imported what they need; loading is not part of it
# Torch tries twice, so that to be told takes twice as long.
CONNECT_SECONDS = 15.0  # to a store that rank 0 serves, once it has imported torch
CONNECT_TO_AGENT_SECONDS = 8.0  # to a store that served before any rank was started
TOLD_SECONDS = 10.0
_OURS = "dflash/"  # what our keys on torchrun's store begin with
_REFUSED = "refused"  # the key of what no restart can mend
_REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Silent(SystemExit):
    """This rank ends with an exit code and without a word: another one says why."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The variables of torchrun."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    restart: int  # how often torchrun has started this run again
    address: str
    port: int

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Raises ConfigError where one is missing or is no number."""
        missing = [name for name in _REQUIRED if not environ.get(name)]
        if missing:
            raise ConfigError(
                f"--engine processes needs the variables of torchrun, not set: {', '.join(missing)}; "
                f"start it with: torchrun --nproc-per-node N -m dflash train ..., or use --engine threads"
            )
        numbers = {}
        for name in (*(name for name in _REQUIRED if name != "MASTER_ADDR"), "TORCHELASTIC_RESTART_COUNT"):
            text = environ.get(name, "0")
            if not text.isdecimal():
                raise ConfigError(f"the variable {name} is {text!r}, expected a number: start the run with torchrun")
            numbers[name] = int(text)
        if numbers["RANK"] >= numbers["WORLD_SIZE"]:
            raise ConfigError(f"RANK is {numbers['RANK']} of WORLD_SIZE {numbers['WORLD_SIZE']}: start the run with torchrun")
        if numbers["MASTER_PORT"] > 65535:
            raise ConfigError(f"MASTER_PORT is {numbers['MASTER_PORT']}: ports end at 65535")
        return cls(
            rank=numbers["RANK"],
            world_size=numbers["WORLD_SIZE"],
            local_rank=numbers["LOCAL_RANK"],
            local_world_size=numbers["LOCAL_WORLD_SIZE"],
            node=int(environ.get("GROUP_RANK", numbers["RANK"] // max(1, numbers["LOCAL_WORLD_SIZE"]))),
            restart=numbers["TORCHELASTIC_RESTART_COUNT"],
            address=environ["MASTER_ADDR"],
            port=numbers["MASTER_PORT"],
        )

    def open_store(self) -> Store:
        """The store of this start of the run. Raises ConfigError when nobody answers."""
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store = TCPStore(
                self.address,
                self.port,
                self.world_size,
                is_master=self.rank == 0 and not agents,
                timeout=timedelta(seconds=CONNECT_TO_AGENT_SECONDS if agents else CONNECT_SECONDS),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                f"no store answers at MASTER_ADDR {self.address}, MASTER_PORT {self.port} ({str(error).splitlines()[0]}): "
                f"start the run with torchrun, and use an address that all nodes reach"
            ) from error
        store.set_timeout(timedelta(seconds=START_SECONDS))
        return PrefixStore(f"{_OURS}{self.restart}", store)


class Agreement:
    """All ranks of one start, before and between collectives; works through the store alone."""

    def __init__(self, store: Store, launch: Launch) -> None:
        self._store, self._launch = store, launch

    def end_if_refused(self) -> None:
        """Tell once more what was wrong when torchrun started this run before, and leave, if no restart can mend it."""
        lasting = _lasting(self._store)
        if self._launch.restart and lasting.check([_REFUSED]):
            self.end(0, lasting.get(_REFUSED).decode())

    def everyone(
        self, stage: str, facts: dict[str, Any], error: str | None = None, *, lasting: bool = True
    ) -> list[dict[str, Any]]:
        """What every rank says at `stage`, by rank. Ends this rank (Silent, exit code 2) if one of them has an error.

        `lasting` says of an error that it will be the same when torchrun starts this run again.
        """
        ranks = range(self._launch.world_size)
        said_here = {"facts": facts, "error": error, "lasting": lasting}
        self._store.set(f"{stage}/{self._launch.rank}", json.dumps(said_here))
        keys = [f"{stage}/{rank}" for rank in ranks]
        try:
            self._store.wait(keys)
        except RuntimeError:
            late = [rank for rank, key in zip(ranks, keys, strict=True) if not self._store.check([key])]
            self.end(0, f"ranks {late} have not come to '{stage}' within {START_SECONDS:.0f} s", lasting=False)
        said = [json.loads(self._store.get(key)) for key in keys]
        for rank in ranks:
            if said[rank]["error"] is not None:
                self.end(rank, said[rank]["error"], lasting=said[rank]["lasting"])
        return [one["facts"] for one in said]

    def end(self, speaker: int, text: str, *, lasting: bool = True) -> NoReturn:
        """Have `speaker` tell the error, and leave with exit code 2. A `lasting` one ends later starts of this run as well."""
        if self._launch.rank == speaker:
            if lasting:
                _lasting(self._store).set(_REFUSED, text)
            sys.stderr.write(f"error: {text}\n")
            sys.stderr.flush()
            self._store.set("told", "1")
        else:
            with contextlib.suppress(RuntimeError):  # the speaker is gone, or slow: nothing to add
                self._store.wait(["told"], timedelta(seconds=TOLD_SECONDS))
        raise Silent(2)


def _lasting(store: Store) -> Store:
    """The keys that all starts of a run share; `store` is what `Launch.open_store` gives."""
    assert isinstance(store, PrefixStore)
    return PrefixStore(f"{_OURS}all", store.underlying_store)


def told_by_rank_0() -> bool:
    """Whether rank 0 has told what is wrong with the command line: waits for it; on rank 0, lets the others know."""
    launch = Launch.read()
    store = launch.open_store()
    if launch.rank == 0:
        store.set("told", "1")
        return True
    try:
        store.wait(["told"], timedelta(seconds=TOLD_SECONDS))
    except RuntimeError:
        return False
    return True


def differences(facts: Sequence[Mapping[str, Any]], shown: int = 5) -> str | None:
    """In which values ranks differ from rank 0, as a sentence; None where they do not."""
    flat = [dict(_flatten(one)) for one in facts]
    found = [
        f"{key} is {values.get(key)!r} on rank {rank} and {flat[0].get(key)!r} on rank 0"
        for rank, values in enumerate(flat)
        for key in sorted(flat[0].keys() | values.keys())
        if values.get(key) != flat[0].get(key)
    ]
    if not found:
        return None
    more = f", and {len(found) - shown} more" if len(found) > shown else ""
    return (
        f"the ranks do not run the same: {'; '.join(found[:shown])}{more}: start all nodes with one command and one installation"
    )


def source_digest(package: Path = Path(__file__).parent.parent) -> str:
    """A few digits that differ where the sources of a package do: nodes of one run may hold different checkouts of it."""
    hasher = hashlib.blake2b(digest_size=6)
    for file in sorted(package.rglob("*.py"), key=lambda file: file.relative_to(package).as_posix()):
        hasher.update(f"{file.relative_to(package).as_posix()}\0".encode())
        hasher.update(hashlib.blake2b(file.read_bytes()).digest())
    return hasher.hexdigest()


def host() -> str:
    """The name of this machine."""
    return socket.gethostname()


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in values.items():
        rows += _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return rows
