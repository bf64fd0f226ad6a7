"""Laws of the recipes, of the server that replays them and of the matrix: what happens happens, and a cure is seen to cure."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

import dflash.fx
from diagnostics import selftest
from diagnostics.catalogue import CATALOGUE
from diagnostics.stress import replay, scenarios
from diagnostics.stress.cures import POLICIES, Stage
from diagnostics.stress.evidence import UnexpectedError, verdict
from diagnostics.stress.replay import Job, Outcome, Server
from diagnostics.stress.scenarios import SCENARIOS
from diagnostics.stress.workers import ThreadWorker, park

ROOT = Path(__file__).parent.parent

# A part of the evidence of each recipe, so that a recipe that happens for another reason is noticed.
EVIDENCE = {
    "F1": "Detected that you are using FX",
    "F2": "ran uncompiled, silently, in thread innocent",
    "F3": "NameError: module is not installed as a submodule in thread innocent",
    "F3-shared": "got a Proxy; the graph of thread tracing gained 1 foreign nodes",
    "F4": "went through module_call_wrapper",
    "F5": "nn.Module.__call__ stays patched; nn.Module.__getattr__ stays patched; AssertionError: CURRENT_PATCHER is None",
    "F6": "the flag is stuck",
    "F7": "1 of 2 calls of thread innocent ran uncompiled",
    "F8": "deadlock",
    "F9": "limit 8 in thread worker, 64 in main; 2 of 10 calls ran uncompiled",
    "F10": "dynamic=False was forgotten",
    "F11": "is_compiling() was True in thread innocent",
    "F12": "compiled 4 times by 4 threads",
    "F13": "CURRENT_PATCHER is None",
    "F14": "TypeError: must be real number, not Proxy",
    "F15": "is_exporting() stays True",
    "F15-in-use": "got a FakeTensor",
    "F16": "drew the same random numbers twice",
    "F16-dtype": "set the default dtype torch.float64 and read torch.float32",
    "F17": "",
    "F18": "recompiled although the guards pass",
    "F18-wrong": "computes what it did in training mode",
    "F19": "found no compiled frames",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture(scope="module")
def matrix(server: Server) -> selftest.Matrix:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(selftest, "Server", lambda: contextlib.nullcontext(server))
        return selftest.run()


def rows(matrix: selftest.Matrix) -> dict[str, selftest.Row]:
    return {row.id: row for row in matrix.rows}


def test_every_failure_of_the_catalogue_has_a_row(matrix: selftest.Matrix) -> None:
    found = {name.partition("-")[0] for name in rows(matrix)}
    assert found == {f"F{number}" for number in range(1, 20)}
    assert found - {name.partition("-")[0] for name in CATALOGUE} <= {"F8"}


@pytest.mark.parametrize("name", EVIDENCE)
def test_a_failure_happens_where_the_features_of_this_torch_allow_it_and_else_says_why(
    matrix: selftest.Matrix, name: str
) -> None:
    row, why_not = rows(matrix)[name], SCENARIOS[name].why_not()
    assert row.deviations == row.untried == ()
    if SCENARIOS[name].not_tried:
        assert (row.here, row.what) == ("not tried", SCENARIOS[name].not_tried)
    elif why_not:
        assert (row.here, row.what, set(row.cures.values())) == ("cannot happen here", why_not, {"not needed"})
    else:
        assert row.here == "happens"
        assert EVIDENCE[name] in row.what


@pytest.mark.parametrize("name", [name for name, recipe in SCENARIOS.items() if recipe.cures])
def test_what_is_called_a_cure_cures_and_what_is_not_does_not(matrix: selftest.Matrix, name: str) -> None:
    if SCENARIOS[name].why_not():
        return
    for policy, cures in SCENARIOS[name].cures.items():
        expected = POLICIES[policy].missing() or ("cured" if cures else "not cured")
        assert rows(matrix)[name].cures[policy] == expected


def test_every_recipe_that_a_torch_allows_has_a_cure() -> None:
    assert [
        name for name, recipe in SCENARIOS.items() if recipe.play and name != "clean" and True not in recipe.cures.values()
    ] == []


def test_the_printed_matrix_and_the_json_agree(
    matrix: selftest.Matrix, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(selftest, "run", lambda **_options: matrix)
    file = tmp_path / "matrix.json"
    assert selftest.main(["--json", str(file)]) == 0
    printed = capsys.readouterr().out
    values = json.loads(file.read_text())
    assert (values["exit_code"], values["torch"]) == (0, matrix.torch)
    cells = {line.split("│")[1].strip(): line for line in printed.splitlines() if line.startswith("│ F")}
    assert list(cells) == [row["id"] for row in values["rows"]] == list(EVIDENCE)
    assert all(row["here"].split()[0] in cells[row["id"]] for row in values["rows"])
    assert {cure for row in values["rows"] for cure in row["cures"].values()} >= {"cured", "not cured"}


@pytest.mark.parametrize("name", ["F3", "F5"])
def test_a_recipe_happens_20_times_of_20(
    server: Server, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scenarios, "Server", lambda: contextlib.nullcontext(server))
    assert scenarios.main([name, "--repeat", "20"]) == 1
    assert f"{name}: happened 20 of 20" in capsys.readouterr().out


def test_replaying_what_never_happens_is_exit_code_0(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scenarios, "Server", lambda: contextlib.nullcontext(server))
    assert scenarios.main(["clean", "--repeat", "2"]) == 0
    assert scenarios.main(["F5", "--repeat", "1", "--policy", "serial"]) == 0
    assert capsys.readouterr().out.count("happened 0 of") == 2


def test_what_cannot_be_tried_or_named_has_exit_codes_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert scenarios.main(["F17"]) == 3
    assert "needs a GPU" in capsys.readouterr().err
    for arguments in (["F99"], ["F5", "--repeat", "0"]):
        with pytest.raises(SystemExit, match="2"):
            scenarios.main(arguments)


def test_a_recipe_that_raises_has_failed_and_not_happened(server: Server) -> None:
    (outcome,) = server.run([Job(name="F17")])
    assert (outcome.state, outcome.what.partition(":")[0]) == ("failed", "ValueError")


ENDS = """
    import json, os, subprocess, sys, threading
    from diagnostics.stress import replay, scenarios
    from diagnostics.stress.replay import Job

    def hangs(stage):
        child = subprocess.Popen(["sleep", "1000"])
        print("child", child.pid, file=sys.stderr, flush=True)
        threading.Event().wait()

    def dies(stage):
        print("last words", file=sys.stderr, flush=True)
        os.abort()

    for play in (hangs, dies):
        scenarios.SCENARIOS[play.__name__] = scenarios.Recipe(play=play)
    jobs = [Job(name="hangs"), Job(name="dies")]
    print(json.dumps([[o.name, o.state, o.what] for o in replay._run(jobs, 2, 3.0)]))
"""


def test_a_recipe_that_hangs_or_dies_is_ended_with_its_children_and_named() -> None:
    command = (sys.executable, "-c", textwrap.dedent(ENDS))
    environment = {**os.environ, **dict.fromkeys(replay.ONE_THREAD, "1")}  # as the server has it: forks start from one thread
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = {name: (state, what) for name, state, what in json.loads(done.stdout)}
    assert outcomes["dies"] == ("died", "died by signal SIGABRT: last words")
    state, what = outcomes["hangs"]
    assert (state, what.partition(",")[0]) == ("hung", "no end within 3 s")
    child = Path("/proc") / what.split()[-1]
    assert not child.exists() or "Z" in (child / "stat").read_text().rpartition(")")[2]


PLAN: dict[str, Any] = {
    "torch": "2.99",
    "policies": {
        "none": {"what": "nothing", "missing": None},
        "isolation": {"what": "isolate", "missing": "this torch has none"},
        "lock": {"what": "one lock", "missing": None},
    },
    "recipes": {
        "F1": {"what": "happens.", "why_not": None, "not_tried": "", "cures": {"lock": True}},
        "F2": {"what": "cannot.", "why_not": "no flag", "not_tried": "", "cures": {"lock": True}},
    },
}


class Scripted:
    """A server whose recipes end as a test says."""

    def __init__(self, states: dict[tuple[str, str], str], plan: dict[str, Any] = PLAN) -> None:
        self.plan, self._states = plan, states

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(self, jobs: Sequence[Job], **_limits: Any) -> Iterator[Outcome]:
        for job in jobs:
            state: Any = self._states.get((job.name, job.policy), "did not happen")
            yield Outcome(name=job.name, policy=job.policy, state=state, what=f"evidence of {job.name}")


GOOD = {("F1", "none"): "happened"}


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({}, 0, None),
        ({("F1", "none"): "did not happen"}, 1, "F1: happened 0 of 1 times"),
        ({("F2", "none"): "happened"}, 1, "F2: happened although no flag"),
        ({("F1", "none"): "hung"}, 1, "F1: hung: evidence of F1"),
        ({("F1", "lock"): "happened"}, 1, "F1 under policy lock: not cured"),
        ({("F1", "lock"): "died"}, 1, "F1 under policy lock: not cured"),
        ({("F1", "none"): "failed"}, 3, "F1: evidence of F1"),
        ({("F1", "lock"): "failed"}, 3, "F1 under policy lock: could not be tried"),
    ],
)
def test_the_exit_code_tells_deviations_from_what_could_not_be_tried(
    change: dict[tuple[str, str], str],
    code: int,
    says: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(selftest, "Server", lambda: Scripted({**GOOD, **change}))
    assert selftest.main([]) == code
    printed = " ".join(capsys.readouterr().out.split())
    assert ("not as the catalogue says:" in printed) == (code == 1)
    assert ("could not be tried:" in printed) == (code == 3)
    assert says is None or says in printed


def test_a_repeated_recipe_must_happen_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unsteady(Scripted):
        def run(self, jobs: Sequence[Job], **_limits: Any) -> Iterator[Outcome]:
            outcomes = list(super().run(jobs))
            yield from outcomes[:-1]
            yield Outcome(name="F1", policy="none", state="did not happen", what="nothing")

    plan = {**PLAN, "recipes": {"F1": {**PLAN["recipes"]["F1"], "cures": {}}}}
    monkeypatch.setattr(selftest, "Server", lambda: Unsteady(GOOD, plan))
    (row,) = selftest.run(repeat=3).rows
    assert row.here == "did not happen"
    assert "happened 2 of 3 times" in row.deviations[0]


def test_isolation_is_cured_only_where_it_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "Server", lambda: Scripted(GOOD))
    assert [row.isolation for row in selftest.run().rows] == ["this torch has none", "not needed"]
    plan = {**PLAN, "policies": {**PLAN["policies"], "isolation": {"what": "isolate", "missing": None}}}
    for state, word in (("did not happen", "cured"), ("happened", "not cured")):
        states = {**GOOD, ("F1", "isolation"): state}
        monkeypatch.setattr(selftest, "Server", lambda states=states: Scripted(states, plan))
        assert selftest.run(only=["F1"]).rows[0].isolation == word


def test_isolation_is_applied_for_the_whole_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def isolated() -> Iterator[None]:
        seen.append("on")
        yield
        seen.append("off")

    monkeypatch.setattr(dflash.fx, "isolated", isolated, raising=False)  # it is looked up when it is first asked for
    with Stage(POLICIES["isolation"]).ready():
        seen.append("recipe")
    assert seen == ["on", "recipe", "off"]


def test_an_unknown_failure_is_bad_usage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(selftest, "Server", lambda: Scripted(GOOD))
    for arguments in (["--only", "F77"], ["--repeat", "0"]):
        with pytest.raises(SystemExit, match="2"):
            selftest.main(arguments)
    assert "no recipe for F77: known are F1, F2" in capsys.readouterr().err


def test_a_recipe_that_goes_wrong_another_way_is_no_cure() -> None:
    worker = ThreadWorker("innocent", lambda: None)
    worker.error = "ValueError: else"
    with pytest.raises(UnexpectedError, match="ValueError: else in thread innocent"):
        verdict(False, "yes", "no", worker)
    assert verdict(True, "yes", "no", worker).what == "yes; ValueError: else in thread innocent"


def test_a_worker_parks_until_it_may_go_and_a_released_one_does_not() -> None:
    passed: list[int] = []

    def act() -> str:
        for number in range(4):
            park()
            passed.append(number)
        return "result"

    worker = ThreadWorker("worker", act)
    worker.start()
    for expected in ([], [0], [0, 1]):
        worker.settle()
        assert passed == expected
        worker.go()
    worker.settle()
    worker.release()
    worker.finish()
    assert (passed, worker.result, worker.error) == ([0, 1, 2, 3], "result", None)
