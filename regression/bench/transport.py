"""Target states from rank to rank beside the bare link: how much of it the transport uses.

    python -m regression.bench transport                              # two GPUs, NCCL
    python -m regression.bench transport --device cpu --shape qwen3-8b    # two processes of this machine, Gloo

torchrun starts a target and a drafter (`transport_child`). First the target sends one tensor of the size of the states again and
again, two in flight, through the same process group with nothing around it: the ceiling. Then micro-batches go through the queues
of the engine `processes`, with grants, headers and slots, made from one set of random states: no model runs on either side.
Known limits: the drafter packs no batch, it has one; on CPUs both ranks share memory and cores, which a network does not.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from regression.bench import settings as bench
from regression.bench.figures import Figure, Result
from regression.bench.settings import Settings
from regression.child import run_json

TIMEOUT_SECONDS = 300.0
RANKS = 2
SHARE = 0.8  # of the link, at least


def measure(settings: Settings) -> Result:
    """Let two ranks measure. Raises ChildFailed where they do not run."""
    flags = ["--shape", settings.shape, "--device", str(settings.device), "--rounds", str(settings.rounds)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    with tempfile.TemporaryDirectory(prefix="transport-") as scratch:
        command = [*torchrun, "-m", "regression.bench.transport_child", *flags, "--output", str(Path(scratch) / "run")]
        found = run_json(command, log=Path(scratch) / "stderr.log", timeout_seconds=TIMEOUT_SECONDS).result
    size, link, ours = found["bytes"], found["link_seconds"], found["transport_seconds"]
    rate, goal = size / ours / 1e9, SHARE if settings.shape == "qwen3-8b" else None
    figures = (
        Figure(name="states of one micro-batch", value=size / 2**20, unit="MiB"),
        Figure(name="link: the same bytes alone", value=size / link / 1e9, unit="GB/s", better="higher"),
        Figure(name="transport", value=rate, unit="GB/s", ceiling=size / link / 1e9, better="higher"),
        Figure(name="transport over link", value=link / ours, unit="share", better="higher", goal=goal),
        Figure(name="transport: one micro-batch", value=ours * 1000, unit="ms", ceiling=link * 1000),
    )
    return Result(bench="transport", shape=settings.shape, device=found["devices"], figures=figures, details=found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this bench alone."""
    return bench.main("transport", measure, arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
