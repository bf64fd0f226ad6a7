"""Laws of the stress command: what its threads do, what counts as clean, and what becomes of a child that hangs or dies."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from diagnostics.stress import __main__ as command
from diagnostics.stress import children, policies
from diagnostics.stress.children import watch
from diagnostics.stress.combination import Combination, Refused, unclean
from diagnostics.stress.runner import Tally, run
from diagnostics.stress.workload import CASES, Workload, fresh, same

CLEAN: dict[str, Any] = {"actions": {"x": 1}, "errors": {}, "wrong_results": {}, "findings": [], "leaks": [], "afterwards": 2,
                         "wrong_afterwards": {}, "compiles_by_threads": 0, "not_observed": []}  # fmt: skip
HAZARD = {"severity": "hazard", "id": "F4", "what": "x", "count": 1}
COMBINATION = Combination(
    policy="lock", threads=2, seconds=0.5, seed=3, backends=("eager",), device="cpu", actions=("make_fx", "call eager")
)


def test_threads_that_only_call_after_a_warm_up_are_clean(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    arguments = [
        "--policy",
        "prewarm",
        "--seconds",
        "1",
        "--backends",
        "eager,aot_eager",
        "--device",
        "cpu",
        "--json",
        str(report),
    ]
    code = command.main(arguments)
    output = capfd.readouterr().out
    assert code == 0, output
    (result,) = json.loads(report.read_text())["runs"]
    assert (unclean(result), result["not_observed"], result["afterwards"]) == ([], [], 6 * CASES)
    assert set(result["actions"]) == {
        *("module call", "block mask"),
        *(f"{what} {backend}" for what in ("call", "train") for backend in ("eager", "aot_eager")),
    }
    assert "flex_attention" in output  # what a CPU cannot do is said


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload(backends=("eager", "aot_eager"), device="cpu", guard=contextlib.nullcontext())


def test_every_action_gives_the_same_each_time_and_with_each_backend(workload: Workload) -> None:
    actions = {action.name: action for action in workload.actions()}
    results = {name: [action.run(case) for case in range(CASES)] for name, action in actions.items()}
    assert len(results) == 6 + 4 * 2
    for name, expected in results.items():
        assert same([actions[name].run(case) for case in range(CASES)], expected), name
    for what in ("call", "train", "first compile", "recompile"):
        assert same(results[f"{what} aot_eager"], results[f"{what} eager"]), what
    x = torch.linspace(-1.0, 1.0, 32).view(4, 8)
    assert same(results["call eager"][0], torch.sin(x) * 3 + torch.cos(x * 2))
    assert not same(results["call eager"][0], results["call eager"][1])


def test_a_fresh_function_was_never_compiled() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    for _ in range(10):  # more than the recompile limit of one code object
        assert torch.compile(fresh(double), backend=backend)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert len(graphs) == 10


def test_the_lock_is_held_around_traces_and_calls_but_never_around_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    depth, entered, backwards = [0], [0], []

    @contextlib.contextmanager
    def entering() -> Iterator[None]:
        depth[0] += 1
        entered[0] += 1
        yield
        depth[0] -= 1

    class Guard(contextlib.AbstractContextManager[None]):
        def __enter__(self) -> None:
            self._inner = entering()
            self._inner.__enter__()

        def __exit__(self, *details: object) -> None:
            self._inner.__exit__(*details)

    original = torch.autograd.grad
    workload = Workload(backends=("eager",), device="cpu", guard=Guard())
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: (backwards.append(depth[0]), original(*a, **k))[1])
    unguarded = []
    for action in workload.actions():
        before = entered[0]
        action.run(0)
        if entered[0] == before:
            unguarded.append(action.name)
    assert (unguarded, backwards) == (["module call"], [0, 0])


def test_prewarm_forbids_recompiles_and_keeps_cache_entries_in_their_places() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def places() -> list[int]:
        return [id(entry.guard_manager) for entry in _debug_get_cache_entry_list(double.__code__)]

    inputs = [torch.ones(2), torch.ones(3)]
    compiled = torch.compile(double, backend="eager", dynamic=False)
    for x in inputs:
        compiled(x)
    before = places()
    with policies.around_threads("prewarm"):
        for x in inputs:
            compiled(x)
            assert places() == before
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            compiled(torch.ones(4))
    for x in inputs:  # torch's own way again
        compiled(x)
        moved = places()
    compiled(inputs[0])
    assert places() == moved[::-1]


def test_results_that_differ_in_any_way_are_wrong() -> None:
    one = torch.ones(2)
    (proxy,) = (node for node in torch.fx.symbolic_trace(lambda x: x).graph.nodes if node.op == "placeholder")
    assert same([one, "a"], [one + 1e-6, "a"])
    for found in (one * 2, one.double(), torch.ones(3), torch.fx.Proxy(proxy), None, [one]):
        assert not same(found, one)
    assert not same([one], [one, one])
    assert not same(["call_function sin", "output output"], ["output output"])


@pytest.mark.parametrize(
    "change",
    [{"errors": {"F1": 1}}, {"wrong_results": {"x": 1}}, {"compiles_by_threads": 1}, {"actions": {}}, {"failure": "hung"},
     {"findings": [HAZARD]}, {"leaks": ["(F5) left"]}, {"wrong_afterwards": {"x": "F6"}}],
)  # fmt: skip
def test_anything_but_right_results_is_unclean(change: dict[str, Any]) -> None:
    assert unclean(CLEAN) == []
    assert len(unclean({**CLEAN, **change})) == 1


@pytest.mark.parametrize(("action", "reason"), [("make_fx", "policy prewarm has only"), ("hope", "no such action")])
def test_actions_that_cannot_run_are_refused_and_named(action: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        run(dataclasses.replace(COMBINATION, policy="prewarm", actions=(action,)))


def test_where_traces_may_overlap_only_harm_is_unclean() -> None:
    assert unclean({**CLEAN, "findings": [HAZARD], "compiles_by_threads": 1}, hazards_allowed=True) == []
    assert unclean({**CLEAN, "findings": [{**HAZARD, "severity": "error"}]}, hazards_allowed=True) == ["error F4: x"]


def test_errors_are_counted_by_failure_and_shown_once() -> None:
    tally = Tally()
    for _ in range(2):
        tally.add("call", right=None, error=NameError("module is not installed as a submodule"))
    tally.add("call", right=False, error=None)
    tally.add("call", right=True, error=None)
    assert (tally.actions["call"], dict(tally.errors), dict(tally.wrong)) == (4, {"F3": 2}, {"call": 1})
    assert len(tally.examples) == 1


@pytest.mark.parametrize(
    ("policy", "options", "code"), [("prewarm", (), 1), ("none", (), 0), ("none", ("--must-be-clean",), 1), ("lock", (), 0)]
)
def test_only_a_policy_that_promises_to_be_clean_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], policy: str, options: tuple[str, ...], code: int
) -> None:
    monkeypatch.setattr(command, "run_child", lambda _combination, hang_seconds: {**CLEAN, "errors": {"F1": hang_seconds > 0}})
    assert command.main(["--policy", policy, "--seed", "7", *options]) == code
    assert (f"replay: python -m diagnostics.stress --policy {policy}" in capsys.readouterr().out) == bool(code)


def test_what_was_not_observed_is_never_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "run_child", lambda _combination, hang_seconds: {**CLEAN, "not_observed": [str(hang_seconds)]})
    assert command.main(["--policy", "prewarm"]) == 3
    assert command.main(["--policy", "none"]) == 0


def test_a_replay_command_means_the_same_combination() -> None:
    words = shlex.split(COMBINATION.replay_command())
    assert words[:3] == ["python", "-m", "diagnostics.stress"]
    assert command.plan(command._options(words[3:]))[0] == [COMBINATION]
    assert Combination.from_json(COMBINATION.to_json()) == COMBINATION


@pytest.mark.parametrize("arguments", [["--policy", "hope"], ["--threads", "1"], ["--backends", "x"], ["--threads", "two"]])
def test_bad_usage_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_compiler_inductor_and_flex_are_left_out_and_said(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (combination,), left_out = command.plan(command._options(["--device", device, "--policy", "none"]))
    assert (combination.backends, combination.device) == (("eager", "aot_eager"), device)
    assert any("inductor" in sentence for sentence in left_out)
    assert any("flex_attention" in sentence for sentence in left_out)


def test_a_child_that_hangs_is_shown_where_and_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)

    class Child(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if ready.exists():  # the child's time begins when it stands where it will hang
                ready.read_text()
                ready.unlink()
            return super().wait(timeout)

    monkeypatch.setattr(children.subprocess, "Popen", Child)
    script = f"""
import faulthandler, signal, sys, threading
faulthandler.register(signal.SIGUSR1, all_threads=True)
def waits_for_ever():
    print("phase: threads", file=sys.stderr, flush=True)
    open({str(ready)!r}, "w").close()
    threading.Event().wait()
waits_for_ever()
"""
    result = watch((sys.executable, "-c", script), limit_seconds=1.0)
    assert result["failure"] == "hung while running: threads; no end within 1 s"
    assert "waits_for_ever" in result["stacks"]


def test_a_child_that_dies_says_how_and_in_which_phase() -> None:
    script = "import os, sys; print('phase: reference', file=sys.stderr, flush=True); os.abort()"
    result = watch((sys.executable, "-c", script), limit_seconds=60.0)
    assert result["failure"].startswith("died by signal SIGABRT while running: reference")
