"""N target and M drafter processes, started by torchrun: the only file that makes process groups.

Groups: `control` (Gloo, all ranks: grants, headers, Python objects), `data` (all ranks: target states), `drafters` (gradients),
`team` (a target of several ranks), each used by one kind of traffic so that none waits behind another; all but the first are NCCL
with one GPU a rank when devices are GPUs, else Gloo. The threads that use a group are the main one and the one that receives.

`joined` is a rank's life: read torchrun's variables, agree with the others, watch each other, connect, run, leave. A failure on
any rank ends all of them with exit code 1 within the time-out (`dflash.engine.watch`).

Known limits: NCCL has run on two GPUs, without teams. A team of target ranks has groups of its own, made one after the other:
slow for hundreds of teams. Where one of a team stops, another of it may be named, who waits in the middle of its work.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store

from dflash import events
from dflash.config import ConfigError, RunConfig, Topology, to_dict
from dflash.engine.devices import check_abilities
from dflash.engine.launch import Agreement, Launch, Silent, differences, host, source_digest
from dflash.engine.loops import Doing, DrafterWorker, Sink, TargetWorker, WorkerTimes, consume, finishing, on_device, target_loop
from dflash.engine.reading import ReadingQueue
from dflash.engine.roles import Roles
from dflash.engine.storage import check_data, check_storage
from dflash.engine.transport import ReceivingQueue, introduce
from dflash.engine.waits import Waits, WaitsMeter
from dflash.engine.watch import Peer, PeerLost, Watch
from dflash.engine.wire import GroupWire, talking
from dflash.stopping import Stop, stop_on_signals

MEASURED_BEAT_SECONDS = 0.2  # a measuring run knows what other ranks did as exactly as this
GROUP_SECONDS = 7 * 24 * 3600.0  # the watch ends what hangs; torch's own limit must not end what is slow

Made = TypeVar("Made")


@dataclass(kw_only=True)
class Ranks(GroupWire):
    """This rank among the others. Built by `joined`."""

    launch: Launch
    roles: Roles
    doing: Doing
    stop: Stop  # asked to by a signal
    agreement: Agreement
    watch: Watch
    waits_meter: WaitsMeter
    drafters: Any
    drafters_control: Any  # Gloo, for Python objects
    team: Any = None  # of a target with several ranks, as `data`; None for other workers
    team_control: Any = None  # Gloo

    @property
    def rank(self) -> int:
        """This process among all."""
        return self.launch.rank

    @property
    def leads(self) -> bool:
        """Whether this rank reports and saves."""
        return self.rank == 0

    @property
    def is_target(self) -> bool:
        """Whether this rank makes target states, alone or as one of a team."""
        return self.rank not in self.roles.drafters

    @property
    def worker(self) -> str:
        """Name of this rank's worker."""
        return self.roles.worker(self.rank)

    def agree(self, stage: str, make: Callable[[], Made], errors: tuple[type[Exception], ...]) -> Made:
        """What `make` returns, if it returns on all ranks. Ends all of them, told once, where it raises one of `errors`."""
        made: list[Made] = []
        message, lasting = None, True
        with self.doing.at("slow", stage):
            try:
                made.append(make())
            except errors as error:
                message = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                lasting = not isinstance(error, OSError)  # storage may come back
            self.agreement.everyone(stage, {}, message, lasting=lasting)
        return made[0]

    def same(self, stage: str, facts: dict[str, Any]) -> None:
        """End all ranks, told once, where the facts differ."""
        different = differences(self.agreement.everyone(stage, facts))
        if different:
            self.agreement.end(0, different)

    def waits(self) -> Waits | None:
        """Who waited for whom since the last call that gave something; None while that is too short a time."""
        return self.waits_meter.stretch(self.watch.spent())

    @property
    def target_leader(self) -> int:
        """The rank that sends for this one's team."""
        return self.roles.team(self.rank)[0]

    def told_by_target_leader(self, number: int | None) -> int | None:
        """What the first rank of the team says to all of it: a micro-batch, or the end."""
        told = torch.tensor([-1 if number is None else number])
        with talking():
            dist.broadcast(told, src=self.target_leader, group=self.team_control)
        return None if told.item() < 0 else int(told.item())

    def gather(self, value: Any) -> list[Any] | None:
        """The objects of all ranks, on rank 0."""
        with self.doing.at("waiting", "collecting results"), talking():
            rows: list[Any] | None = [None] * self.launch.world_size if self.leads else None
            dist.gather_object(value, rows, dst=0, group=self.control)
            return rows

    def gather_from_drafters(self, value: Any) -> list[Any] | None:
        """The objects of all drafters, in their order, on the leader."""
        with talking():
            rows: list[Any] | None = [None] * len(self.roles.drafters) if self.leads else None
            dist.gather_object(value, rows, dst=0, group=self.drafters_control)
            return rows

    def gather_rows(self, rows: Tensor) -> Tensor:
        """[count, n] of each drafter as [M, count, n] on every drafter."""
        result = rows.new_empty((len(self.roles.drafters), *rows.shape))
        with talking():
            dist.all_gather(list(result.unbind(0)), rows, group=self.drafters)
        return result

    def sum_over_drafters(self, tensor: Tensor) -> None:
        """Replace a tensor of every drafter by the sum over them."""
        with talking():
            dist.all_reduce(tensor, group=self.drafters)

    def from_leader(self, tensor: Tensor) -> None:
        """Replace a tensor of every drafter by the leader's."""
        with talking():
            dist.broadcast(tensor, src=0, group=self.drafters)

    def shard(self, drafter: Sharing) -> None:
        """Make the drafters equal to the leader's, and leave each a part of the parameters."""
        with self.doing.at("slow", "sharding the drafter"):
            for parameter in drafter.drafter.parameters():
                self.from_leader(parameter.data)
            with talking():
                drafter.shard(self.drafters, leads=self.leads)

    @contextlib.contextmanager
    def losing_peers(self) -> Iterator[None]:
        """What torch.distributed raises inside other work when a connection breaks, as PeerLost."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            raise PeerLost(None, error) from error

    def any_drafter(self, flag: bool) -> bool:
        """Whether the flag is set on at least one drafter."""
        flags = torch.tensor([float(flag)], device=self.device)
        self.sum_over_drafters(flags)
        return bool(flags.item() > 0)

    def run_target(self, queue: Sink, worker: TargetWorker) -> WorkerTimes:
        """Make target states until the drafters want no more."""
        times = self.doing.times = WorkerTimes(worker=self.worker, device=str(self.device))
        with on_device(self.device):
            target_loop(queue, times, worker, self.doing)
        return times

    def run_drafter(self, run: DrafterRun, worker: DrafterWorker) -> None:
        """Learn until the last step, or until `finish_step` says so on all drafters."""
        self.doing.times = run.times
        with on_device(self.device):
            run.queue.start()
            for step in range(run.first_step, run.num_steps):
                before = (step + 1) * run.batches_per_step
                consume(run.queue, run.times, worker, self.doing, before=before, meets_others=True)
                with finishing(run.times, meets_others=True), events.span("drafter.step", step=step):
                    if not run.finish_step(step):
                        break
            with self.doing.at("waiting", "dropping what is no longer wanted"):
                run.queue.close()


class Sharing(Protocol):
    """A drafter worker that can share its parameters with others."""

    @property
    def drafter(self) -> nn.Module:
        """Whose parameters they are."""

    def shard(self, group: Any, *, leads: bool) -> None:
        """Keep a part of them."""


@dataclass(kw_only=True)
class DrafterRun:
    """What the loop of a drafter needs."""

    queue: ReceivingQueue | ReadingQueue
    times: WorkerTimes
    first_step: int
    num_steps: int
    batches_per_step: int
    finish_step: Callable[[int], bool]  # called by every drafter with the 0-based step; False, on all of them, ends the run


@contextlib.contextmanager
def joined(config: RunConfig) -> Iterator[Ranks]:
    """Be one rank of a run for the length of the block.

    Configuration and versions must be equal on all ranks. Raises ConfigError where torchrun's variables are missing, and Silent
    (a SystemExit, exit code 2) where the ranks cannot start, after one of them has said why. Inside the block, what this or
    another rank finds wrong (2) or fails with (1) ends the process.
    """
    launch = _launch()
    store = launch.open_store()
    agreement = Agreement(store, launch)
    agreement.end_if_refused()
    roles, device, peers = _start(config, launch, agreement)
    doing = Doing()
    seconds = config.engine_timeout_seconds
    watch = Watch(
        launch.open_store(),
        peers,
        launch.rank,
        doing,
        timeout_seconds=seconds,
        directory=config.output,
        nccl=device.type == "cuda",
        most_beat_seconds=MEASURED_BEAT_SECONDS if config.measure.on else 1.0,
    )
    with stop_on_signals() as stop:
        watch.start()
        try:
            with doing.at("slow", "connecting"):
                ranks = _connect(launch, roles, device, doing, agreement, watch, store, stop)
            yield ranks
            with doing.at("waiting", "waiting for all ranks to end"), talking():
                dist.barrier(group=ranks.control)
            watch.stop()
            dist.destroy_process_group()
        except BaseException as error:  # noqa: BLE001 - every failure is told to the other ranks, and ends the process
            stop.stepping = True  # torchrun's SIGTERM must not cut the telling short
            leaving = error if isinstance(error, Silent) else watch.failed(error)
            sys.stdout.flush()
            sys.stderr.flush()
            # Process groups with open transfers can hang when they are torn down, and threads of torch's abort.
            os._exit(int(leaving.code or 1))


def _launch() -> Launch:
    """The variables of torchrun. What is wrong with them is told once a machine: without them ranks cannot talk to others."""
    try:
        return Launch.read()
    except ConfigError:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            raise Silent(2) from None
        raise


def _start(config: RunConfig, launch: Launch, agreement: Agreement) -> tuple[Roles, torch.device, list[Peer]]:
    """What can be said before connecting: ranks are of one kind, as many as workers, have devices, one storage and data."""
    error = None
    try:
        device = _device(config, launch)
    except ConfigError as found:
        error, device = str(found), torch.device("cpu")
    said = agreement.everyone("start", {"node": launch.node, "host": host(), "pid": os.getpid(), "facts": _facts(config)}, error)
    different = differences([one["facts"] for one in said])
    if different:
        agreement.end(0, different)
    try:
        topology = Topology.parse(config.topology)
        roles = Roles.assign(topology, tuple(one["node"] for one in said), config.target.tensor_parallel)
    except ConfigError as found:
        agreement.end(0, str(found))
    check_storage(config.output, launch, agreement)
    check_data(config.data.path, agreement)
    peers = [Peer(rank=rank, worker=roles.worker(rank), host=one["host"], pid=one["pid"]) for rank, one in enumerate(said)]
    return roles, device, peers


def _facts(config: RunConfig) -> dict[str, Any]:
    """What must be equal on all ranks."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "safetensors")}
    own = {"python": platform.python_version(), "dflash (digest of its sources)": source_digest()}
    return {"versions": versions | own, "config": to_dict(config)}


def _device(config: RunConfig, launch: Launch) -> torch.device:
    if config.devices == "cpu":
        device = torch.device("cpu")
        check_abilities(config, [device])
        return device
    found, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    if found < launch.local_world_size:
        raise ConfigError(
            f"--engine processes needs a GPU for each of the {launch.local_world_size} processes of this machine, rank "
            f"{launch.rank} on {host()} found {found} (CUDA_VISIBLE_DEVICES {visible}): "
            f"start fewer (--nproc-per-node), or use --devices cpu"
        )
    device = torch.device("cuda", launch.local_rank)
    check_abilities(config, [device])
    return device


def _connect(
    launch: Launch,
    roles: Roles,
    device: torch.device,
    doing: Doing,
    agreement: Agreement,
    watch: Watch,
    store: Store,
    stop: Stop,
) -> Ranks:
    limit = timedelta(seconds=GROUP_SECONDS)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    prefix = PrefixStore("groups", store)
    dist.init_process_group("gloo", store=prefix, rank=launch.rank, world_size=launch.world_size, timeout=limit)
    fast = "nccl" if device.type == "cuda" else "gloo"
    drafters = list(roles.drafters)
    ranks = Ranks(
        launch=launch,
        roles=roles,
        device=device,
        doing=doing,
        stop=stop,
        agreement=agreement,
        watch=watch,
        waits_meter=WaitsMeter(
            [f"rank {rank} ({roles.worker(rank)})" for rank in range(launch.world_size)], least_seconds=2 * watch.beat_seconds
        ),
        control=dist.group.WORLD,
        data=dist.new_group(backend=fast, timeout=limit),
        drafters=dist.new_group(drafters, backend=fast, timeout=limit),
        drafters_control=dist.new_group(drafters, backend="gloo", timeout=limit),
    )
    for target in roles.targets if roles.tensor_parallel > 1 else ():
        team = roles.team(target)
        made = [dist.new_group(list(team), backend=backend, timeout=limit) for backend in (fast, "gloo")]
        if launch.rank in team:
            ranks.team, ranks.team_control = made
    dist.all_reduce(torch.zeros(1, device=device), group=ranks.data)  # NCCL wants all ranks in a group's first operation
    introduce(ranks, roles)
    return ranks
