"""What the headline consists of, for so many GPUs: commands, each under ten minutes, and what is expected of them. Pure.

A step that needs more GPUs than there are is left out and said so. One GPU holds target and drafter together, as the preset does;
the CPU workload stands for all of it without GPUs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from dflash.config import Topology
from regression.cold_starts import POLICIES
from regression.spec import topology as split
from regression.spec import workload

SCALING = ("1t+1d", "2t+1d", "3t+2d", "5t+3d", "6t+2d")
LARGE_GPUS = 8  # from here on the target is the incident's size
_LARGE = ("--target.path", "random:qwen3-32b", "--target.mask-token-id", "151669", "--data.path", "synthetic:256")
_PLAIN = ("--telemetry.wandb", "off", "--optim.steps", "1000000000", "--checkpoint.no-keep-untrained")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command. `train` commands run until they were steady for `seconds`; others run to their end."""

    name: str
    what: str
    command: tuple[str, ...]
    seconds: float | None = None  # of steady training; None: no training command
    exit_codes: tuple[int, ...] = (0,)
    leaves_json: bool = False  # it writes its figures where `--json FILE` says
    needs_output: bool = False  # it needs `--output DIR`, as every training command does


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much of everything."""

    gpus: int
    seconds: float = 390.0  # of steady training in the main rows
    scaling_seconds: float = 60.0
    starts: int = 20
    segment_seconds: float = 20.0  # of each side in a pair of the gate
    starts_at_once: int = 1


def steps(sizes: Sizes) -> tuple[list[Step], list[str]]:
    """The steps in their order, and what is left out for lack of GPUs."""
    main = _main_topology(sizes.gpus)
    wanted = [*_gate(sizes), *_engines(sizes, main), *_cold(sizes), *_transport(sizes), *_scaling(sizes)]
    left_out = [f"{name}: needs {_workers(name)} GPUs" for name in SCALING if 1 < sizes.gpus < _workers(name)]
    if sizes.gpus == 1:
        left_out += ["processes and transport: every process has a GPU of its own, two are needed", "scaling: needs 2 GPUs"]
    return wanted, left_out


def _gate(sizes: Sizes) -> list[Step]:
    gpus, seconds = ("--gpus", str(sizes.gpus)), ("--segment-seconds", f"{sizes.segment_seconds:g}")
    pairs = (sys.executable, "-m", "regression.ab", "--baseline", "HEAD", *gpus, *seconds, "--pairs", "4", "--turns", "2")
    share = 0.03 if sizes.gpus else 0.3  # a CPU beside other programs hides less
    laws = (sys.executable, "-m", "pytest", "regression/", *gpus, *seconds, "--segments", "1", "-q", "-p", "no:cacheprovider")
    undecided = 3  # four pairs seldom rule out 2 %; a false FAIL is 1
    busy = () if sizes.gpus else ("--busy-counts",)
    return [
        Step(
            name="gate-itself",
            what="this commit against itself",
            command=(*pairs, *busy),
            exit_codes=(0, undecided),
            needs_output=True,
        ),
        Step(
            name="gate-planted-slowdown",
            what=f"the same, {share:.0%} slower: must fail",
            command=(*pairs, *busy, "--burn-share", str(share)),
            exit_codes=(1,),
            needs_output=True,
        ),
        Step(name="gate-planted-race", what="a planted FX race: must fail", command=(*laws, "--plant", "race"), exit_codes=(1,)),
    ]


def _engines(sizes: Sizes, main: Topology | None) -> list[Step]:
    threads = (sys.executable, "-m", "dflash", "train", *_workload(sizes, main), *_PLAIN)
    found = [
        Step(name="train-threads", what=f"training {main or 'as the preset'}, threads", command=threads, seconds=sizes.seconds)
    ]
    if sizes.gpus != 1:
        topology = main or Topology(1, 1)
        found.append(
            Step(
                name="train-processes",
                what=f"training {topology}, processes",
                command=(*_torchrun(topology), *_workload(sizes, topology), *_PLAIN),
                seconds=sizes.seconds,
                exit_codes=(0, 1),  # torchrun's own after SIGTERM, however well the ranks ended
            )
        )
    return found


def _cold(sizes: Sizes) -> list[Step]:
    places = ",".join(f"cuda:{n % sizes.gpus}" for n in range(4)) if sizes.gpus else "cpu"
    common = ("--starts", str(sizes.starts), "--at-once", str(sizes.starts_at_once), "--devices", places)
    return [
        Step(
            name=f"cold-starts-{policy}",
            what=f"1 target, 3 drafters, empty cache, --compile.policy {policy}",
            command=(sys.executable, "-m", "regression.cold_starts", "--policies", policy, *common),
            leaves_json=True,
        )
        for policy in POLICIES
    ]


def _transport(sizes: Sizes) -> list[Step]:
    if sizes.gpus == 1:
        return []
    where = ("--device", "cuda:0") if sizes.gpus else ("--device", "cpu")
    command = (sys.executable, "-m", "regression.bench", "transport", *where)
    return [Step(name="transport", what="target states over the bare link", command=command, leaves_json=True)]


def _scaling(sizes: Sizes) -> list[Step]:
    fitting = [Topology.parse(name) for name in SCALING if _workers(name) <= sizes.gpus]
    return [
        Step(
            name=f"scaling-{topology}",
            what=f"training {topology}, threads",
            command=(sys.executable, "-m", "dflash", "train", *_workload(sizes, topology), *_PLAIN),
            seconds=sizes.scaling_seconds,
        )
        for topology in fitting
        if topology != _main_topology(sizes.gpus)
    ]


def _workload(sizes: Sizes, topology: Topology | None) -> tuple[str, ...]:
    """Flags of the training command: the gate's workload, from LARGE_GPUS on with the incident's target."""
    spec = workload(min(sizes.gpus, 1))
    flags = ("--preset", spec.preset, *spec.overrides)
    if topology is None:
        return flags
    where = ("--topology", str(topology), "--devices", "cuda" if sizes.gpus else "cpu")
    return (*flags, *where, *(_LARGE if sizes.gpus >= LARGE_GPUS else ()))


def _torchrun(topology: Topology) -> tuple[str, ...]:
    ranks = str(topology.targets + topology.drafters)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    return (sys.executable, *launcher, "-m", "dflash", "train", "--engine", "processes")


def _main_topology(gpus: int) -> Topology | None:
    return split(gpus) if gpus > 1 else None


def _workers(name: str) -> int:
    topology = Topology.parse(name)
    return topology.targets + topology.drafters
