"""Laws of the command: the planted culprit is named, a kill loses nothing, nothing of the user's is touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from diagnostics import bisect
from diagnostics.bisection import pins, venvs
from diagnostics.bisection.commits import Repository, Worktrees
from diagnostics.bisection.coupled import groups
from diagnostics.bisection.outcomes import BadInput, CannotBuild, NotObserved

ROOT = Path(__file__).parent.parent


def git(directory: Path, *arguments: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    return subprocess.run(("git", *who, *arguments), cwd=directory, capture_output=True, text=True, check=True).stdout.strip()


# The command, with real commits


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine commits: `value` is 10 until the sixth makes it 5; the fourth cannot be judged."""
    home = tmp_path_factory.mktemp("history")
    git(home, "init", "--quiet", "--initial-branch=main")
    (home / ".git" / "hooks" / "post-checkout").parent.mkdir(exist_ok=True)
    (home / ".git" / "hooks" / "post-checkout").write_text("#!/bin/sh\nexit 1\n")
    (home / ".git" / "hooks" / "post-checkout").chmod(0o755)
    for number in range(9):
        (home / "value").write_text("skip" if number == 3 else "10" if number < 5 else "5")
        (home / "number").write_text(str(number))
        git(home, "add", "value", "number")
        git(home, "commit", "--quiet", "-m", f"change {number}")
    return home


def ends(history: Path) -> list[str]:
    return ["--good", git(history, "rev-parse", "main~8"), "--bad", "main"]


JUDGED = "v=$(cat value); [ $v = skip ] && exit 125; [ $v -gt 5 ]"


def test_the_planted_commit_is_found_and_the_checkout_is_as_it_was(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a cell that holds a long path would be folded
    monkeypatch.chdir(history)
    (history / "value").write_text("uncommitted")
    (history / "new").write_text("untracked")
    git(history, "add", "new")
    watched = ("HEAD", "index", "refs/heads/main")
    before = {name: (history / ".git" / name).read_bytes() for name in watched}
    target = tmp_path / "out.json"
    assert bisect.main([*ends(history), "--cache", str(tmp_path / "c"), "--json", str(target), "--", "sh", "-c", JUDGED]) == 0
    assert {name: (history / ".git" / name).read_bytes() for name in watched} == before
    assert (history / "value").read_text() == "uncommitted"
    assert git(history, "worktree", "list").count("\n") == 0
    (found,) = json.loads(target.read_text())["commits"]
    assert found.endswith("change 5")
    shown = capsys.readouterr().out
    assert f"culprit: commit {found}" in shown
    assert "failed: exit code 1" in shown


def test_commits_that_must_be_skipped_around_the_culprit_leave_it_undecided(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(history)
    script = "n=$(cat number); [ $n = 4 ] && exit 125; [ $n -lt 5 ]"
    assert bisect.main([*ends(history), "--cache", str(tmp_path), "--", "sh", "-c", script]) == 3
    shown = capsys.readouterr().out
    assert "not decided, it is one of:" in shown
    assert "change 4" in shown
    assert "change 5" in shown
    assert "change 6" not in shown


def test_a_noisy_number_finds_the_commit(history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(history)
    script = 'v=$(cat value); [ $v = skip ] && exit 125; echo "rate: $(( v * 100 + $$ % 9 ))"'
    arguments = [*ends(history), "--metric", r"rate: (\d+)", "--repeat", "2", "--cache", str(tmp_path)]
    assert bisect.main([*arguments, "--error-rate", "0.2", "--", "sh", "-c", script]) == 0
    shown = capsys.readouterr().out
    assert "change 5" in shown.splitlines()[-1]
    assert "beside commit" in shown


KILLING = (
    "echo $(cat number) >> {log}; "
    "if [ ! -e {log}.killed ] && [ $(wc -l < {log}) = 4 ]; then touch {log}.killed; kill -9 $PPID; fi; " + JUDGED
)


def test_a_killed_bisection_goes_on_where_it_was(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(history)
    log, target = tmp_path / "log", tmp_path / "out.json"
    arguments = [*ends(history), "--cache", str(tmp_path / "c"), "--json", str(target), "--", "sh", "-c", KILLING.format(log=log)]
    command = (sys.executable, "-m", "diagnostics.bisect", *arguments)
    killed = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(log.read_text().split()) == 4
    assert bisect.main(arguments) == 0
    tried = log.read_text().split()
    trials = json.loads(target.read_text())["trials"]
    assert [trial["from_journal"] for trial in trials[:4]] == [True, True, True, False]
    assert len(tried) == len(trials) + 1  # the fourth was killed before it was written down, and is the only one repeated
    assert tried[3] == tried[4]
    assert len(set(tried)) == len(tried) - 1
    assert "change 5" in capsys.readouterr().out
    assert git(history, "worktree", "list").count("\n") == 0
    assert bisect.main(arguments) == 0
    assert log.read_text().split() == tried


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["--good", "main", "--bad", "main~3"], "they are exchanged"), (["--good", "main", "--bad", "main"], "are the same"),
     (["--good", "nosuch", "--bad", "main"], "is no commit"),
     (["--good", "main~3", "--bad", "main", "--metric", "("], "no regular expression")],
)  # fmt: skip
def test_ends_that_make_no_sense_are_refused_before_anything_runs(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(history)
    assert bisect.main([*arguments, "--cache", str(tmp_path / "c"), "--", "touch", str(tmp_path / "ran")]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_ends_that_are_not_as_claimed_are_said_before_any_bisection(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(history)
    script = f"cat number >> {tmp_path}/ran; exit 1"
    assert bisect.main([*ends(history), "--cache", str(tmp_path / "c"), "--", "sh", "-c", script]) == 2
    assert "the good end fails (exit code 1" in capsys.readouterr().err
    assert (tmp_path / "ran").read_text() == "08"


def test_a_commit_without_the_folder_that_is_run_in_is_stepped_around(history: Path, tmp_path: Path) -> None:
    repository = Repository(history)
    repository.inner = Path("later")
    with Worktrees(repository, tmp_path / "trees") as trees, pytest.raises(CannotBuild, match="has no folder later"):
        trees.of(repository.full("main"))


def test_a_folder_without_repository_is_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert bisect.main(["--good", "a", "--bad", "b", "--", "true"]) == 2
    assert "is in no git repository" in capsys.readouterr().err


def test_no_secret_of_a_subject_is_shown(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "use --token PLANT of https://me:PLANT@git.example/o/r")
    shown = Repository(tmp_path).described("HEAD")
    assert "PLANT" not in shown
    assert shown.endswith("of https://***@git.example/o/r")


def test_no_secret_of_the_command_is_written_down(history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(history)
    secret = "ghp_0123456789abcdefghijABCDEFGHIJ012345"
    assert bisect.main([*ends(history), "--cache", str(tmp_path), "--", "sh", "-c", JUDGED, "--token", secret]) == 0
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"--token ***" in written
    assert secret.encode() not in written


# The command, with real packages


def wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    metadata = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = '{version}'\n",
        f"{metadata}/METADATA": "\n".join(
            [
                "Metadata-Version: 2.1",
                f"Name: {name}",
                f"Version: {version}",
                *(f"Requires-Dist: {each}" for each in requires),
                "",
            ]
        ),
        f"{metadata}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{metadata}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{metadata}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """alpha, and beta with gamma, which exclude each other's halves; two versions each."""
    folder = tmp_path_factory.mktemp("wheels")
    for version, limit in (("1", "gamma<2"), ("2", "gamma>=2")):
        wheel(folder, "alpha", version)
        wheel(folder, "beta", version, limit)
        wheel(folder, "gamma", version)
    return folder


def offline(wheels: Path) -> tuple[str, ...]:
    return ("--no-index", f"--find-links={wheels}", "--no-compile")


def test_the_planted_package_is_found_and_its_environments_are_used_again(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, version in (("good", 1), ("bad", 2)):
        (tmp_path / f"{name}.txt").write_text("".join(f"{package}=={version}\n" for package in ("alpha", "beta", "gamma")))
    options = [f"--pip-option={option}" for option in offline(wheels)]
    arguments = ["--good-env", "good.txt", "--bad-env", "bad.txt", "--installer", "pip", *options, "--cache", str(tmp_path / "c")]
    code = "import alpha; raise SystemExit(alpha.VERSION == '2')"
    assert bisect.main([*arguments, "--", "python", "-c", code]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == "culprit: alpha 1 → 2"
    made = set((tmp_path / "c" / "environments").iterdir())
    monkeypatch.setattr(venvs, "_run", lambda *command: pytest.fail(f"installed again: {command}"))
    assert bisect.main([*arguments, "--fresh", "--", "python", "-c", code]) == 0
    assert set((tmp_path / "c" / "environments").iterdir()) == made
    changed = pins.changes(pins.read(tmp_path / "good.txt"), pins.read(tmp_path / "bad.txt"))
    environments = venvs.Environments(
        folder=tmp_path / "c" / "environments", python=sys.executable, options=offline(wheels), installer="pip"
    )
    first = dict.fromkeys(("alpha", "beta", "gamma"), "1")
    pythons = [environments.python_of(pins.applied(first, some)) for some in ((), changed)]
    assert [[change.name for change in group] for group in groups(changed, *pythons)] == [["alpha"], ["beta", "gamma"]]


def test_what_the_installer_refuses_cannot_be_built_and_other_failures_say_nothing(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments = venvs.Environments(folder=tmp_path, python=sys.executable, options=offline(wheels), installer="pip")
    with pytest.raises(CannotBuild, match="beta 2 depends on gamma>=2"):
        environments.python_of(("beta==2", "gamma==1"))
    assert list(tmp_path.glob("*/complete")) == list(tmp_path.glob("*/requirements.txt")) == []
    answers = iter([None, "ERROR: Connection refused"])
    monkeypatch.setattr(venvs, "_run", lambda _: next(answers))
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: 0)
    with pytest.raises(NotObserved, match="outside of the versions"):
        environments.python_of(("beta==2",))


def test_an_environment_that_was_broken_off_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environments = venvs.Environments(folder=tmp_path, python=sys.executable, options=(), installer="pip")
    left_over = tmp_path / environments.key(["a==1"]) / "left over"
    left_over.parent.mkdir()
    left_over.touch()
    made: list[list[str]] = []

    def run(command: list[str]) -> None:
        made.append(command)
        if "venv" in command:
            (Path(command[-1]) / "bin").mkdir(parents=True)
            (Path(command[-1]) / "bin" / "python").touch()

    monkeypatch.setattr(venvs, "_run", run)
    python = environments.python_of(["a==1"])
    assert not left_over.exists()
    assert environments.python_of(["a==1"]) == python
    assert len(made) == 2
    python.unlink()
    environments.python_of(["a==1"])
    assert len(made) == 4


def test_an_installer_that_is_not_there_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(venvs.shutil, "which", lambda _: None)
    with pytest.raises(BadInput, match="uv: it is not installed"):
        venvs.chosen_installer("uv")
    assert venvs.chosen_installer("auto") == "pip"
