"""N target threads and M drafter threads of one process.

One life: a target thread claims a micro-batch number, makes its `TargetStates` and puts them; drafter threads take items in
order until the optimizer step has all of its micro-batches; then all drafters meet, the first of them (the leader) finishes
the step alone, and they go on. A failure in any thread ends the run: the queue carries it to the others, the barrier breaks.

`run_threads` starts the threads and stops them: ask, wait, and say which stayed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from dflash import events
from dflash.batch import TargetStates
from dflash.engine.loops import Doing, DrafterWorker, TargetWorker, WorkerTimes, consume, finishing, on_device, target_loop
from dflash.engine.queue import OrderedQueue, WorkerFailed

STOP_SECONDS = 0.7  # how long a failed run waits for the other threads


@dataclass(kw_only=True)
class ThreadsRun:
    """Everything the threads of one run share."""

    targets: Sequence[TargetWorker]
    drafters: Sequence[DrafterWorker]
    queue: OrderedQueue[TargetStates]
    first_step: int
    num_steps: int
    batches_per_step: int
    finish_step: Callable[[int], bool]  # called by the leader with the 0-based step while all wait; False ends the run
    in_worker: Callable[[], AbstractContextManager[None]] = nullcontext  # entered by every thread for its life
    makers: str = "target"  # what the threads that make target states are called
    times: list[WorkerTimes] = field(default_factory=list)
    left_running: list[str] = field(default_factory=list)


def run_threads(run: ThreadsRun) -> None:
    """Run to the end, or until `finish_step` says so.

    Raises:
        WorkerFailed: within a second of the first failure of any thread, with that thread's exception as its cause. Threads
            that are still inside a kernel then are named in `run.left_running`; they are daemons.
    """
    barrier = threading.Barrier(len(run.drafters))
    threads = [_start(run, f"{run.makers}-{i}", w.device, barrier, _target_loop, w) for i, w in enumerate(run.targets)]
    threads += [
        _start(run, f"drafter-{i}", w.device, barrier, _drafter_loop, w, barrier, i == 0) for i, w in enumerate(run.drafters)
    ]
    deadline = None
    while any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(timeout=0.05)
        if run.queue.failure is not None:
            barrier.abort()
            deadline = deadline or time.monotonic() + STOP_SECONDS
            if time.monotonic() > deadline:
                run.left_running = [thread.name for thread in threads if thread.is_alive()]
                break
    if run.queue.failure is not None:
        raise run.queue.failure


def _start(
    run: ThreadsRun,
    name: str,
    device: torch.device,
    barrier: threading.Barrier,
    body: Callable[..., None],
    *arguments: object,
) -> threading.Thread:
    times = WorkerTimes(worker=name, device=str(device))
    run.times.append(times)

    def main() -> None:
        try:
            with on_device(device), run.in_worker():
                body(run, times, *arguments)
        except (WorkerFailed, threading.BrokenBarrierError):
            pass  # somebody else failed; the queue holds the reason
        except BaseException as error:  # noqa: BLE001 - every failure must reach the main thread
            run.queue.fail(name, error)
            barrier.abort()

    thread = threading.Thread(target=main, name=name, daemon=True)
    thread.start()
    return thread


def _target_loop(run: ThreadsRun, times: WorkerTimes, worker: TargetWorker) -> None:
    target_loop(run.queue, times, worker, Doing())


def _drafter_loop(
    run: ThreadsRun,
    times: WorkerTimes,
    worker: DrafterWorker,
    barrier: threading.Barrier,
    is_leader: bool,
) -> None:
    go_on, meets_others = True, barrier.parties > 1
    for step in range(run.first_step, run.num_steps):
        consume(run.queue, times, worker, Doing(), before=(step + 1) * run.batches_per_step, meets_others=meets_others)
        with finishing(times, meets_others=meets_others):
            barrier.wait()
            if is_leader:
                with events.span("drafter.step", step=step):
                    go_on = run.finish_step(step)
                worker.settle()  # the step has waited for the device: what times this worker reads its events now
                if not go_on:
                    run.queue.stop()
            barrier.wait()
        if run.queue.stopped:
            return
