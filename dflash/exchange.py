"""What the trainer needs of the engine that runs it, and that of the threads.

A process that leads reports and saves. In threads there is one, with all workers; in processes (`dflash.ranks`) every drafter
has a trainer of its own, makes the same update from the same sums, and the first one leads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from dflash import device_time
from dflash.assembly import Parts
from dflash.batch import TargetStates
from dflash.compile_policy import CompilePolicy
from dflash.config import RunConfig
from dflash.engine.devices import Placement
from dflash.engine.loops import WorkerTimes
from dflash.engine.queue import OrderedQueue, QueueStats
from dflash.engine.threads import ThreadsRun, run_threads
from dflash.engine.waits import Waits
from dflash.fx import seams
from dflash.worker import Contribution

Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class ProcessReport:
    """What one process knows at the end of a run. Filled by `report`; travels to the one that leads."""

    times: tuple[WorkerTimes, ...]
    compiles_in_warmup: int
    graph_runs: int
    recompiles_after_warmup: tuple[str, ...]
    graph_breaks: int
    fallbacks: tuple[str, ...]
    fx_errors: tuple[str, ...]
    peak_memory_bytes: dict[str, int] = field(default_factory=dict)


def report(
    policy: CompilePolicy, times: Sequence[WorkerTimes], devices: Sequence[torch.device], fx_errors: Sequence[str] = ()
) -> ProcessReport:
    """The report of this process."""
    counts = policy.report()
    found = [*fx_errors, *(leak for leak in seams.leaks(seams.tracing_state()) if leak not in fx_errors)]
    gpus = sorted({device for device in devices if device.type == "cuda"}, key=str)
    return ProcessReport(
        times=tuple(times),
        compiles_in_warmup=counts.compiles_in_warmup,
        graph_runs=counts.graph_runs,
        recompiles_after_warmup=counts.recompiles_after_warmup,
        graph_breaks=counts.graph_breaks,
        fallbacks=counts.fallbacks,
        fx_errors=tuple(found),
        peak_memory_bytes={str(device): torch.cuda.max_memory_allocated(device) for device in gpus},
    )


class Engine(Protocol):
    """The workers of a run, as the trainer sees them."""

    leads: bool
    devices: list[str]  # of all workers, targets first
    num_devices: int
    num_targets: int
    num_drafters: int
    workers_here: int  # on the machine of this process

    def states_to_warm_up(self, number: int) -> TargetStates:
        """The states of a training micro-batch."""

    def validation_states(self) -> list[TargetStates]:
        """The states of the held-out micro-batches, where this process leads."""

    def share_weights(self) -> None:
        """Give the leader's weights to all drafters."""

    def collect(self, step: int) -> list[Contribution]:
        """What all drafters have added to the step, in the order of the micro-batches."""

    def after_update(self) -> None:
        """Bring the other drafters' weights to what the update made of the leader's."""

    def verify_weights(self) -> None:
        """Raise RuntimeError where drafters that should be equal are not."""

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process with a trainer."""

    def slow(self, what: str) -> Any:
        """A block that may take longer than a step: no hang."""

    def run(self, first_step: int, finish_step: Callable[[int], bool]) -> None:
        """Run the workers to the end, or until `finish_step` returns False."""

    def times(self) -> Sequence[WorkerTimes]:
        """What the workers of this process did so far."""

    def all_times(self) -> Sequence[WorkerTimes]:
        """What the workers of all processes did, as far as this one knows now."""

    def queue_stats(self) -> QueueStats:
        """Of the queue in front of this process's drafters."""

    def waits(self) -> Waits | None:
        """Who waited for whom lately, where this process leads and knows the others."""

    def gather(self, own: ProcessReport) -> list[ProcessReport] | None:
        """The reports of all processes, where this one leads."""


class ThreadsEngine:
    """All workers as threads of this process."""

    leads = True

    def __init__(self, config: RunConfig, placement: Placement, parts: Parts, policy: CompilePolicy) -> None:
        self._config, self._parts = config, parts
        self.devices = [str(device) for device in (*placement.targets, *placement.drafters)]
        self.num_devices = placement.num_devices
        self.num_targets, self.num_drafters = len(placement.targets), len(placement.drafters)
        self.workers_here = len(self.devices)
        self._policy = policy
        self._run: ThreadsRun | None = None

    def states_to_warm_up(self, number: int) -> TargetStates:
        """See Engine; the other targets run once as well."""
        for target in self._parts.targets[1:]:
            target.produce(0)
        return self._parts.targets[0].produce(number)

    def validation_states(self) -> list[TargetStates]:
        """See Engine."""
        return self._parts.validation_states()

    def share_weights(self) -> None:
        """See Engine."""
        leader, *others = self._parts.drafters
        for drafter in others:
            drafter.flat.weights.copy_(leader.flat.weights)
            drafter.flat.refresh()
        for device in {d.device for d in self._parts.drafters if d.device.type == "cuda"}:
            torch.cuda.synchronize(device)  # the others' streams do not wait for the leader's

    def collect(self, step: int) -> list[Contribution]:  # noqa: ARG002 - the drafters have only those of this step
        """See Engine."""
        parts = (part for drafter in self._parts.drafters for part in drafter.take_contributions())
        return sorted(parts, key=lambda part: part.first_index)

    def after_update(self) -> None:
        """See Engine."""
        if len(self._parts.drafters) > 1:
            self.share_weights()

    def verify_weights(self) -> None:
        """See Engine; they are copies."""

    def any(self, flag: bool) -> bool:
        """See Engine."""
        return flag

    def slow(self, what: str) -> Any:  # noqa: ARG002 - nobody looks
        """See Engine."""
        return contextlib.nullcontext()

    def run(self, first_step: int, finish_step: Callable[[int], bool]) -> None:
        """See Engine."""
        optim, per_step = self._config.optim, self._config.optim.batches_per_step
        self._run = ThreadsRun(
            targets=device_time.timed_targets(self._parts.targets, self._config.measure),
            drafters=device_time.timed_drafters(self._parts.drafters, self._config.measure),
            queue=OrderedQueue(
                capacity=self._config.telemetry.queue_items, first=first_step * per_step, end=optim.steps * per_step
            ),
            first_step=first_step,
            num_steps=optim.steps,
            batches_per_step=per_step,
            finish_step=finish_step,
            in_worker=self._policy.in_worker,
            makers="target" if self._config.data.features is None else "reader",
        )
        run_threads(self._run)

    def times(self) -> Sequence[WorkerTimes]:
        """See Engine."""
        return self._run.times if self._run else []

    def all_times(self) -> Sequence[WorkerTimes]:
        """See Engine."""
        return self.times()

    def queue_stats(self) -> QueueStats:
        """See Engine."""
        assert self._run is not None
        return self._run.queue.stats()

    def waits(self) -> Waits | None:
        """See Engine; threads take what comes next from any target, so that none is waited for."""
        return None

    def gather(self, own: ProcessReport) -> list[ProcessReport] | None:
        """See Engine."""
        return [own]
