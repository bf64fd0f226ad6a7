"""N target threads and M drafter threads of one process.

One life: a target thread claims a micro-batch number, makes its `TargetStates` and puts them; drafter threads take items in
order until the optimizer step has all of its micro-batches; then all drafters meet, the first of them (the leader) finishes
the step alone, and they go on. A failure in any thread ends the run: the queue carries it to the others, the barrier breaks.

This is the only file of the engine that starts threads; `run_threads` stops them too: ask, wait, and say which stayed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from dflash import events
from dflash.batch import TargetStates
from dflash.engine.queue import OrderedQueue, WorkerFailed

STOP_SECONDS = 0.7  # how long a failed run waits for the other threads


@dataclass(kw_only=True)
class WorkerTimes:
    """What one thread did with its time. Written by that thread only; read after it ended or as a live estimate."""

    worker: str
    device: str
    items: int = 0
    tokens: int = 0
    busy_seconds: float = 0.0
    wait_seconds: float = 0.0  # target: queue full; drafter: queue empty
    sync_seconds: float = 0.0  # drafter: waiting for the others and for the leader


class TargetWorker(Protocol):
    """Makes target states."""

    device: torch.device

    def produce(self, number: int) -> TargetStates:
        """The states of one micro-batch, complete (synchronized) on this worker's device."""


class DrafterWorker(Protocol):
    """Turns target states into gradients."""

    device: torch.device

    def accumulate(self, states: TargetStates) -> None:
        """Forward and backward of one micro-batch; returns when the device is done."""


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
    times: list[WorkerTimes] = field(default_factory=list)
    left_running: list[str] = field(default_factory=list)


def run_threads(run: ThreadsRun) -> None:
    """Run to the end, or until `finish_step` says so.

    Raises:
        WorkerFailed: within a second of the first failure of any thread, with that thread's exception as its cause. Threads
            that are still inside a kernel then are named in `run.left_running`; they are daemons.
    """
    barrier = threading.Barrier(len(run.drafters))
    threads = [_start(run, f"target-{i}", w.device, barrier, _target_loop, w) for i, w in enumerate(run.targets)]
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
            with _on_device(device), run.in_worker():
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
    while True:
        with _timed(times, "wait_seconds"):
            number = run.queue.claim()
        if number is None:
            return
        with _timed(times, "busy_seconds"), events.span("target.forward", number=number):
            states = worker.produce(number)
        times.items += 1
        times.tokens += states.batch.num_tokens
        run.queue.put(number, states)


def _drafter_loop(
    run: ThreadsRun,
    times: WorkerTimes,
    worker: DrafterWorker,
    barrier: threading.Barrier,
    is_leader: bool,
) -> None:
    go_on = True
    for step in range(run.first_step, run.num_steps):
        _consume(run, times, worker, before=(step + 1) * run.batches_per_step)
        with _timed(times, "sync_seconds"):
            barrier.wait()
            if is_leader:
                with events.span("drafter.step", step=step):
                    go_on = run.finish_step(step)
                if not go_on:
                    run.queue.stop()
            barrier.wait()
        if run.queue.stopped:
            return


def _consume(run: ThreadsRun, times: WorkerTimes, worker: DrafterWorker, *, before: int) -> None:
    while True:
        with _timed(times, "wait_seconds"):
            states = run.queue.get(before=before)
        if states is None:
            return
        with _timed(times, "busy_seconds"), events.span("drafter.accumulate", number=states.batch.index):
            worker.accumulate(states)
        times.items += 1
        times.tokens += states.batch.num_tokens


@contextlib.contextmanager
def _timed(times: WorkerTimes, field_name: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        setattr(times, field_name, getattr(times, field_name) + time.perf_counter() - started)


@contextlib.contextmanager
def _on_device(device: torch.device) -> Iterator[None]:
    """A GPU thread gets its device and a stream of its own, so that workers sharing a GPU overlap."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]  # torch does not annotate it
        yield
