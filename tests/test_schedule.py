"""Laws of the scheduler: one thread at a time, exact replays, and failures of torch found, shortened and replayed."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

from diagnostics.stress.scheduler import Choose, Run, Scheduler
from diagnostics.stress.strategies import PCT, Explicit, Random, check_schedule, pct_bound, schedules

ROOT = Path(__file__).parent.parent
STRATEGIES: list[Callable[[int], Choose]] = [
    lambda seed: Random(str(seed)),
    lambda seed: PCT(str(seed), threads=2, steps=6, depth=3),
    lambda seed: Explicit("ba" * seed),
]


def run_counter(choose: Choose) -> tuple[Run, int]:
    """Two threads add 1 to a number by reading and writing it, with a park point between: right only in some orders."""
    number = [0]
    scheduler = Scheduler(choose)

    def add() -> int:
        scheduler.park("before")
        seen = number[0]
        scheduler.park("between")
        number[0] = seen + 1
        return seen

    return scheduler.run([add, add]), number[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_thread_runs_at_a_time(strategy: Callable[[int], Choose]) -> None:
    for seed in range(5):
        inside, most = [0], [0]
        scheduler = Scheduler(strategy(seed))

        def work(inside: list[int] = inside, most: list[int] = most, scheduler: Scheduler = scheduler) -> None:
            for _ in range(2):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                threading.Event().wait(0.001)  # another thread could run now
                inside[0] -= 1
                scheduler.park("x")

        run = scheduler.run([work, work])
        assert (most[0], run.deadlock, sorted(run.schedule)) == (1, (), ["a"] * 3 + ["b"] * 3)


def test_a_schedule_decides_the_result_and_replays_exactly() -> None:
    for schedule, total in (("aaabbb", 2), ("aabbab", 1), ("bbbaaa", 2)):
        runs = [run_counter(Explicit(schedule)) for _ in range(5)]
        assert {(run.schedule, run.places, number) for run, number in runs} == {(schedule, runs[0][0].places, total)}
    assert runs[0][0].places == ("start", "before", "between") * 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_choices_of_any_strategy_are_a_schedule_that_replays(strategy: Callable[[int], Choose]) -> None:
    for seed in range(5):
        run, number = run_counter(strategy(seed))
        again = Explicit(run.schedule)
        assert run_counter(again) == (run, number)
        assert again.skipped == 0


def test_letters_that_cannot_go_on_are_skipped_and_counted() -> None:
    choose = Explicit("aaaaab")
    run, _ = run_counter(choose)
    assert (run.schedule, choose.skipped) == ("aaabbb", 2)


def test_an_exception_of_a_thread_is_its_outcome() -> None:
    def fails() -> None:
        raise KeyError("x")

    run = Scheduler(Explicit("")).run([fails, lambda: 5])
    assert isinstance(run.outcomes[0].error, KeyError)
    assert (run.outcomes[1].result, run.outcomes[1].error) == (5, None)


def test_threads_that_are_not_controlled_pass_park_points() -> None:
    Scheduler(Explicit("")).park("x")


def test_a_thread_that_waits_for_a_parked_one_stalls_nobody() -> None:
    lock = threading.Lock()
    scheduler = Scheduler(Explicit("aab"))
    order = []

    def holds() -> None:
        scheduler.park("x")
        with lock:
            scheduler.park("holding")
            order.append("a")

    def waits() -> None:
        with lock:
            order.append("b")

    run = scheduler.run([holds, waits])
    assert (order, run.schedule, run.deadlock) == (["a", "b"], "aaba", ())


def test_a_deadlock_is_reported_with_stacks() -> None:
    locks = [threading.Lock(), threading.Lock()]
    scheduler = Scheduler(Explicit("ab"), deadlock_seconds=0.2)

    def takes(first: threading.Lock, second: threading.Lock) -> None:
        with first:
            scheduler.park("one lock")
            second.acquire()
            second.release()

    try:
        run = scheduler.run([lambda: takes(*locks), lambda: takes(*reversed(locks))])
    finally:
        for lock in locks:  # let the threads end
            lock.release()
    assert len(run.deadlock) == 2
    assert all("second.acquire()" in stack and "last parked at one lock" in stack for stack in run.deadlock)


def test_pct_switches_at_most_depth_minus_one_times_while_both_can_go_on() -> None:
    for depth in (1, 2, 3):
        most = 0
        for seed in range(30):
            run, _ = run_counter(PCT(str(seed), threads=2, steps=6, depth=depth))
            unfinished = run.schedule[: min(run.schedule.rindex("a"), run.schedule.rindex("b")) + 1]
            most = max(most, sum(one != two for one, two in itertools.pairwise(unfinished)))
        assert most == depth - 1


def test_pct_finds_a_failure_at_least_as_often_as_its_bound() -> None:
    found = sum(run_counter(PCT(str(seed), threads=2, steps=6, depth=2))[1] == 1 for seed in range(100))
    assert found / 100 >= pct_bound(threads=2, steps=6, depth=2) == 1 / 12


def test_hypothesis_makes_a_failing_schedule_minimal() -> None:
    settings = hypothesis.settings(database=None, deadline=None, derandomize=True)
    found = hypothesis.find(schedules(2, max_steps=8), lambda drawn: run_counter(Explicit(drawn))[1] == 1, settings=settings)
    assert found == "aab"


def test_letters_of_no_thread_are_refused() -> None:
    check_schedule("abba", threads=2)
    with pytest.raises(ValueError, match="has c: this scenario has the threads ab"):
        check_schedule("abc", threads=2)


# Runs commands in one process, which imports torch once: searches, and for each the replay that it printed.
DRIVER = """
import contextlib, io, json, shlex
from diagnostics.stress.schedule import main
def run(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = main(arguments)
    return code, output.getvalue()
results = {}
for name in ("F3", "F5"):
    results[name] = run(name, "--seed", "1")
    words = shlex.split(results[name][1].partition("replay: ")[2])
    results["replay " + name] = run(*words[3:], "--tries", "20")
results["clean"] = run("clean", "--tries", "10")
results["first-calls"] = run("first-calls", "--strategy", "explicit", "--schedule", "a" * 99)
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[int, str]]:
    done = subprocess.run((sys.executable, "-c", DRIVER), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    read: dict[str, tuple[int, str]] = json.loads(done.stdout.splitlines()[-1])
    return read


@pytest.mark.parametrize("name", ["F3", "F5"])
def test_a_failure_is_found_shortened_and_replayed_every_time(results: dict[str, tuple[int, str]], name: str) -> None:
    code, output = results[name]
    assert code == 1, output
    words = shlex.split(output.partition("replay: ")[2])
    assert words[:4] == ["python", "-m", "diagnostics.stress.schedule", name]
    made, shortened = (re.findall(rf"{title}: schedule (\w+)", output)[0] for title in ("failed", "shortened"))
    assert words[-1] == shortened
    assert len(shortened) < len(made)
    code, output = results[f"replay {name}"]
    assert code == 1
    assert re.search(rf"^([\w ]+, )*{name}(, [\w ]+)*: 20 of 20$", output, flags=re.MULTILINE), output


def test_threads_stop_at_every_seam(results: dict[str, tuple[int, str]]) -> None:
    reached = {name: set(re.findall("goes on from: (.*)", results[name][1])) for name in ("first-calls", "F3")}
    compiling = {"compiled call", "compile begins", "compile ended", "backward begins", "backward ended"}
    tracing = {"trace begins", "trace has its flag", "trace records call_function", "trace records output", "trace ended"}
    assert reached == {"first-calls": {"start"} | compiling, "F3": {"start"} | tracing}
    assert results["first-calls"][0] == 0


def test_no_order_of_two_compiled_calls_fails(results: dict[str, tuple[int, str]]) -> None:
    assert results["clean"][0] == 0
    assert "no failure of clean in 10 tries" in results["clean"][1]


@pytest.mark.parametrize(
    "arguments", [("F3", "--schedule", "aab"), ("F3", "--strategy", "explicit"), ("F3", "--depth", "0"), ("F99",)]
)
def test_bad_usage_is_refused(arguments: tuple[str, ...]) -> None:
    from diagnostics.stress import schedule  # noqa: PLC0415 - the other laws of this file need no torch

    with pytest.raises(SystemExit) as stop:
        schedule.main(arguments)
    assert stop.value.code == 2
