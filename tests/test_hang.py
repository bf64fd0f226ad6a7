"""Laws of what a dump says: the state of each thread, which cycles are named, and what is left alone."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing.queues
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers_hang import (
    AOT_AUTOGRAD,
    BACKWARD_HEAD,
    COLLECTIVE,
    COMPILE,
    DEVICE,
    ENGINE,
    HOLDER,
    LOCK_BODY,
    LOCK_HEAD,
    PROGRAM,
    RESTING,
    TRAINER,
    WAITER,
    look_twice,
    snapshot,
    thread,
)
from rich.console import Console

from diagnostics import hang, stacks
from diagnostics.stacks import CannotObserve, Stack, parse
from diagnostics.thread_states import State, classify
from diagnostics.waiting import analyse


@pytest.mark.parametrize(
    ("state", "frames", "active"),
    [
        ("waits for the compile lock", (LOCK_HEAD, PROGRAM), False),
        ("waits for the compile lock", (BACKWARD_HEAD, PROGRAM), False),
        ("compiling", (("f", "/x.py", ""), COMPILE, LOCK_BODY), True),
        ("compiling", (("f", "/x.py", ""), COMPILE, LOCK_BODY), False),
        ("tracing", (("forward", "/x.py", ""), ("Tracer.trace", "/v/site-packages/torch/fx/_symbolic_trace.py", "")), False),
        ("waits in autograd", (ENGINE, PROGRAM), False),
        ("running", (ENGINE, PROGRAM), True),
        ("in a collective", (("all_reduce", "/v/site-packages/torch/distributed/distributed_c10d.py", ""), PROGRAM), False),
        ("synchronises with a device", (("Event.synchronize", "/v/site-packages/torch/cuda/streams.py", ""), PROGRAM), True),
        ("running", (PROGRAM,), True),
        ("running", (("f", "/x.py", ""), ("_TorchDynamoContext.forward", AOT_AUTOGRAD, ""), PROGRAM), True),
        ("idle", (("wait", "/usr/lib/python3.11/threading.py", ""), PROGRAM), False),
        ("idle", (), False),
    ],
)
def test_a_thread_is_what_its_innermost_frames_say(state: State, frames: tuple[tuple[str, str, str], ...], active: bool) -> None:
    (stack,) = parse(json.dumps([thread("t", 1, *frames, active=active)]))
    assert classify(stack).state == state


def test_native_frames_tell_what_python_cannot() -> None:
    native = {"name": "c10d::ProcessGroupGloo::AsyncWork::wait", "filename": "x.cpp", "module": "libtorch.so", "line": 1}
    seen = thread("t", 1, PROGRAM)
    (without,) = parse(json.dumps([seen]))
    seen["frames"].insert(0, native)
    (with_native,) = parse(json.dumps([seen]))
    seen["frames"].insert(0, seen["frames"][1])
    (with_native_caller,) = parse(json.dumps([seen]))
    states = [classify(stack).state for stack in (without, with_native, with_native_caller)]
    assert states == ["idle", "in a collective", "idle"]


@pytest.mark.parametrize("head", ["with lock:", "with self.lock:", "lock.acquire()"])
def test_a_lock_of_the_program_is_told_from_a_queue(tmp_path: Path, head: str) -> None:
    file = tmp_path / "program.py"
    file.write_text(f"{head}\n{'    pass' if head.startswith('with') else ''}\n")
    (stack,) = parse(json.dumps([thread("t", 1, ("f", str(file), head))]))
    assert classify(stack).state == "waits for a lock"


def test_readers_that_take_turns_at_a_queue_are_idle() -> None:
    (stack,) = parse(json.dumps([thread("t", 1, ("Queue.get", multiprocessing.queues.__file__, "with self._rlock:"), PROGRAM)]))
    assert stack.frames[0].line > 1
    assert classify(stack).state == "idle"


def test_the_lock_and_the_device_thread_make_a_deadlock_named_in_plain_words() -> None:
    report = look_twice(HOLDER, DEVICE, TRAINER, WAITER)
    (finding,) = report.findings
    assert finding.id == "F8"
    assert finding.who == ("compiles", "pt_autograd_0")
    assert finding.what == (
        "deadlock: thread compiles (11) holds the compile lock and waits for autograd's device thread pt_autograd_0 (12); "
        "autograd's device thread pt_autograd_0 (12) waits for the compile lock held by thread compiles (11); "
        "behind them wait thread trains (13), thread waits (14)"
    )
    assert "set_multithreading_enabled(False)" in finding.what_to_do


@pytest.mark.parametrize("missing", [0, 1])
def test_half_of_the_cycle_is_no_deadlock(missing: int) -> None:
    others = [each for number, each in enumerate((HOLDER, DEVICE)) if number != missing]
    assert "F8" not in [finding.id for finding in look_twice(*others, TRAINER, WAITER).findings]


def test_a_cycle_in_which_a_thread_moved_is_not_believed() -> None:
    moved = thread("compiles", 11, ENGINE, ("elsewhere", "/x.py", ""), COMPILE, LOCK_BODY, PROGRAM)
    report = analyse(snapshot(moved, DEVICE), snapshot(HOLDER, DEVICE, at_seconds=5.0))
    assert report.findings == ()


def test_a_cycle_is_not_certain_while_another_device_thread_works() -> None:
    before, after = snapshot(HOLDER, DEVICE), snapshot(HOLDER, DEVICE, at_seconds=5.0)
    severities = [
        analyse(
            dataclasses.replace(before, device_cpu_seconds={"pt_autograd_0 (12)": 1.0, "pt_autograd_1 (15)": 1.0}),
            dataclasses.replace(after, device_cpu_seconds={"pt_autograd_0 (12)": 1.0, "pt_autograd_1 (15)": used}),
        )
        .findings[0]
        .severity
        for used in (1.0, 2.0)
    ]
    assert severities == ["error", "hazard"]


def test_a_holder_that_waits_for_the_lock_again_holds_it() -> None:
    (stack,) = parse(json.dumps([thread("t", 1, LOCK_HEAD, COMPILE, LOCK_BODY)]))
    assert classify(stack).holds_compile_lock


def test_a_wait_in_which_nothing_moves_is_a_stall_and_says_where_to_look() -> None:
    (finding,) = look_twice(COLLECTIVE, RESTING).findings
    assert (finding.id, finding.who) == ("stall", ("rank",))
    assert "other ranks" in finding.what_to_do


@pytest.mark.parametrize(
    ("later", "cpu_seconds"),
    [((COLLECTIVE, RESTING), 1.0), ((RESTING,), 0.0), ((COLLECTIVE, thread("new", 3, PROGRAM, active=True)), 0.0)],
)
def test_work_or_nothing_but_idle_threads_is_no_stall(later: tuple[dict[str, Any], ...], cpu_seconds: float) -> None:
    after = snapshot(*later, cpu_seconds=cpu_seconds, at_seconds=5.0)
    assert analyse(snapshot(COLLECTIVE, RESTING), after).findings == ()


def test_source_that_cannot_be_read_is_said() -> None:
    report = look_twice(thread("t", 1, ("_compile", "/gone/torch/_dynamo/convert_frame.py", "")))
    assert "who holds the compile lock may be missed" in report.not_observed[0]


def test_output_of_an_unknown_form_is_an_error_that_shows_it() -> None:
    with pytest.raises(CannotObserve, match=r"printed '\[1\]'.*expected a JSON list of threads"):
        parse("[1]")


def test_missing_rights_are_explained() -> None:
    message = "Permission Denied: Try running again with elevated permissions by going 'sudo env \"PATH=$PATH\" !!'"
    assert "ptrace_scope" in stacks.explain(7, message)
    assert "SYS_PTRACE" in stacks.explain(7, "Error: Failed to suspend process\nReason: Operation not permitted (os error 1)")


def test_a_process_that_is_not_python_is_told_in_plain_words_with_the_pythons_below_it() -> None:
    message = "Error: Failed to find python version from target process\nStack backtrace: 0: anyhow::error 1: py_spy::main"
    shell = ("sh", "-c", f"{sys.executable} -c 'input()'; true")
    with subprocess.Popen(shell, stdin=subprocess.PIPE) as process:
        try:
            while not (below := psutil.Process(process.pid).children()) or "python" not in below[0].name():
                pass
            told = stacks.explain(process.pid, message)
        finally:
            process.communicate()
    assert told.startswith(f"process {process.pid} (sh) is not Python")
    assert f"below it runs Python: {below[0].pid} (-c input())" in told
    assert "py_spy::" not in stacks.explain(process.pid, "Error: no such thing\nBacktrace: 0: py_spy::main")


def test_a_missing_py_spy_is_an_error_that_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotObserve, match="pip install py-spy"):
        stacks.take(1)


def test_a_report_without_findings_says_what_it_cannot_know(capsys: pytest.CaptureFixture[str]) -> None:
    hang.print_report(Console(width=140), look_twice(RESTING))
    printed = " ".join(capsys.readouterr().out.split())
    assert "queues and conditions of the program's own look idle" in printed
    assert "waits in C++ without --native" in printed


def test_a_stack_keeps_only_python_frames_apart() -> None:
    (stack,) = parse(json.dumps([thread("t", 1, PROGRAM)]))
    native = dataclasses.replace(stack.frames[0], native=True)
    assert dataclasses.replace(stack, frames=(native, *stack.frames)).python_frames == stack.frames
    assert isinstance(stack, Stack)
