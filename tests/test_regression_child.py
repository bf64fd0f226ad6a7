"""Laws of running a command in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from regression import child
from regression.child import HERE, ChildFailed, Place, run_json, run_to_success


def run(code: str, directory: Path, *, timeout_seconds: float = 60.0, place: Place = HERE) -> child.ChildResult:
    command = (sys.executable, "-c", textwrap.dedent(code))
    return run_json(command, log=directory / "stderr.log", timeout_seconds=timeout_seconds, place=place)


def test_the_last_line_of_standard_output_is_the_result(tmp_path: Path) -> None:
    done = run("import sys; print('{}'); print('noise', file=sys.stderr); print('{\"tokens\": 3}')", tmp_path)
    assert (done.result, done.returncode, done.stderr_tail) == ({"tokens": 3}, 0, "noise")


def test_a_failing_exit_code_with_a_result_is_a_result(tmp_path: Path) -> None:
    done = run("import sys; print('{\"fx_errors\": 1}'); sys.exit(1)", tmp_path)
    assert (done.result, done.returncode) == ({"fx_errors": 1}, 1)


@pytest.mark.parametrize("output", ["", "no json", "[1]", '{"torn": ', '{"a": 1}\nafter'])
def test_no_object_on_the_last_line_is_a_failure_that_shows_standard_error(tmp_path: Path, output: str) -> None:
    with pytest.raises(ChildFailed, match=r"exit code 0 and no JSON(.|\n)*the reason"):
        run(f"import sys; print({output!r}, end=''); print('the reason', file=sys.stderr)", tmp_path)


def test_a_step_that_must_succeed_needs_no_result_but_exit_code_0(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run_to_success((sys.executable, "-c", "pass"), log=log, timeout_seconds=60.0)
    with pytest.raises(ChildFailed, match=r"exit code 3(.|\n)*why"):
        run_to_success(
            (sys.executable, "-c", "import sys; print('{}'); sys.stderr.write('why'); sys.exit(3)"), log=log, timeout_seconds=60.0
        )


def test_much_standard_error_blocks_nobody_and_its_end_is_kept(tmp_path: Path) -> None:
    done = run("import sys; sys.stderr.write('line\\n' * 200_000 + 'last\\n'); print('{}')", tmp_path)
    assert done.stderr_tail.splitlines()[-1] == "last"
    assert (tmp_path / "stderr.log").stat().st_size == 1_000_005


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def ready(pipe: Path, said: list[str]) -> Place:
    """The time of a child begins when it has written to `pipe`, which is then in `said`."""
    os.mkfifo(pipe)
    return Place(started=lambda _: said.append(pipe.read_text()))


def test_a_hanging_child_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_GRACE_SECONDS", 0.5)
    said: list[str] = []
    code = f"""
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # and so does what it starts
        grandchild = subprocess.Popen((sys.executable, "-c", "import time; time.sleep(60)"), stdout=subprocess.DEVNULL)
        open({str(tmp_path / "pid")!r}, "w").write(str(grandchild.pid))
        time.sleep(60)
        """
    with pytest.raises(ChildFailed, match="did not end within 1 s and was killed"):
        run(code, tmp_path, timeout_seconds=1.0, place=ready(tmp_path / "pid", said))
    grandchild = int(said[0])
    assert psutil.wait_procs([psutil.Process(grandchild)] if alive(grandchild) else [], timeout=20)[1] == []


def test_a_child_that_listens_is_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_GRACE_SECONDS", 600.0)
    code = f"""
        import pathlib, signal, sys, time
        def asked(*_):
            pathlib.Path({str(tmp_path / "asked")!r}).touch()
            sys.exit(0)
        signal.signal(signal.SIGTERM, asked)
        pathlib.Path({str(tmp_path / "ready")!r}).write_text("")
        time.sleep(60)
        """
    with pytest.raises(ChildFailed, match="was ended by SIGTERM"):
        run(code, tmp_path, timeout_seconds=0.1, place=ready(tmp_path / "ready", []))
    assert (tmp_path / "asked").exists()


def test_a_child_has_its_own_process_group(tmp_path: Path) -> None:
    done = run("import os, json; print(json.dumps({'group': os.getpgid(0)}))", tmp_path)
    assert done.result["group"] != os.getpgid(0)


def test_a_held_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    code = """
        import pathlib, signal, sys, time
        from regression.child import Running
        with Running.started((sys.executable, "-c", "import time; time.sleep(600)"), log=pathlib.Path(sys.argv[1])) as running:
            running.send(signal.SIGSTOP)
            print(running._process.pid, flush=True)
            time.sleep(600)
        """
    command = (sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "log"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    assert psutil.wait_procs([child], timeout=20)[1] == []
