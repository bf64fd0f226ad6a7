"""Run trainings in processes under torchrun's own agent, with planted faults: `python tests/programs/ranks.py SCENARIO.json...`.

The agent forks its ranks from this process, which has imported everything: a start takes a second instead of ten. A scenario is
JSON: `arguments` of `python -m dflash train`, `of_rank` more of them for single ranks, `ranks`, `restarts`, `logs` (a
directory), `without_anchors` (numbers of micro-batches that lose all of theirs) and `faults`. A fault is planted in one worker,
in one life of the run: {"life": 0, "worker": "target-0", "number": 9, "do": "kill"}. Prints one JSON line a scenario: exit
codes, and the processes that were left.
"""

from __future__ import annotations

import json
import os
import signal
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
from dflash.worker import DrafterModelWorker, TargetModelWorker


def rank_main(scenario: dict[str, Any]) -> None:
    rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for fault in scenario.get("faults", ()):
        if fault["life"] == life:
            plant(fault, rank)
    PackedStream.batch = without_anchors(PackedStream.batch, scenario.get("without_anchors", ()))
    sys.exit(main(["train", *scenario["arguments"], *scenario.get("of_rank", {}).get(str(rank), ())]))


def plant(fault: dict[str, Any], rank: int) -> None:
    if "saving" in fault:
        if rank == 0:
            in_the_middle_of_saving(fault)
        return
    worker, call = (TargetModelWorker, "produce") if "target" in fault["worker"] else (DrafterModelWorker, "accumulate")
    original = getattr(worker, call)

    def faulty(self: Any, item: Any) -> Any:
        number = item if isinstance(item, int) else item.batch.index
        if self.name != fault["worker"] or number != fault["number"]:
            return original(self, item)
        if fault["do"] == "nan":
            states = original(self, item)
            states.features[0, 1, 2] = float("nan")
            return states
        act(fault["do"])
        return original(self, item)

    setattr(worker, call, faulty)


def in_the_middle_of_saving(fault: dict[str, Any]) -> None:
    original = checkpoint.sync

    def faulty(path: Path) -> None:
        if checkpoint.step_name(fault["saving"]) in str(path):
            act(fault["do"])
        original(path)

    checkpoint.sync = faulty


def act(what: str) -> None:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        raise ValueError(f"no fault {what!r}")


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
    began = time.monotonic()
    codes: dict[int, int] = {}
    try:
        elastic_launch(config, rank_main)(scenario)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    left = [child.pid for child in psutil.Process().children(recursive=True)]
    return {"codes": codes, "left": left, "seconds": time.monotonic() - began}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        sys.stdout.write(json.dumps(run(json.loads(Path(name).read_text()))) + "\n")
        sys.stdout.flush()
