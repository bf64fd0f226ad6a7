"""Run trainings in processes under torchrun's own agent, with planted faults: `python tests/programs/ranks.py SCENARIO.json...`.

The agent forks its ranks from this process, which has imported everything: a start takes a second instead of ten. A scenario is
JSON: `arguments` of `python -m dflash train`, `of_rank` more of them for single ranks in the first life, `ranks`, `restarts`,
`logs` (a directory), `without_anchors` (numbers of micro-batches that lose all of theirs) and `faults`. A fault is planted in one
worker, in one life of the run: {"life": 0, "worker": "target-0", "number": 9, "do": "kill"}; without a number at every
micro-batch; with "sending" between the header and the tensors; with "saving": 6 in rank 0 while it saves step 6. Prints one JSON
line a scenario: exit codes, and what was left: processes, shared memory, ports.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from helpers_training import without_anchors
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import dflash.trainer  # noqa: F401 - imported before the fork
from dflash import checkpoint
from dflash.__main__ import main
from dflash.data.packing import PackedStream
from dflash.engine.processes import Ranks
from dflash.worker import DrafterModelWorker, TargetModelWorker

FULL_BYTES = 2**16
SLOW_SECONDS = 0.4
GONE_SECONDS = 5.0
SHARED_MEMORY = Path("/dev/shm")


def rank_main(scenario: dict[str, Any]) -> None:
    rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    inherited = {connection.fd for connection in psutil.Process().net_connections("tcp")}  # the agent's own
    for fault in scenario.get("faults", ()):
        if fault["life"] == life:
            plant(fault | {"inherited": inherited}, rank)
    PackedStream.batch = without_anchors(PackedStream.batch, scenario.get("without_anchors", ()))
    own = scenario.get("of_rank", {}).get(str(rank), ()) if life == 0 else ()
    sys.exit(main(["train", *scenario["arguments"], *own]))


def plant(fault: dict[str, Any], rank: int) -> None:
    if "saving" in fault:
        if rank == 0:
            {"kill": kill_while_saving, "full": fill_the_disk, "damage": damage_after_saving}[fault["do"]](fault)
    elif fault.get("sending"):
        in_the_middle_of_sending(fault)
    else:
        in_a_worker(fault)


def in_a_worker(fault: dict[str, Any]) -> None:
    worker, call = (TargetModelWorker, "produce") if "target" in fault["worker"] else (DrafterModelWorker, "accumulate")
    original = getattr(worker, call)

    def faulty(self: Any, item: Any) -> Any:
        number = item if isinstance(item, int) else item.batch.index
        if self.name != fault["worker"] or number != fault.get("number", number):
            return original(self, item)
        if fault["do"] == "nan":
            states = original(self, item)
            states.features[0, 1, 2] = float("nan")
            return states
        act(fault["do"], fault)
        return original(self, item)

    setattr(worker, call, faulty)


def in_the_middle_of_sending(fault: dict[str, Any]) -> None:
    original = Ranks.send_tensors

    def faulty(self: Ranks, tensors: Any, to: int) -> Any:  # the header has gone already
        if self.worker == fault["worker"] and self.doing.text.endswith(f"micro-batch {fault['number']}"):
            act(fault["do"])
        return original(self, tensors, to)

    Ranks.send_tensors = faulty


def kill_while_saving(fault: dict[str, Any]) -> None:
    original = checkpoint.sync

    def faulty(path: Path) -> None:
        if checkpoint.step_name(fault["saving"]) in str(path):
            act("kill")
        original(path)

    checkpoint.sync = faulty


def fill_the_disk(fault: dict[str, Any]) -> None:
    """The kernel refuses what would make a file longer than a few pages: the weights, but no log."""
    original = checkpoint.save

    def faulty(run: Path, state: checkpoint.TrainState) -> Path:
        if state.step == fault["saving"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return original(run, state)

    checkpoint.save = faulty


def damage_after_saving(fault: dict[str, Any]) -> None:
    original = checkpoint.save

    def faulty(run: Path, state: checkpoint.TrainState) -> Path:
        made = original(run, state)
        if state.step == fault["saving"]:
            with (made / "drafter.safetensors").open("r+b") as file:
                file.seek(-9, os.SEEK_END)
                byte = file.read(1)
                file.seek(-9, os.SEEK_END)
                file.write(bytes([byte[0] ^ 1]))
            act("kill")
        return made

    checkpoint.save = faulty


def act(what: str, fault: dict[str, Any] | None = None) -> None:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif what == "unplug":
        unplug(fault["inherited"] if fault else set())
    elif what == "slow":
        time.sleep(SLOW_SECONDS)
    else:
        raise ValueError(f"no fault {what!r}")


def unplug(inherited: set[int]) -> None:
    """Shut every connection that this process has made down: to the other ranks, and to torchrun's store."""
    for connection in psutil.Process().net_connections("tcp"):
        if connection.status == psutil.CONN_ESTABLISHED and connection.fd not in inherited:
            with socket.socket(fileno=os.dup(connection.fd)) as one:
                one.shutdown(socket.SHUT_RDWR)


def belongings() -> dict[str, set[Any]]:
    """What a run must not leave: processes below this one, shared memory of this user, ports that one of them listens at."""
    me = psutil.Process()
    below = me.children(recursive=True)
    listening = {
        connection.laddr.port
        for process in (me, *below)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    shared = (
        {str(path) for path in SHARED_MEMORY.iterdir() if path.stat().st_uid == os.getuid()} if SHARED_MEMORY.is_dir() else ()
    )
    return {"processes": {process.pid for process in below}, "shared memory": set(shared), "ports": listening}


def of_others(files: set[str]) -> set[str]:
    """Those of these files that a living process outside this program has mapped: other programs run on the machine, too."""
    me = psutil.Process()
    ours = {me.pid, *(process.pid for process in me.children(recursive=True))}
    found: set[str] = set()
    for pid in set(psutil.pids()) - ours if files else ():
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found |= {file for file in files if file in maps}
    return found


def shared_memory_left(before: set[str]) -> set[str]:
    """What is still there after some seconds: names of another program that has just ended go away, what is left stays."""
    until = time.monotonic() + GONE_SECONDS
    while True:
        new = belongings()["shared memory"] - before
        new -= of_others(new)
        if not new or time.monotonic() > until:
            return new
        time.sleep(0.1)


def run(scenario: dict[str, Any]) -> dict[str, Any]:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=scenario["ranks"],
        max_restarts=scenario.get("restarts", 0),
        monitor_interval=0.1,
        start_method="fork",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        logs_specs=DefaultLogsSpecs(log_dir=scenario["logs"], redirects=Std.ALL),
    )
    before, began = belongings(), time.monotonic()
    codes: dict[int, int] = {}
    try:
        elastic_launch(config, rank_main)(scenario)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    gc.collect()  # torchrun's agent and its store
    new = {kind: found - before[kind] for kind, found in belongings().items()}
    new["shared memory"] = shared_memory_left(before["shared memory"])
    left = [f"{kind} {one}" for kind, found in new.items() for one in sorted(found)]
    return {"codes": codes, "left": left, "seconds": time.monotonic() - began}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        sys.stdout.write(json.dumps(run(json.loads(Path(name).read_text()))) + "\n")
        sys.stdout.flush()
