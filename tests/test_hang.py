"""Laws of the hang command: what a dump says about each thread, which cycles are named, and what is left alone."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import multiprocessing.queues
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from diagnostics import hang, hang_watch, stacks
from diagnostics.hang_watch import HangWatch
from diagnostics.stacks import CannotObserve, NoSuchProcess, Snapshot, Stack, parse
from diagnostics.thread_states import State, classify
from diagnostics.waiting import HangReport, analyse

ROOT = Path(__file__).parent.parent
LIMIT_SECONDS = 60.0
IDLE = """
import sys, threading
stop = threading.Event()
threading.Thread(target=stop.wait, name="worker").start()
print("ready", flush=True)
sys.stdin.read()
stop.set()
sys.exit(7)
"""


def torch_file(name: str) -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / name


CONVERT_FRAME = torch_file("_dynamo/convert_frame.py")
ENGINE = ("_engine_run_backward", str(torch_file("autograd/graph.py")), "return Variable._execution_engine.run_backward(")
COMPILE = ("ConvertFrame._compile", str(CONVERT_FRAME), "def _compile(")
LOCK_HEAD = ("__call__", str(CONVERT_FRAME), "with compile_lock, _disable_current_modes():")
LOCK_BODY = ("__call__", str(CONVERT_FRAME), "frame, cache_entry, self.hooks, frame_state, skip=1")
BACKWARD_HEAD = ("compile_fx_backward", str(torch_file("_inductor/compile_fx.py")), "with compile_lock:")
AOT_AUTOGRAD = "/v/site-packages/torch/_functorch/aot_autograd.py"
PROGRAM = ("step", "/home/me/train.py", "")


def line_of(file: str, text: str) -> int:
    """The number of the last line of a real source file that holds `text`, so that the test follows torch."""
    lines = Path(file).read_text().splitlines() if text else []
    return max((number for number, line in enumerate(lines, 1) if text in line), default=1)


def thread(name: str | None, number: int, *frames: tuple[str, str, str], active: bool = False) -> dict[str, Any]:
    """One thread as py-spy prints it, the innermost frame first."""
    return {
        "pid": 1, "thread_id": number * 1000, "thread_name": name, "os_thread_id": number, "active": active, "owns_gil": False,
        "frames": [
            {"name": function, "filename": file, "module": None, "short_filename": Path(file).name, "line": line_of(file, text),
             "locals": None, "is_entry": False}
            for function, file, text in frames
        ],
    }  # fmt: skip


def snapshot(*threads: dict[str, Any], cpu_seconds: float = 0.0, at_seconds: float = 0.0) -> Snapshot:
    return Snapshot(pid=1, stacks=parse(json.dumps(threads)), cpu_seconds=cpu_seconds, at_seconds=at_seconds)


def look_twice(*threads: dict[str, Any]) -> HangReport:
    return analyse(snapshot(*threads), snapshot(*threads, at_seconds=5.0))


HOLDER = thread("compiles", 11, ENGINE, COMPILE, LOCK_BODY, PROGRAM)
DEVICE = thread("pt_autograd_0", 12, LOCK_HEAD, ("backward", "/home/me/train.py", ""))
TRAINER = thread("trains", 13, ENGINE, PROGRAM)
WAITER = thread("waits", 14, LOCK_HEAD, PROGRAM)


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


COLLECTIVE = thread("rank", 1, ("barrier", "/v/site-packages/torch/distributed/distributed_c10d.py", ""), PROGRAM)
RESTING = thread("queue", 2, ("wait", "/usr/lib/python3.11/threading.py", ""), PROGRAM)


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


@pytest.fixture
def idle() -> Iterator[subprocess.Popen[str]]:
    with child("-c", IDLE) as process:
        yield process
        process.kill()


def child(*arguments: str) -> subprocess.Popen[str]:
    """A Python process that has printed one line."""
    process = subprocess.Popen(
        (sys.executable, *arguments), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    assert process.stdout is not None
    assert process.stdout.readline(), "the child ended before it was ready: its error is on standard error"
    return process


def test_a_process_that_is_merely_idle_is_not_stuck(idle: subprocess.Popen[str]) -> None:
    report = hang.inspect(idle.pid, seconds=0.5)
    assert [(each.name, each.state) for each in report.threads] == [("MainThread", "idle"), ("worker", "idle")]
    assert not report.stuck


def test_a_main_thread_that_never_imported_threading_has_its_name() -> None:
    with child("-c", "import sys; print(1, flush=True); sys.stdin.read()") as process:
        try:
            assert [each.name for each in hang.inspect(process.pid, seconds=0.1).threads] == ["MainThread"]
        finally:
            process.kill()


def test_a_watch_ends_with_the_process(
    idle: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = 0

    def take(pid: int, *, native: bool) -> Snapshot:
        nonlocal looks
        looks += 1
        seen = stacks.take(pid, native=native)
        if looks == 3:
            assert idle.stdin is not None
            idle.stdin.close()
        return seen

    monkeypatch.setattr(hang, "take", take)
    assert hang.main([str(idle.pid), "--watch", "0.2"]) == 0
    assert f"process {idle.pid} has ended" in capsys.readouterr().out
    assert idle.wait(LIMIT_SECONDS) == 7  # left to the parent


def test_an_interrupted_watch_shows_the_last_state(
    idle: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter((stacks.take, stacks.take))

    def take(pid: int, *, native: bool) -> Snapshot:
        look = next(looks, None)
        if look is None:
            raise KeyboardInterrupt
        return look(pid, native=native)

    monkeypatch.setattr(hang, "take", take)
    assert hang.main([str(idle.pid), "--watch", "0.2"]) == 0
    printed = capsys.readouterr().out
    assert "interrupted" in printed
    assert "worker" in printed


def test_a_process_that_does_not_exist_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen((sys.executable, "-c", "")) as ended:
        pass
    assert hang.main([str(ended.pid)]) == 2
    assert f"there is no process {ended.pid}" in capsys.readouterr().err
    with pytest.raises(NoSuchProcess):
        hang.inspect(ended.pid)


def test_a_process_that_is_not_python_is_not_observed(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(("sleep", "600")) as process:
        try:
            assert hang.main([str(process.pid)]) == 3
        finally:
            process.kill()
    assert "is not Python" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["0"], ["1", "--watch", "0"], ["1", "--watch", "nan"], ["1", "--json", "/no/such/place"]])
def test_bad_usage_has_exit_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        hang.main(arguments)
    assert end.value.code == 2


def test_a_process_at_rest_is_looked_at_once_until_it_works_again(monkeypatch: pytest.MonkeyPatch) -> None:
    used, looks = 0.0, 0

    def take(_pid: int) -> Snapshot:
        nonlocal looks
        looks += 1
        return snapshot(COLLECTIVE, at_seconds=time.monotonic())

    monkeypatch.setattr(hang_watch, "cpu_seconds", lambda _pid: used)
    monkeypatch.setattr(hang_watch, "_threads", lambda _pid: 2)
    monkeypatch.setattr(hang_watch, "take", take)
    watch = HangWatch(lambda: [1], stall_seconds=1e-9)
    reports = [watch.check() for _ in range(5)]
    assert [report.stuck for report in reports if report] == [True]
    used = 1.0
    reports = [watch.check() for _ in range(5)]
    assert [report.stuck for report in reports if report] == [True]
    assert looks == 2


def test_a_process_of_one_thread_and_one_that_works_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter(range(100))
    monkeypatch.setattr(hang_watch, "cpu_seconds", lambda pid: float(next(used)) if pid == 1 else 0.0)
    monkeypatch.setattr(hang_watch, "_threads", lambda pid: 2 if pid == 1 else 1)
    monkeypatch.setattr(hang_watch, "take", lambda _pid: pytest.fail("looked"))
    watch = HangWatch(lambda: [1, 2], stall_seconds=1e-9)
    assert [watch.check() for _ in range(20)] == [None] * 20


def test_a_watch_needs_a_time() -> None:
    with pytest.raises(ValueError, match="expected seconds above 0"):
        HangWatch(list, stall_seconds=0.0)


@pytest.fixture(scope="module")
def deadlocked() -> Iterator[subprocess.Popen[str]]:
    with child("tests/programs/deadlock.py") as process:
        yield process
        process.kill()


def test_a_real_deadlock_is_named_with_what_to_do(
    deadlocked: subprocess.Popen[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    # The thread has said that it is about to block, not that it has blocked: so watch.
    assert hang.main([str(deadlocked.pid), "--watch", "0.5", "--json", str(file)]) == 1
    report = json.loads(file.read_text())
    (finding,) = report["findings"]
    assert (finding["id"], finding["severity"], finding["who"][0], report["stuck"]) == ("F8", "error", "compiles", True)
    states = {each["name"]: each["state"] for each in report["threads"]}
    assert states["compiles"] == states["trains"] == "waits in autograd"
    (device,) = [each for each in report["threads"] if each["device_thread"] and each["in_python"]]
    assert (device["state"], device["name"]) == ("waits for the compile lock", finding["who"][1])
    device_threads = stacks.take(deadlocked.pid).device_cpu_seconds
    assert f"{device['name']} ({device['native_id']})" in device_threads
    printed = " ".join(capsys.readouterr().out.split())
    assert "holds the compile lock and waits for autograd's device thread" in printed
    assert "what to do: Kill the process" in printed
    assert (
        device["at"] == f"torch/_dynamo/convert_frame.py:{line_of(str(CONVERT_FRAME), LOCK_HEAD[2])} CatchErrorsWrapper.__call__"
    )


def test_a_process_of_ones_own_that_hangs_is_noticed(deadlocked: subprocess.Popen[str]) -> None:
    watch = HangWatch(lambda: [deadlocked.pid], stall_seconds=0.5)
    end_seconds = time.monotonic() + LIMIT_SECONDS
    report = None
    while report is None and time.monotonic() < end_seconds:
        report = watch.check()
        time.sleep(0.05)  # the pace of an owner, not a wait for something to happen
    assert report is not None
    assert [finding.id for finding in report.findings] == ["F8"]


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
