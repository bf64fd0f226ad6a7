"""Laws of comparing two commits: real git, real processes, a `dflash` that only pretends to train."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers_regression import SERIES, measurement

from regression import ab, baseline, sampler, sides, validity
from regression.ab import Pairs
from regression.alternation import TurnsResult
from regression.gate import Pair
from regression.measurement import Measurement
from regression.sides import Side, SideError, baseline_side, dependencies_hash, environment_of
from regression.spec import RunSpec

# Does what a measuring run does in turns: steps until SIGTERM; its throughput is the number in rate.txt of the code that runs.
TRAINER = """
import json, os, pathlib, signal, sys, time
if "--measure" not in sys.argv or not pathlib.Path("can_measure").exists():
    sys.exit("Unrecognized options: --measure")
rate = float(pathlib.Path(__file__).parent.parent.joinpath("rate.txt").read_text())
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
output = pathlib.Path(sys.argv[sys.argv.index("--output") + 1])
output.mkdir()
with output.joinpath("events.jsonl").open("a", buffering=1) as events:
    events.write(json.dumps({"name": "notice", "fields": {"text": "steady after 3 steps"}}) + "\\n")
    before = time.time()
    while not asked:
        time.sleep(0.002)  # a step
        now = time.time()
        events.write(json.dumps({"name": "step", "time_seconds": now, "fields": {"tokens": 2 * rate * (now - before)}}) + "\\n")
        before = now
workers = [{"worker": name, "items": 1} for name in ("target-0", "drafter-0")]
measure = {"incomplete": "the run ended", "segments": [], "num_devices": 2}
print(json.dumps({"topology": "1t+1d", "measure": measure, "workers": workers}))
"""
TURNS = ("--segment-seconds", "0.2", "--turns", "1")


def git(root: Path, *arguments: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    done = subprocess.run(("git", *who, *arguments), cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits: tagged `old` with 200 tok/s, and 100 tok/s in the working tree."""
    root = tmp_path / "repository"
    (root / "dflash").mkdir(parents=True)
    (root / "dflash" / "__init__.py").touch()
    (root / "dflash" / "__main__.py").write_text(TRAINER)
    (root / "pyproject.toml").write_text('[project]\nname = "p"\ndependencies = ["a>=1"]\n')
    (root / "constraints.txt").write_text("# pins\na==1.0\n")
    git(root, "init", "-q", "-b", "main")
    git(root, "add", ".")
    git(root, "commit", "-qm", "cannot measure")
    git(root, "tag", "ancient")
    (root / "can_measure").touch()
    (root / "rate.txt").write_text("200")
    git(root, "add", ".")
    git(root, "commit", "-qm", "old")
    git(root, "tag", "old")
    (root / "rate.txt").write_text("100")
    monkeypatch.chdir(root)
    monkeypatch.setattr(sampler, "INTERVAL_SECONDS", 0.02)
    monkeypatch.setattr(validity, "FOREIGN_CPU_SHARE", 1.0)  # other tests run beside
    return root


def test_each_side_runs_its_own_code_and_every_pair_is_a_line(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = ab.main(["--baseline", "old", "--pairs", "2", "--output", str(tmp_path / "out"), *TURNS])
    told = capsys.readouterr()
    assert code == 1, told.err
    *lines, verdict = [json.loads(line) for line in told.out.splitlines()]
    assert lines == [{"number": number, "baseline": pytest.approx(200.0), "candidate": pytest.approx(100.0)} for number in (1, 2)]
    assert (verdict["kind"], round(verdict["loss"], 6), verdict["pairs"]) == ("FAIL", 0.5, 2)
    assert "FAIL" in told.err
    runs = {path.name for path in (tmp_path / "out").iterdir()}
    assert runs == {"001-1-baseline", "001-1-candidate", "002-1-baseline", "002-1-candidate"}
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_without_a_number_of_pairs_the_gate_asks_and_decides(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert repository.exists()
    assert ab.main(["--baseline", "old", "--output", str(tmp_path / "out"), *TURNS]) == 1
    *lines, verdict = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 8
    assert (verdict["kind"], verdict["pairs"], verdict["loss"]) == ("FAIL", 8, pytest.approx(0.5))


def test_a_commit_against_itself_passes_and_a_planted_slowdown_is_the_candidate_s(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "rate.txt").write_text("200")
    commands: dict[str, list[str]] = {}
    original = RunSpec.command

    def command(self: RunSpec, output: Path) -> list[str]:
        commands[output.parent.name] = original(self, output)
        return commands[output.parent.name]

    monkeypatch.setattr(RunSpec, "command", command)
    arguments = ["--baseline", "old", "--pairs", "2", "--output", str(tmp_path / "out"), "--burn-share", "0.1", *TURNS]
    assert ab.main(arguments) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["kind"] == "PASS"
    burning = [name for name, words in commands.items() if "--measure.burn-share" in words]
    assert sorted(burning) == ["001-1-candidate", "002-1-candidate"]


def test_a_win_measures_the_working_tree_and_writes_its_baseline(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "rate.txt").write_text("400")
    taken: list[Path] = []

    def one(spec: RunSpec, directory: Path, *, timeout_seconds: float) -> Measurement:
        assert (spec.segments, spec.planted, timeout_seconds) == (3, (), 1500.0)
        taken.append(directory)
        return measurement(per_device=400.0, time=f"2026-01-01T00:0{len(taken)}:00+00:00")

    monkeypatch.setattr(ab.measurement, "measure", one)
    arguments = ["--baseline", "old", "--pairs", "2", "--output", str(tmp_path / "out"), "--baselines", str(tmp_path / "new")]
    arguments += TURNS
    assert ab.main(arguments) == 0
    told = capsys.readouterr()
    assert json.loads(told.out.splitlines()[-1])["kind"] == "WIN"
    path = baseline.path_of(SERIES, tmp_path / "new")
    assert f"baseline written, commit it: {path}" in told.err
    assert [found.per_device for found in baseline.load(SERIES, path.parent)] == [400.0] * 5
    path.unlink()
    assert ab.main([*arguments[:5], str(tmp_path / "again"), *arguments[6:], "--burn-share", "0.1"]) == 0
    assert not path.exists()  # a planted slowdown is no baseline


def test_a_commit_that_cannot_measure_is_told(repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert repository.exists()
    assert ab.main(["--baseline", "ancient", "--output", str(tmp_path / "out")]) == 1
    assert "This commit cannot measure yet: choose a later one" in capsys.readouterr().err


def test_a_commit_that_does_not_exist_is_told(repository: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(SideError, match="'nothing' is no commit"),
        baseline_side("nothing", root=repository, cache=tmp_path, tell=print),
    ):
        pass


def test_the_worktree_is_removed_also_after_a_failure(repository: Path, tmp_path: Path) -> None:
    def fail() -> None:
        with baseline_side("old", root=repository, cache=tmp_path, tell=print) as side:
            assert (side.directory / "rate.txt").read_text() == "200"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert len(git(repository, "worktree", "list").splitlines()) == 1


# Prints the worktree, then waits to be killed.
HOLDER = """
import pathlib, sys
from regression.sides import baseline_side
with baseline_side("old", root=pathlib.Path.cwd(), cache=pathlib.Path(sys.argv[1]), tell=print) as side:
    print(side.directory, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def holder(repository: Path, cache: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that is inside a comparison, and its worktree."""
    command = (sys.executable, "-c", HOLDER, str(cache))
    place: dict[str, Any] = {"cwd": repository, "env": {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}}
    place["env"] |= {"TMPDIR": str(cache)}  # where a worktree is left when the process is killed
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **place) as process:
        try:
            assert process.stdout is not None
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_what_a_killed_comparison_left_is_removed_by_the_next_and_a_living_one_s_stays(repository: Path, tmp_path: Path) -> None:
    with holder(repository, tmp_path) as (killed, left), holder(repository, tmp_path) as (_, living):
        assert left.is_dir()
        killed.kill()
        killed.wait()
        told: list[str] = []
        with baseline_side("old", root=repository, cache=tmp_path, tell=told.append):
            assert (left.parent.exists(), living.is_dir()) == (False, True)
        assert told == [f"removed the worktree of a comparison that was killed: {left}"]
        listed = git(repository, "worktree", "list")
        assert (str(left) in listed, str(living) in listed) == (False, True)


def test_sigterm_removes_the_worktree(repository: Path, tmp_path: Path) -> None:
    with holder(repository, tmp_path) as (process, directory):
        process.terminate()
        assert process.wait() != 0
        assert not directory.parent.exists()
        assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_sigterm_is_handled_only_inside_a_comparison(repository: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with baseline_side("old", root=repository, cache=tmp_path, tell=print):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_environment_is_shared_as_long_as_both_ask_for_the_same(repository: Path, tmp_path: Path) -> None:
    with baseline_side("old", root=repository, cache=tmp_path / "cache", tell=print) as side:
        assert side.python == sys.executable
        (repository / "constraints.txt").write_text("# other words\na==1.0\n")
        assert dependencies_hash(repository) == dependencies_hash(side.directory)
        (repository / "constraints.txt").write_text("a==1.1\n")
        assert dependencies_hash(repository) != dependencies_hash(side.directory)


def test_other_packages_get_an_environment_made_once(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = tmp_path / "cache" / dependencies_hash(repository)
    (repository / "constraints.txt").write_text("a==2\n")
    commands: list[list[str]] = []

    def install(command: list[str]) -> None:
        commands.append(command)
        environment.mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(sides, "_install", install)
    with baseline_side("old", root=repository, cache=tmp_path / "cache", tell=print) as side:
        again = environment_of(side.directory, root=repository, cache=tmp_path / "cache")
    assert side.python == again == str(environment / "bin" / "python")
    assert [command[-1] for command in commands] == [str(environment), "a>=1"]
    assert commands[1][0] == side.python


SIDES = (Side(name="baseline", directory=Path("b"), python="p"), Side(name="candidate", directory=Path("c"), python="p"))


def pairs_of(found: list[TurnsResult], names: list[str], told: list[str]) -> Pairs:
    def run(order: Sequence[Side], name: str) -> TurnsResult:
        names.append(f"{name} {order[0].name}")
        return found.pop(0)

    return Pairs(SIDES, run, tell=told.append)


def rates(baseline: float, candidate: float) -> TurnsResult:
    return TurnsResult(rates={"baseline": baseline, "candidate": candidate})


def test_pairs_alternate_and_go_on_where_they_stopped() -> None:
    names: list[str] = []
    pairs = pairs_of([rates(10.0 + n, 20.0 + n) for n in range(3)], names, [])
    assert list(pairs(1)) == [Pair(number=1, baseline=10.0, candidate=20.0)]
    assert list(pairs(2)) == [Pair(number=2, baseline=11.0, candidate=21.0), Pair(number=3, baseline=12.0, candidate=22.0)]
    assert names == ["001-1 baseline", "002-1 candidate", "003-1 baseline"]


def test_an_invalid_pair_is_measured_again_and_a_hopeless_one_is_given_up() -> None:
    told: list[str] = []
    busy, good = TurnsResult(rates=rates(5.0, 5.0).rates, invalid=("busy",)), rates(1.0, 2.0)
    pairs = pairs_of([busy, good, busy, busy, busy, good], [], told)
    assert list(pairs(3)) == [Pair(number=1, baseline=1.0, candidate=2.0), Pair(number=3, baseline=1.0, candidate=2.0)]
    assert len(pairs.given_up) == 1
    assert sum("INVALID: busy" in line for line in told) == 4


def test_a_pair_without_a_rate_does_not_count() -> None:
    pairs = pairs_of([TurnsResult(rates={"baseline": 1.0})] * 3, [], told := [])
    assert list(pairs(1)) == []
    assert sum("INVALID: no throughput" in line for line in told) == 3


@pytest.mark.parametrize(
    "change",
    [
        ["--pairs", "1"],
        ["--burn-share", "1"],
        ["--gpus", "-1"],
        ["--segment-seconds", "0"],
        ["--output", "."],
        ["--tolerance", "0"],
        ["--turns", "0"],
    ],
)
def test_bad_usage_is_told(change: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    arguments: Any = ["--baseline", "x", *change]
    with pytest.raises(SystemExit) as stop:
        ab.main(arguments)
    assert stop.value.code == 2
