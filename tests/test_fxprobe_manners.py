"""Laws of running a program under fxprobe: which processes are seen, how it may end, and that it is left as it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import psutil
import pytest
from helpers_fxprobe import HAZARD, ROOT, TRACE, Run, pipe_that_opens_after

from diagnostics import journal, session
from diagnostics.waiting import HangReport


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    return Run(tmp_path, capfd)


def test_every_kind_of_child_is_observed_and_nothing_is_told_twice(run: Run) -> None:
    code = run(
        f"""
        import multiprocessing, os, subprocess, sys, torch
        def child(queue):
            {TRACE}
            queue.put(1)
        if __name__ == "__main__":
            {TRACE}
            for method in ("fork", "spawn"):
                context = multiprocessing.get_context(method)
                queue = context.Queue()
                process = context.Process(target=child, args=(queue,))
                process.start()
                queue.get()
                process.join()
            if os.fork() == 0:
                {TRACE}
                os._exit(0)
            os.wait()
            subprocess.run([sys.executable, "-c", "import torch; {TRACE}"], check=True)
        """
    )
    assert (code, run.found, run.traced()) == (0, [], [1] * 5)
    assert sum("ended without its exit handlers" in note for note in run.report["notes"]) == 1  # os._exit


def test_torchrun_workers_are_told_apart_by_rank(run: Run) -> None:
    code = run(
        f"""
        import os, torch
        {TRACE}
        if os.environ["RANK"] == "1":
            exec({textwrap.dedent(HAZARD)!r})
        """,
        before=("torchrun", "--nproc-per-node", "2", "--master-port", "0"),
    )
    assert (code, run.found) == (3, [("hazard", "F4")])
    assert run.report["findings"][0]["process"].startswith("rank 1 ")
    assert {process["rank"] for process in run.report["processes"]} == {None, "0", "1"}  # None: torchrun itself


def test_a_sudden_end_keeps_what_was_seen_and_is_told(run: Run) -> None:
    code = run(
        """
        import os, signal, threading, torch
        class Calls(torch.nn.Module):
            def forward(self, x):
                thread = threading.Thread(target=call, name="innocent")
                thread.start()
                thread.join()
                return x
        def call():
            try:
                torch.nn.Linear(1, 1)(torch.ones(1))
            except NameError:
                pass
        child = os.fork()
        torch.fx.symbolic_trace(Calls())
        if child == 0:
            os._exit(5)
        os.wait()
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert (code, run.found, run.report["findings"][0]["count"]) == (137, [("error", "F3")], 2)
    assert sum("ended without its exit handlers" in note for note in run.report["notes"]) == 2
    assert any("ended by SIGKILL" in note for note in run.report["notes"])


def test_a_program_without_torch_was_not_observed(run: Run) -> None:
    assert run("print('hello')") == 3
    assert run.stdout == "hello\n"
    assert "no process of the program imported torch" in run.stderr


def pipe_of_the_first_look_at(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pipe that a program can read from once fxprobe has seen a process with `word` in its command."""
    monkeypatch.setattr(session, "_UNSEEN_AFTER_SECONDS", 0.0)
    return pipe_that_opens_after(
        "look", lambda it: any(word in command for command in it._python.values()), tmp_path, monkeypatch
    )


def test_a_child_that_cannot_be_watched_is_said(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = pipe_of_the_first_look_at("-E -c", tmp_path, monkeypatch)
    code = run(
        f"""
        import subprocess, sys, torch
        child = subprocess.Popen([sys.executable, "-E", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        open({str(seen)!r}).read()
        child.communicate()
        """
    )
    assert code == 3
    assert "a Python process without our environment: -E -c" in run.stderr


def test_compile_workers_of_inductor_run_nothing_of_the_program(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = pipe_of_the_first_look_at("compile_worker", tmp_path, monkeypatch)
    code = run(
        f"""
        import torch
        from torch._inductor.compile_worker.subproc_pool import SubprocPool
        pool = SubprocPool(1)
        open({str(seen)!r}).read()
        pool.shutdown()
        """
    )
    assert code == 0
    assert "compile workers of Inductor were not watched" in run.stderr


def test_a_journal_that_cannot_be_written_is_said_once_and_the_program_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_file: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal, "_write", full)
    lost = journal.Journal(str(tmp_path))
    lost.torch("2.13.0")
    lost.end()
    assert capfd.readouterr().err.count("is lost from here: [Errno 28] No space left on device") == 1


def test_the_environments_own_sitecustomize_runs_and_its_absence_is_no_error(run: Run, tmp_path: Path) -> None:
    assert run("import sys; print('inject' in str(sys.path), 'sitecustomize' in sys.modules)") == 3
    assert (run.stdout, "sitecustomize" in run.stderr) == ("False False\n", False)
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('own')\n")
    monkeypatched = os.environ | {"PYTHONPATH": str(own)}
    command = (sys.executable, "-m", "diagnostics.fxprobe", "--", str(tmp_path / "program.py"))
    shown = subprocess.run(command, cwd=ROOT, env=monkeypatched, capture_output=True, text=True, check=False).stdout
    assert shown == "own\nown\nFalse True\n"  # once in the command, once in the program


def test_a_clean_program_has_exit_code_0_in_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(f"import torch; {TRACE}")
    command = (sys.executable, "-m", "diagnostics.fxprobe", "--", str(tmp_path / "program.py"))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd="/proc", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 process with torch" in done.stderr


def test_a_program_that_observes_itself_is_observed_as_well(run: Run) -> None:
    code = run(
        f"""
        import torch
        from diagnostics.observe import observed
        with observed() as log:
            {TRACE}
        print([seen.count for seen in log.observations()])
        {TRACE}
        """
    )
    assert (code, run.stdout, run.traced()) == (0, "[1]\n", [2])


def test_the_page_says_what_the_terminal_says_and_escapes_the_program(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    run(
        """
        import torch
        torch.compiler.set_stance("force_eager")
        exec(compile("torch.fx.symbolic_trace(torch.nn.Identity())", "<b>here</b>", "exec"))
        """,
        options=("--html", str(page)),
    )
    text = page.read_text()
    assert "info stance" in text.replace("</b>", "").replace("<b>", "")
    assert "&lt;b&gt;here&lt;/b&gt;" in text
    assert "<script" not in text


def test_a_closed_standard_error_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(f"import torch; {TRACE}; print('done')")
    command = f"{sys.executable} -m diagnostics.fxprobe --progress 0.2 --json {tmp_path}/r.json -- {tmp_path}/program.py 2>&-"
    done = subprocess.run(command, shell=True, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert json.loads((tmp_path / "r.json").read_text())["program_exit_code"] == 0


def test_a_reader_of_standard_error_that_goes_away_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print('done')")
    reader, writer = os.pipe()
    os.close(reader)
    probe = (sys.executable, "-m", "diagnostics.fxprobe", "--progress", "0", "--json", str(tmp_path / "r.json"))
    command = (*probe, "--", str(tmp_path / "program.py"))
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=writer, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stdout) == (3, "done\n")  # nothing imported torch
    assert json.loads((tmp_path / "r.json").read_text())["program_exit_code"] == 0


def test_a_program_that_nobody_watches_any_more_is_ended(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[psutil.Process] = []

    def breaks(_watcher: object, pid: int) -> None:
        started.append(psutil.Process(pid))
        raise ZeroDivisionError("a defect of ours")

    monkeypatch.setattr(session._Watcher, "look", breaks)
    with pytest.raises(ZeroDivisionError):
        run("import signal; signal.pause()")
    assert not started[0].is_running()


@pytest.mark.parametrize("went_on", [True, False])
def test_stacks_that_could_not_be_read_matter_only_if_the_process_never_went_on(tmp_path: Path, went_on: bool) -> None:
    left = journal.Journal(str(tmp_path))
    left.torch("2.13.0")
    if went_on:
        left.end()
    watcher = session._Watcher(tmp_path, 0.0, 60.0)
    failed = HangReport(pid=os.getpid(), still_seconds=60.0, not_observed=("py-spy gave no answer",))
    watcher._check_hang(types.SimpleNamespace(check=lambda: failed))
    outcome = watcher.outcome(0, seconds=100.0)
    assert (outcome.not_observed == ()) == went_on
    told = outcome.notes if went_on else outcome.not_observed
    assert any("py-spy gave no answer" in sentence for sentence in told)


@pytest.mark.parametrize("to_group", [True, False])
def test_a_signal_reaches_the_program_once(tmp_path: Path, to_group: bool) -> None:
    (tmp_path / "program.py").write_text(
        "import signal, sys\n"
        "for number in (signal.SIGUSR1, signal.SIGUSR2):\n"
        "    signal.signal(number, lambda number, _: print(signal.Signals(number).name, flush=True))\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = (sys.executable, "-m", "diagnostics.fxprobe", "--progress", "0", "--", str(tmp_path / "program.py"))
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as probe:
        assert probe.stdin is not None
        assert probe.stdout is not None
        assert probe.stdout.readline() == "ready\n"
        (os.killpg if to_group else os.kill)(probe.pid, signal.SIGUSR1)
        assert probe.stdout.readline() == "SIGUSR1\n"
        os.kill(probe.pid, signal.SIGUSR2)  # passed on after everything that came before it
        assert probe.stdout.readline() == "SIGUSR2\n"
        rest, _ = probe.communicate()
    assert (rest, probe.returncode) == ("", 3)


def test_a_program_with_modules_of_our_names_gets_its_own_and_is_observed(run: Run, tmp_path: Path) -> None:
    (tmp_path / "diagnostics.py").write_text("name = 'theirs'\n")
    (tmp_path / "dflash").mkdir()
    (tmp_path / "dflash" / "__init__.py").write_text("name = 'theirs, too'\n")
    code = run(
        f"""
        import diagnostics
        import torch
        import dflash, os, subprocess, sys
        print(diagnostics.name, dflash.name, sys.modules["diagnostics"] is diagnostics, flush=True)
        {TRACE}
        if os.fork() == 0:
            {TRACE}
            sys.exit()
        os.wait()
        subprocess.run([sys.executable, "-c", "import torch, diagnostics; print(diagnostics.name); {TRACE}"], check=True,
                       cwd=os.path.dirname(__file__))
        """
    )
    assert (code, run.stdout) == (0, "theirs theirs, too True\ntheirs\n")
    assert (run.traced(), run.report["not_observed"]) == ([1, 1, 1], [])


@pytest.mark.parametrize("options", [("--stall", "nan"), ("--progress", "-1"), ("--json", "/"), ("--html", "/no/such/place")])
def test_an_option_that_cannot_work_is_refused_at_the_start(run: Run, options: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as stop:
        run("print('must not run')", options=options)
    assert stop.value.code == 2
