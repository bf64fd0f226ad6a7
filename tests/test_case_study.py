import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.case_study import __main__ as replay
from fixtures.case_study.schedule import FirstSteps
from fixtures.case_study.steps import SLOWER, Seen, Step, exit_code, judge, outcome_of, steps
from fixtures.case_study.torch_flag import why_not_shown

HEALTHY, CRASH, BYPASSED, WARM_UP, ISOLATED, *TRAINERS = steps("cpu")
BYPASSED_ON_GPU = steps("cuda:0")[2]
FX = "RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized function."


def finding(id_: str, severity: str = "error") -> dict[str, Any]:
    return {"id": id_, "severity": severity}


def seen(outcome: Any, *ids: str, **fields: Any) -> Seen:
    given = {"tokens_per_second": None, "late_call": None, "findings": tuple(finding(id_) for id_ in ids)}
    return Seen(outcome=outcome, **{**given, **fields})


def verdict(step: Step, what: Seen, *, hidden: str | None = None) -> str:
    return judge(step, what, healthy_rate=100.0, why_not_shown=hidden)[0]


def uncompiled(rate: float, *ids: str, late_call: str = "uncompiled") -> Seen:
    return seen("uncompiled", *ids, tokens_per_second=rate, late_call=late_call)


@pytest.mark.parametrize(
    ("step", "what", "expected"),
    [
        (HEALTHY, seen("healthy"), "as told"),
        (HEALTHY, seen("healthy", findings=(finding("F9", "hazard"),)), "as told"),
        (HEALTHY, seen("healthy", "F5"), "deviates"),
        (HEALTHY, seen("mixed"), "deviates"),
        (HEALTHY, seen("healthy", late_call="uncompiled"), "deviates"),
        (HEALTHY, seen("healthy", not_observed=("a probe was not attached",)), "not observed"),
        (CRASH, seen("crash", "F1", error=FX), "as told"),
        (CRASH, seen("crash", error=FX), "deviates"),  # fxprobe did not see why
        (CRASH, seen("crash", "F1", error="AssertionError"), "deviates"),
        (CRASH, seen("healthy", "F1"), "deviates"),
        (WARM_UP, seen("crash", "F1", error=FX, facts={"disk_cache_hits": 2}), "as told"),
        (WARM_UP, seen("crash", "F1", error=FX, facts={"disk_cache_hits": 0}), "deviates"),
        (BYPASSED, uncompiled(30.0, "F2", "F6"), "as told"),
        (BYPASSED, uncompiled(30.0, "F2"), "deviates"),
        (BYPASSED, uncompiled(100.0 * SLOWER, "F2", "F6"), "deviates"),
        (BYPASSED, uncompiled(30.0, "F2", "F6", late_call="compiled"), "deviates"),
        (BYPASSED, seen("mixed", "F2", "F6", late_call="uncompiled"), "deviates"),
        (ISOLATED, seen("crash", "F1", error=FX), "deviates"),
        (ISOLATED, seen("hang"), "deviates"),
        (BYPASSED, seen("hang", "F8"), "deviates"),  # autograd has no device thread on a CPU
        (BYPASSED_ON_GPU, seen("hang", "F2", "F8"), "as told"),
        (BYPASSED_ON_GPU, seen("hang", "F2"), "deviates"),  # nobody said why
        (BYPASSED_ON_GPU, uncompiled(30.0, "F2"), "as told"),
    ],
)
def test_a_step_is_as_told_only_with_its_outcome_its_findings_and_its_rate(step: Step, what: Seen, expected: str) -> None:
    assert verdict(step, what) == expected


def test_without_a_healthy_rate_slower_is_not_claimed() -> None:
    what = uncompiled(30.0, "F2", "F6")
    assert judge(BYPASSED, what, healthy_rate=None, why_not_shown=None)[0] == "not observed"


def test_where_the_flag_is_hidden_the_incident_must_be_absent_and_is_said_so() -> None:
    for step in (CRASH, BYPASSED, WARM_UP):
        healthy = seen("healthy", late_call="compiled", facts={"disk_cache_hits": 6})
        assert verdict(step, healthy, hidden="per thread") == "not shown"
        assert verdict(step, seen("crash", "F1", error=FX), hidden="per thread") == "deviates"
    assert verdict(HEALTHY, seen("healthy"), hidden="per thread") == "as told"


@pytest.mark.parametrize(
    ("code", "result", "outcome"),
    [
        (0, {"steps": 9, "uncompiled_steps": 0}, "healthy"),
        (1, {"steps": 9, "uncompiled_steps": 0}, "crash"),
        (139, {}, "crash"),
        (0, {"error": FX}, "crash"),
        (0, {"steps": 9, "uncompiled_steps": 8}, "uncompiled"),  # the thread that traced ran its first step compiled
        (0, {"steps": 9, "uncompiled_steps": 7}, "mixed"),
        (0, {"fallbacks": 2}, "mixed"),
        (0, {"fx_errors": 1}, "crash"),
    ],
)
def test_an_outcome_is_told_by_exit_code_and_counts(code: int, result: dict[str, Any], outcome: str) -> None:
    assert outcome_of(code, result) == outcome


def test_a_deviation_outweighs_what_cannot_be_shown() -> None:
    assert exit_code(["as told", "as told"]) == 0
    assert exit_code(["as told", "not shown"]) == exit_code(["not observed"]) == 3
    assert exit_code(["not shown", "deviates"]) == 1


def test_the_steady_rate_leaves_out_the_steps_that_compiled(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    assert replay.steady_rate(events) is None
    records = [{"name": "step", "fields": {"tokens_per_second": rate}} for rate in (1.0, 2.0, 90.0, 100.0, 110.0)]
    events.write_text("".join(json.dumps(record) + "\n" for record in [{"name": "phase", "fields": {}}, *records]))
    assert replay.steady_rate(events) == 100.0


def test_every_drafter_of_a_gpu_run_has_a_device() -> None:
    for step in steps("cuda:0,cuda:1")[:5]:
        assert step.program[step.program.index("--devices") + 1] == "cuda:0,cuda:1"
    for step in steps("cuda:0,cuda:1")[5:]:  # one target, then three drafters
        assert step.program[step.program.index("--devices") + 1] == "cuda:0,cuda:0,cuda:1,cuda:0"


def play(order: str, step: Any) -> tuple[FirstSteps, list[str]]:
    """Two threads, two steps each, in `order`; what `step` says of each, in the order in which it ended."""
    first_steps, log = FirstSteps(2, order), []

    def drafter(number: int) -> None:
        try:
            for _ in range(2):
                with first_steps.step(number):
                    log.append(f"{number} {step(number)}")
        finally:
            first_steps.ended(number)

    threads = [threading.Thread(target=drafter, args=(number,), name=f"drafter-{number}") for number in range(2)]
    with first_steps.directed(threads):
        for thread in threads:
            thread.join()
    return first_steps, log


def test_luck_lets_each_first_step_end_before_the_next_begins() -> None:
    for _ in range(20):
        _, log = play("one-after-the-other", lambda _number: "done")
        assert log[:2] == ["0 done", "1 done"]


@pytest.mark.parametrize("order", ["all-at-once", "all-at-once-silent"])
def test_drafters_that_come_together_meet_the_first_ones_trace(order: str) -> None:
    inside: list[str] = []

    def step(number: int) -> str:
        if number > 0:
            return f"meets {inside[-1:]}"
        inside.append("a trace")
        torch.fx.symbolic_trace(lambda x: x + 1)
        inside.append("no trace")
        return "traced"

    for _ in range(5):
        inside.clear()
        first_steps, log = play(order, step)
        assert first_steps.seen == ["drafter-0 in a trace", "drafter-1 before a step"]
        assert log[:2] == ["1 meets ['a trace']", "0 traced"]


def test_the_park_points_leave_torch_as_it_was() -> None:
    before = torch.fx.Tracer.create_args_for_root, torch.fx.proxy.TracerBase.create_node
    play("all-at-once", lambda _number: "done")
    assert (torch.fx.Tracer.create_args_for_root, torch.fx.proxy.TracerBase.create_node) == before


@pytest.mark.parametrize("flags", [["--devices", "gpu"], ["--only", "7"], ["--json", "/nowhere/at/all.json"]])
def test_bad_usage_is_told(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        replay.main(flags)
    assert stopped.value.code == 2
    assert flags[1].split("/")[1 if "/" in flags[1] else 0] in capsys.readouterr().err


def test_the_crash_is_replayed_or_said_to_be_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "case.json"
    code = replay.main(["--only", "2", "--json", str(report)])
    (row,) = json.loads(report.read_text())["steps"]
    gone = why_not_shown()
    assert (code, row["verdict"], row["why"]) == ((3, "not shown", gone) if gone else (0, "as told", "")), row
    if not gone:
        assert {"module_call_wrapper", "compile_wrapper"} <= {frame.split()[-1] for frame in row["facts"]["frames"]}
        assert "F1" in {found["id"] for found in row["findings"]}
    assert json.loads(capsys.readouterr().out)["verdicts"] == {"2 cache deleted": row["verdict"]}


def test_a_step_that_hangs_is_ended_and_its_deadlock_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "LOOK_SECONDS", 2.0)
    found = replay._play(Step(name="deadlock", done="waits for itself", program=("tests/programs/deadlock.py",)))
    assert (found.outcome, found.tokens_per_second) == ("hang", None)
    assert "F8" in found.errors
