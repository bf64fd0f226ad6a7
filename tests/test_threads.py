import threading
from dataclasses import dataclass, field

import pytest
import torch

from dflash.batch import PackedBatch, Position, TargetStates
from dflash.engine.queue import OrderedQueue, WorkerFailed
from dflash.engine.threads import ThreadsRun, run_threads

CPU = torch.device("cpu")


def states(number: int) -> TargetStates:
    ones = torch.ones(1, 4, dtype=torch.int64)
    batch = PackedBatch(
        input_ids=ones,
        positions=ones,
        document_ids=ones,
        loss_mask=ones.bool(),
        anchors=ones[:, :1],
        anchor_valid=ones[:, :1].bool(),
        sample_ids=(("a",),),
        index=number,
        position=Position(epoch=0, batch=number),
        num_tokens=3,
    )
    return TargetStates(batch=batch, features=torch.zeros(1, 4, 2))


@dataclass
class Target:
    device: torch.device = CPU
    fail_at: int = -1

    def produce(self, number: int) -> TargetStates:
        if number == self.fail_at:
            raise ValueError(f"row {number} is broken")
        return states(number)


@dataclass
class Drafter:
    device: torch.device = CPU
    fail_at: int = -1
    seen: list[int] = field(default_factory=list)

    def accumulate(self, item: TargetStates) -> None:
        if item.batch.index == self.fail_at:
            raise FloatingPointError(f"micro-batch {item.batch.index}")
        self.seen.append(item.batch.index)

    def settle(self) -> None: ...


def make_run(
    targets: list[Target], drafters: list[Drafter], *, steps: int = 5, per_step: int = 3, first_step: int = 0
) -> ThreadsRun:
    queue: OrderedQueue[TargetStates] = OrderedQueue(capacity=2, first=first_step * per_step, end=steps * per_step)
    return ThreadsRun(
        targets=targets,
        drafters=drafters,
        queue=queue,
        first_step=first_step,
        num_steps=steps,
        batches_per_step=per_step,
        finish_step=lambda _: True,
    )


@pytest.mark.parametrize(("num_targets", "num_drafters"), [(1, 1), (1, 2), (3, 1), (2, 4)])
def test_a_step_sees_exactly_its_micro_batches(num_targets: int, num_drafters: int) -> None:
    drafters = [Drafter() for _ in range(num_drafters)]
    run = make_run([Target() for _ in range(num_targets)], drafters, first_step=1)
    steps: list[tuple[int, list[int]]] = []

    def finish(step: int) -> bool:
        steps.append((step, sorted(index for d in drafters for index in d.seen)))
        return True

    run.finish_step = finish
    run_threads(run)
    assert steps == [(step, list(range(3, 3 * (step + 1)))) for step in range(1, 5)]
    assert sum(times.items for times in run.times if times.worker.startswith("drafter")) == 12
    assert sum(times.tokens for times in run.times if times.worker.startswith("target")) == 12 * 3


def test_only_the_leader_finishes_a_step_while_nobody_accumulates() -> None:
    names: set[str] = set()
    run = make_run([Target()], [Drafter(), Drafter()])

    def finish(_: int) -> bool:
        names.add(threading.current_thread().name)
        return True

    run.finish_step = finish
    run_threads(run)
    assert names == {"drafter-0"}


def test_the_run_ends_early_when_finish_step_says_so() -> None:
    drafters = [Drafter(), Drafter()]
    run = make_run([Target(), Target()], drafters, steps=50)
    run.finish_step = lambda step: step < 6
    run_threads(run)
    assert sorted(index for d in drafters for index in d.seen) == list(range(21))


def test_a_failing_target_ends_the_run_with_its_exception() -> None:
    run = make_run([Target(fail_at=7) for _ in range(3)], [Drafter(), Drafter()])
    with pytest.raises(WorkerFailed, match="row 7 is broken") as caught:
        run_threads(run)
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.worker in {"target-1", "target-2", "target-0"}
    assert not run.left_running


def test_a_failing_drafter_ends_the_run_for_all() -> None:
    run = make_run([Target()], [Drafter(fail_at=4), Drafter(fail_at=4), Drafter(fail_at=4)])
    with pytest.raises(WorkerFailed, match="FloatingPointError: micro-batch 4"):
        run_threads(run)
    assert not run.left_running


def test_a_failing_leader_step_ends_the_run() -> None:
    def finish(step: int) -> bool:
        raise OSError(f"disk full at step {step}")

    run = make_run([Target()], [Drafter(), Drafter()])
    run.finish_step = finish
    with pytest.raises(WorkerFailed, match="drafter-0 failed: OSError: disk full at step 0"):
        run_threads(run)


def test_a_thread_that_does_not_come_back_is_named() -> None:
    release, entered = threading.Event(), threading.Event()

    class Stuck(Drafter):
        def accumulate(self, item: TargetStates) -> None:  # noqa: ARG002 - the worker protocol
            entered.set()
            release.wait(timeout=60)

    class Failing(Target):
        def produce(self, number: int) -> TargetStates:
            if number > 0:
                entered.wait(timeout=60)
                raise ValueError("late")
            return states(number)

    run = make_run([Failing()], [Stuck()])
    with pytest.raises(WorkerFailed, match="late"):
        run_threads(run)
    assert run.left_running == ["drafter-0"]
    release.set()
    for thread in threading.enumerate():
        if thread.name == "drafter-0":
            thread.join(timeout=20)
