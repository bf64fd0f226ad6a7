"""Laws of dflash.fx.cost: every state is measured as it says. No timing is asserted."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch.fx._symbolic_trace as symbolic_trace
from torch import nn

from dflash.fx import cost
from dflash.fx.isolation import is_isolated, isolated


def test_the_command_reports_every_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    assert cost.main(["--rounds", "2", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["patched"] == []
    goals = {row["name"]: (row["idle_goal"], row["beside_goal"]) for row in found["rows"]}
    assert goals["module call"] == (1.0, 1.3)
    assert goals["make_fx"] == (1.03, None)
    printed = capsys.readouterr().out
    assert all(row["name"] in printed and row["microseconds"] > 0 and len(row["idle"]) == 3 for row in found["rows"])
    assert [row["name"] for row in found["rows"] if row["beside"] is None] == ["make_fx", "symbolic_trace"]
    assert not is_isolated()


def test_works_run_in_the_states_that_the_table_names() -> None:
    seen: set[tuple[bool, bool]] = set()
    original = symbolic_trace._orig_module_call

    def look() -> None:
        seen.add((is_isolated(), nn.Module.__call__ is not original))

    works = [cost.Work(name="look", call=look)]
    by_state: dict[str, set[tuple[bool, bool]]] = {}
    found: dict[str, dict[cost.State, float]] = {"look": {}}
    for state in ("none", "again", "idle", "beside"):
        seen.clear()
        with isolated() if state in {"idle", "beside"} else nullcontext():
            cost._time(works, state, {"look": 1}, found, [])
        by_state[state] = set(seen)
    assert by_state == {"none": {(False, False)}, "again": {(False, False)}, "idle": {(True, False)}, "beside": {(True, True)}}
    assert set(found["look"]) == set(by_state)


def test_a_patch_at_a_quiet_moment_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    patched: list[str] = []
    work = cost.Work(name="nothing", call=lambda: None)
    monkeypatch.setattr(nn.Module, "__call__", lambda module: module)
    cost._time([work], "none", {"nothing": 1}, {"nothing": {}}, patched)
    assert patched == ["__call__"]


@pytest.mark.parametrize("wrong", [["--rounds", "1"], ["--json", "no/such/x"]])
def test_bad_usage_is_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cost.main(wrong)
    assert stopped.value.code == 2
