"""Laws of one trial and of the journal: a command ends with all that it started, and nothing that was tried is lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from diagnostics.bisection import trials, venvs
from diagnostics.bisection.logbook import Logbook
from diagnostics.bisection.outcomes import BadInput, Trial
from diagnostics.bisection.trials import Command, variables_of

DONE = Trial(returncode=0, figure=None, seconds=0.1)


def test_what_was_tried_is_there_again_and_a_cut_off_line_is_not(tmp_path: Path) -> None:
    with Logbook(tmp_path, {"asked": 1}) as book:
        book.add_trial("ends", "x", 0, DONE)
        book.add_unbuildable("k", "why")
    with book.path.open("a") as file:
        file.write('{"kind": "trial", "sta')
    with Logbook(tmp_path, {"asked": 1}) as again:
        assert (again.trials, again.unbuildable) == ({("ends", "x", 0): DONE}, {"k": "why"})
        assert "cut off" in again.notes[0]
        again.add_trial("ends", "x", 1, DONE)
    with Logbook(tmp_path, {"asked": 1}) as last:
        assert len(last.trials) == 2


@pytest.mark.parametrize(
    "line", ["{", "[" * 100_000, "[]", '{"kind": "trial"}', '{"kind": "new"}', '{"kind": "question", "asked": 2}']
)
def test_a_damaged_journal_is_refused_and_left_as_it_is_until_told_otherwise(tmp_path: Path, line: str) -> None:
    with Logbook(tmp_path, {"asked": 1}) as book:
        pass
    with book.path.open("a") as file:
        file.write(line + "\n")
    before = book.path.read_bytes()
    with pytest.raises(BadInput, match=r"damaged.*--fresh"), Logbook(tmp_path, {"asked": 1}):
        pass
    assert book.path.read_bytes() == before
    with Logbook(tmp_path, {"asked": 1}, fresh=True) as anew:
        assert anew.trials == {}


def test_a_journal_of_another_question_or_in_use_is_refused(tmp_path: Path) -> None:
    with Logbook(tmp_path, {"asked": 1}), pytest.raises(BadInput, match="running already"), Logbook(tmp_path, {"asked": 1}):
        pass
    with pytest.raises(BadInput, match="another question"), Logbook(tmp_path, {"asked": 2}):
        pass


def test_a_command_that_outlived_its_bisection_is_ended(tmp_path: Path) -> None:
    process = subprocess.Popen(("sleep", "300"), start_new_session=True)
    try:
        with Logbook(tmp_path, {}) as book:
            book.started(process.pid)
        with Logbook(tmp_path, {}) as again:
            assert f"ended process {process.pid}" in again.notes[0]
        assert process.wait(60) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


INSTALLS = """
import sys
from pathlib import Path
from diagnostics.bisection import venvs
with venvs._locked(Path(sys.argv[1])) as held:
    venvs._run(["sh", "-c", "echo begun > begun; cat end"], held)
"""


def test_an_installer_that_outlived_its_bisection_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("begun", "end"):
        os.mkfifo(tmp_path / name)
    program, path = (sys.executable, "-c", INSTALLS, "key.lock"), {"PYTHONPATH": str(Path.cwd())}
    bisection = subprocess.Popen(program, cwd=tmp_path, env={**os.environ, **path})
    (tmp_path / "begun").read_text()  # the installer runs
    bisection.kill()
    bisection.wait(60)
    told: list[str] = []

    def release(text: str) -> None:
        told.append(text)
        (tmp_path / "end").write_text("now")

    monkeypatch.setattr(venvs, "say", release)
    with venvs._locked(tmp_path / "key.lock"):
        pass
    if not told:
        (tmp_path / "end").write_text("now")
    assert ["waits until another installer is done" in text for text in told] == [True]


def run_command(
    tmp_path: Path,
    script: str,
    *,
    metric: str | None = None,
    timeout_seconds: float | None = None,
    started: Callable[[int], object] = id,
) -> Trial:
    found = re.compile(metric) if metric else None
    command = Command(arguments=("sh", "-c", script), metric=found, timeout_seconds=timeout_seconds)
    return command.run(directory=tmp_path, variables=dict(os.environ), log=tmp_path / "log", started=started)


def test_the_last_number_counts_and_only_of_a_run_that_ended_well(tmp_path: Path) -> None:
    script = "echo 'rate: 1,000.5'; echo 'rate: 2,000.5' >&2; echo end hf_AbCdEfGhIjKlMnOpQrStUvWx"
    trial = run_command(tmp_path, script, metric=r"rate: ([\d.,]+)")
    assert (trial.figure, trial.last_line) == (2000.5, "end ***")
    assert run_command(tmp_path, f"{script}; exit 1", metric=r"rate: ([\d.,]+)").figure is None
    assert run_command(tmp_path, "echo rate: x", metric=r"rate: (\w)").figure is None


def test_a_command_that_takes_too_long_ends_with_all_its_children(tmp_path: Path) -> None:
    pipe = tmp_path / "child"
    os.mkfifo(pipe)
    children: list[psutil.Process] = []
    trial = run_command(
        tmp_path,
        f"sleep 300 & echo $! > {pipe}; wait",
        timeout_seconds=0.1,
        started=lambda _: children.append(psutil.Process(int(pipe.read_text()))),  # its time begins when the child runs
    )
    assert trial.timed_out
    assert trial.failed
    assert not children[0].is_running() or children[0].status() in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}


def test_a_run_is_over_only_when_nothing_that_it_started_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(trials, "_is_alive", lambda group: asked.append(group) or len(asked) < 3)
    assert run_command(tmp_path, "sleep 300 & exit 0").returncode == 0
    assert len(asked) == 3


def test_a_command_that_does_not_exist_is_bad_input(tmp_path: Path) -> None:
    command = Command(arguments=("no-such-command",), metric=None, timeout_seconds=None)
    with pytest.raises(BadInput, match="cannot run 'no-such-command'"):
        command.run(directory=tmp_path, variables=dict(os.environ), log=tmp_path / "log", started=lambda _: None)


def test_a_fixed_python_is_refused_where_environments_are_compared(tmp_path: Path) -> None:
    variables = variables_of(tmp_path / "bin" / "python", root=None, worktree=None, cache=tmp_path)
    command = Command(arguments=(sys.executable, "-V"), metric=None, timeout_seconds=None)
    with pytest.raises(BadInput, match="write `python`"):
        command.run(directory=tmp_path, variables=variables, log=tmp_path / "log", started=lambda _: None)


def test_imports_come_from_the_worktree_not_from_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, worktree = tmp_path / "root", tmp_path / "tree"
    (worktree / "src").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", f"{root}/lib:/opt/other")
    variables = variables_of(None, root=root, worktree=worktree, cache=tmp_path)
    assert variables["PYTHONPATH"] == f"{worktree}/src:{worktree}:{worktree}/lib:/opt/other"
