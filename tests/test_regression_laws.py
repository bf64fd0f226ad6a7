"""Laws about the laws: each planted fault fails its own item, and what cannot be told is never a pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from helpers_regression import SERIES, failed, measurement, result, steps

from regression import baseline, laws
from regression.baseline import BaselineError
from regression.decision import decide
from regression.history import History, nights
from regression.laws import LAWS
from regression.measurement import Measurement, measure_until_valid

RECOMPILED = failed("RecompileError", "compiled after warm-up:\n- forward (drafter.py:1) in thread drafter-0: size mismatch")
BYPASSED = failed("RecompileError", "compiled code was bypassed:\n1 of 9 calls of compiled functions ran no compiled graph")
NESTED = failed("RuntimeError", "Detected that you are using FX to symbolically trace a dynamo-optimized function.")
KILLED = failed("ChildFailed", "ended with exit code -9 and no JSON")


def kinds(measured: Measurement) -> dict[str, str]:
    return {name: law(measured).kind for name, law in LAWS.items()}


def test_a_clean_run_passes_every_law() -> None:
    assert set(kinds(measurement()).values()) == {"PASS"}
    assert laws.problems(measurement()) == []


@pytest.mark.parametrize(
    ("key", "law"), [("fx_errors", "fx_errors"), ("recompiles_after_warmup", "recompiles"), ("fallbacks", "fallbacks")]
)
def test_a_counted_fault_fails_its_own_law_only(key: str, law: str) -> None:
    found = kinds(measurement(result=result(**{key: 3}), returncode=1))
    assert [name for name, kind in found.items() if kind != "PASS"] == [law]


@pytest.mark.parametrize(("measured", "law"), [(RECOMPILED, "recompiles"), (BYPASSED, "fallbacks"), (NESTED, "fx_errors")])
def test_a_fault_that_ended_the_run_fails_its_own_law_and_leaves_the_others_open(measured: Measurement, law: str) -> None:
    found = kinds(measured)
    assert {name for name, kind in found.items() if kind == "FAIL"} == {law, "reported"}
    assert {kind for name, kind in found.items() if name not in (law, "reported")} == {"INSUFFICIENT"}
    assert measured.failure is not None
    assert measured.failure["message"] in LAWS[law](measured).sentence


def test_a_run_that_was_killed_confirms_no_law() -> None:
    assert "PASS" not in kinds(KILLED).values()


@pytest.mark.parametrize("key", laws.REQUIRED_KEYS)
def test_a_missing_number_fails(key: str) -> None:
    values = {name: value for name, value in result().items() if name != key}
    assert kinds(measurement(result=values))["reported"] == "FAIL"
    assert "PASS" not in {kinds(measurement(result={})).get(name) for name in ("fx_errors", "recompiles", "fallbacks")}


def test_a_failing_exit_code_without_another_reason_fails() -> None:
    assert kinds(measurement(returncode=1))["reported"] == "FAIL"


@pytest.mark.parametrize(("rise_mib", "kind"), [(0, "PASS"), (60, "PASS"), (70, "FAIL")])
def test_memory_may_rise_by_5_percent_or_64_mib(rise_mib: int, kind: str) -> None:
    bytes_in_use = [600.0 * 2**20] * 15 + [(600.0 + rise_mib) * 2**20] * 10
    assert laws.memory(measurement(steps=steps(bytes_in_use))).kind == kind


def test_memory_of_the_warm_up_does_not_count_and_one_peak_is_no_rise() -> None:
    bytes_in_use = [2**20 * 100.0] * 5 + [2**20 * 600.0] * 20
    bytes_in_use[-1] *= 3
    assert laws.memory(measurement(steps=steps(bytes_in_use))).kind == "PASS"


def test_every_gpu_is_watched_for_memory() -> None:
    rising = {"cuda:1_bytes": [1e9] * 15 + [2e9] * 10, **steps()}
    assert "cuda:1 memory went from 954 to 1,907 MiB" in laws.memory(measurement(steps=rising)).sentence


def report(*severities: str, **changes: Any) -> dict[str, Any]:
    findings = [
        {"id": f"F{number}", "severity": severity, "what": "what", "who": ["a"], "where": ["b"], "why": "why", "what_to_do": "do"}
        for number, severity in enumerate(severities)
    ]
    return {"findings": findings, "program_exit_code": 0, "not_observed": [], **changes}


@pytest.mark.parametrize(
    ("given", "kind", "hazards"),
    [
        (report(), "PASS", 0),
        (report("info"), "PASS", 0),
        (report("hazard", "hazard"), "PASS", 2),
        (report("hazard", "error"), "FAIL", 1),
        (report("error", program_exit_code=1), "FAIL", 0),
        (report(program_exit_code=1), "INSUFFICIENT", 0),
        (report(not_observed=["a probe did not attach"]), "INSUFFICIENT", 0),
    ],
)
def test_only_errors_of_the_probed_run_fail_and_hazards_are_counted(given: dict[str, Any], kind: str, hazards: int) -> None:
    outcome = laws.probed(given)
    assert (outcome.kind, len(outcome.hazards)) == (kind, hazards)


def at(day: int, per_device: float, **changes: Any) -> Measurement:
    return measurement(per_device=per_device, time=f"2026-01-{day:02}T00:00:00+00:00", **changes)


NIGHTS = History(measurements=[at(1, 99.9), at(2, 100.0), at(3, 100.2)])


@pytest.mark.parametrize(("value", "kind"), [(96.0, "PASS"), (94.0, "INSUFFICIENT"), (200.0, "PASS")])
def test_one_measurement_more_than_5_percent_down_is_suspect(value: float, kind: str) -> None:
    outcome = decide(at(4, value), NIGHTS)
    assert outcome.kind == kind
    assert f"{value:,.1f} tok/s per device" in outcome.sentence
    assert "provisional" in outcome.sentence
    assert ("SUSPECT" in outcome.sentence) == (kind == "INSUFFICIENT")


def test_the_second_measurement_in_a_row_fails() -> None:
    outcome = decide(at(5, 94.0), NIGHTS.with_measurements([at(4, 94.0)]))
    assert outcome.kind == "FAIL"
    assert "-6.0% to the median of 3 nights (limit -5.0%, provisional)" in outcome.sentence
    assert outcome.sentence.endswith("; the second valid night in a row")


@pytest.mark.parametrize(("speed", "kind", "word"), [(50.0, "FAIL", "second valid night"), (45.0, "INSUFFICIENT", "HARDWARE")])
def test_a_drop_that_the_controls_explain_is_insufficient_not_failed(speed: float, kind: str, word: str) -> None:
    before = [replace_controls(one, 50.0) for one in NIGHTS.measurements]
    outcome = decide(
        at(5, 90.0, controls={"matmul": speed}), History(measurements=[*before, at(4, 90.0, controls={"matmul": speed})])
    )
    assert (outcome.kind, word in outcome.sentence) == (kind, True)


def replace_controls(one: Measurement, speed: float) -> Measurement:
    return dataclasses.replace(one, controls={"matmul": speed})


def test_another_method_is_told_with_a_fall() -> None:
    other = at(4, 90.0, result=result())
    other.result["measure"] |= {"method": 2, "tokens_per_second_per_device": 90.0}
    assert "what is timed has changed" in decide(other, NIGHTS).sentence
    assert "what is timed has changed" not in decide(at(4, 90.0), NIGHTS).sentence


def test_only_the_valid_measurements_of_the_series_are_compared_with() -> None:
    history = [
        at(3, 103.0),
        at(2, 102.0),
        at(2, 102.0),  # imported twice
        at(1, 9.0, invalid=("busy",)),
        at(1, 9.0, series="another"),
        at(1, 9.0, result=result(fx_errors=1)),
        dataclasses.replace(KILLED, time="2026-01-01T00:00:00+00:00"),
    ]
    outcome = decide(at(4, 103.0), History(measurements=history))
    assert (outcome.kind, "+0.5% to the median of 2 nights" in outcome.sentence) == ("PASS", True)


@pytest.mark.parametrize("history", [[], [measurement(series="another")], [measurement(invalid=("busy",))]])
def test_without_a_baseline_the_command_that_records_one_is_told(history: list[Measurement]) -> None:
    outcome = decide(at(4, 100.0), History(measurements=history), record="pytest regression/ --record-baseline")
    assert outcome.kind == "FAIL"
    assert "pytest regression/ --record-baseline" in outcome.sentence
    assert decide(at(4, 100.0), History(measurements=history)).kind == "INSUFFICIENT"


@pytest.mark.parametrize("bad", [measurement(invalid=("throttled",)), KILLED, measurement(result=result(measure={}))])
def test_a_throughput_that_does_not_count_is_insufficient_whatever_the_history(bad: Measurement) -> None:
    bad = dataclasses.replace(bad, time="2026-01-09T00:00:00+00:00")
    for history, record in ((History(), "record"), (History(), None), (NIGHTS, "record")):
        assert decide(bad, history, record=record).kind == "INSUFFICIENT"


def test_attempts_end_with_the_first_that_counts_and_every_invalid_one_is_told() -> None:
    given = [measurement(invalid=("busy",)), measurement(), measurement()]
    told: list[str] = []
    assert measure_until_valid(lambda n: given[n - 1], attempts=3, tell=told.append) == given[:2]
    assert told == ["attempt 1 of 3 is INVALID: busy"]


def test_attempts_are_bounded_and_a_failed_run_is_not_tried_again() -> None:
    busy = measurement(invalid=("busy",))
    assert len(measure_until_valid(lambda _: busy, attempts=3, tell=lambda _: None)) == 3
    assert len(measure_until_valid(lambda _: KILLED, attempts=3, tell=lambda _: None)) == 1


def test_a_baseline_is_read_back_without_its_steps(tmp_path: Any) -> None:
    given = [at(day, 100.0) for day in (1, 2, 3)]
    path = baseline.record(given, tmp_path)
    assert path.name == "tiny-cpu-on-cpu-2-x-1-s-0123456789ab.json"
    assert baseline.load(SERIES, tmp_path) == [dataclasses.replace(one, steps={}) for one in given]
    assert baseline.load("another", tmp_path) == []
    both = History(measurements=given).with_baseline(baseline.load(SERIES, tmp_path))
    assert [night.recorded for night in nights(both, SERIES)] == [True] * 3


BUSY = measurement(invalid=("busy",), time="2026-01-08T00:00:00+00:00")


@pytest.mark.parametrize("bad", [BUSY, KILLED, measurement(result=result(fx_errors=1))])
def test_measurements_that_do_not_count_become_no_baseline(tmp_path: Any, bad: Measurement) -> None:
    for given, count in (([bad], "0 of 1"), ([bad, at(2, 1.0), at(3, 1.0)], "2 of 3")):
        with pytest.raises(BaselineError, match=f"not recorded: {count} measurements count"):
            baseline.record(given, tmp_path)
    assert list(tmp_path.iterdir()) == []
    baseline.record([bad, *(at(day, 100.0) for day in (2, 3, 4))], tmp_path)
    assert [one.time[8:10] for one in baseline.load(SERIES, tmp_path)] == ["02", "03", "04"]


def test_measurements_of_several_series_become_no_baseline(tmp_path: Any) -> None:
    with pytest.raises(BaselineError, match="the machine changed"):
        baseline.record([at(1, 1.0), at(2, 1.0, series="another")], tmp_path)


def test_files_of_an_earlier_format_are_named_and_baselines_are_not(tmp_path: Any) -> None:
    baseline.record([measurement()], tmp_path)
    (tmp_path / "old.json").write_text('{"command": "c", "fingerprint": {}, "result": {}}')
    (tmp_path / "torn.json").write_text("{")
    (tmp_path / "result.json").write_text('{"kind": "result"}')  # what a command printed, kept beside the baselines
    told = baseline.earlier_formats(tmp_path)
    assert [sentence.partition(":")[0] for sentence in told] == ["old.json", "torn.json"]
    assert "lacks series and measurements" in told[0]
    committed = [sentence.partition(":")[0] for sentence in baseline.earlier_formats()]
    assert committed == ["h200-qwen3-8b.json", "h200-smollm2-135m-evaluate.json", "h200-smollm2-135m.json"]


def test_a_baseline_of_one_measurement_fails_nothing(tmp_path: Any) -> None:
    baseline.record([at(1, 100.0)], tmp_path)
    history = History().with_baseline(baseline.load(SERIES, tmp_path))
    outcome = decide(at(3, 50.0), history.with_measurements([at(2, 50.0)]), record="r")
    assert (outcome.kind, "noise unknown" in outcome.sentence) == ("INSUFFICIENT", True)


def test_a_baseline_is_as_tight_as_its_spread(tmp_path: Any) -> None:
    for values, kind in (([100.0, 100.5, 99.5, 100.2, 99.8], "FAIL"), ([100.0, 108.0, 92.0, 105.0, 95.0], "PASS")):
        baseline.record([at(day, value) for day, value in enumerate(values, start=1)], tmp_path)
        history = History().with_baseline(baseline.load(SERIES, tmp_path))
        assert decide(at(9, 90.0), history.with_measurements([at(8, 90.0)])).kind == kind


@pytest.mark.parametrize("content", ["torn", "[]", '{"measurements": [{}]}', '{"schema_version": 2, "measurements": []}'])
def test_a_file_that_is_no_baseline_is_refused_with_what_to_do(tmp_path: Any, content: str) -> None:
    baseline.path_of(SERIES, tmp_path).write_text(content)
    with pytest.raises(BaselineError, match="record it again"):
        baseline.load(SERIES, tmp_path)
