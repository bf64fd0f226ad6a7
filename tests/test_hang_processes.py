"""Laws of the hang command and of the watch on real processes: idle, ended, interrupted, deadlocked."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_hang import COLLECTIVE, CONVERT_FRAME, LOCK_HEAD, line_of, snapshot

from diagnostics import hang, hang_watch, stacks
from diagnostics.hang_watch import HangWatch
from diagnostics.stacks import NoSuchProcess, Snapshot

ROOT = Path(__file__).parent.parent
IDLE = """
import sys, threading
stop = threading.Event()
threading.Thread(target=stop.wait, name="worker").start()
print("ready", flush=True)
sys.stdin.read()
stop.set()
sys.exit(7)
"""


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
    assert idle.wait() == 7  # left to the parent


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
    report = None
    while report is None:
        report = watch.check()
        time.sleep(0.05)  # the pace of an owner, not a wait for something to happen
    assert [finding.id for finding in report.findings] == ["F8"]
