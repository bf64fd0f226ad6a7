"""Laws of diagnostics.stress.victims: it counts every failure by kind, and stops as it says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diagnostics.stress import victims
from diagnostics.stress.victims import Outcome, Victim

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: without isolation it damages its process."""
    command = (sys.executable, "-m", "diagnostics.stress.victims", *arguments)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_isolation_keeps_every_call_and_every_trace(tmp_path: Path) -> None:
    done = run("--calls", "2000", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["calls"], found["errors"], found["wrong"], found["left_behind"]) == (2000, {}, {}, [])
    assert len(found["traces"]) == 4
    assert all(found["traces"])


def test_without_isolation_it_fails_stops_and_says_how(tmp_path: Path) -> None:
    done = run("--policy", "none", "--stop-after", "5", "--calls", "200000", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["calls"] < 200000
    kinds = [*found["errors"], *found["wrong"]]
    assert kinds
    assert all(kind in done.stdout for kind in kinds)


@pytest.mark.parametrize(
    ("call", "runs", "kind"),
    [
        (lambda: torch.ones(1), None, None),
        (lambda: torch.ones(1), iter([0, 1]), None),
        (lambda: torch.ones(1), iter([0, 0]), "victim: F2 ran uncompiled"),
        (lambda: torch.zeros(1), None, "victim: other values"),
        (lambda: "a proxy", None, "victim: returned a str"),
    ],
)
def test_a_call_that_went_wrong_is_counted(call: Callable[[], Any], runs: Any, kind: str | None) -> None:
    outcome = Outcome(torch="", policy="", tracers=0)
    graph_runs = None if runs is None else lambda: next(runs)
    victims.call_once(outcome, Victim(name="victim", call=call, expected=[1.0], graph_runs=graph_runs))
    assert outcome.calls == 1
    assert list(outcome.wrong) == ([] if kind is None else [kind])
    assert outcome.failures == len(outcome.wrong)


def test_an_error_is_counted_under_its_failure() -> None:
    def fails() -> None:
        raise NameError("module is not installed as a submodule")

    outcome = Outcome(torch="", policy="", tracers=0)
    victims.call_once(outcome, Victim(name="victim", call=fails, expected=[]))
    assert list(outcome.errors) == ["victim: F3 NameError: module is not installed as a submodule"]


@pytest.mark.parametrize("wrong", [["--calls", "0"], ["--tracers", "0"], ["--stop-after", "-1"], ["--json", "no/such/x"]])
def test_bad_usage_is_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        victims.main(wrong)
    assert stopped.value.code == 2
