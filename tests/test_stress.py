"""Laws of the stress runner."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diagnostics.stress.__main__ import unclean
from diagnostics.stress.runner import Tally, Workload

ROOT = Path(__file__).parent.parent
CLEAN: dict[str, Any] = {"actions": {"x": 1}, "errors": {}, "wrong_results": {}, "findings": [], "compiles_by_threads": 0}


def test_threads_that_only_call_after_a_warm_up_are_clean() -> None:
    command = (sys.executable, "-m", "diagnostics.stress.runner", "protected", "--seconds", "1", "--threads", "4", "--seed", "1")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    result = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, unclean(result), result["not_observed"]) == (0, [], []), result["examples"]
    assert set(result["actions"]) == {"compiled call", "compiled forward and backward", "module call"}


def test_every_action_is_right_when_nothing_runs_beside_it() -> None:
    workload = Workload()
    actions = workload.actions("unprotected")
    assert len(actions) == 6
    assert {name: action(random.Random(0)) for name, action in actions.items()} == dict.fromkeys(actions, True)


@pytest.mark.parametrize(
    "change",
    [{"errors": {"F1": 1}}, {"wrong_results": {"x": 1}}, {"compiles_by_threads": 1}, {"actions": {}}, {"failure": "hung"},
     {"findings": [{"severity": "hazard", "id": "F4", "what": "x"}]}],
)  # fmt: skip
def test_anything_but_right_results_makes_the_protected_scenario_unclean(change: dict[str, Any]) -> None:
    assert unclean(CLEAN) == []
    assert len(unclean({**CLEAN, **change})) == 1


def test_errors_are_counted_by_failure_and_shown_once() -> None:
    tally = Tally()
    for _ in range(2):
        tally.add("call", right=None, error=NameError("module is not installed as a submodule"))
    tally.add("call", right=False, error=None)
    tally.add("call", right=True, error=None)
    assert (tally.actions["call"], dict(tally.errors), dict(tally.wrong)) == (4, {"F3": 2}, {"call": 1})
    assert len(tally.examples) == 1
