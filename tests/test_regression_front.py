"""Laws of `pytest regression/`: what fails, where it shows, and with which exit code. Recorded runs, real pytest."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers_regression import SERIES, failed, measurement, result

from regression import ab, baseline, gate, probing
from regression import conftest as front
from regression.measurement import Measurement
from regression.sides import SideError
from regression.store import Store
from regression.verdict import Kind

ROOT = Path(__file__).parent.parent
CLEAN_REPORT: dict[str, Any] = {"findings": [], "program_exit_code": 0, "not_observed": []}
FINDING = {"id": "F1", "who": ["a"], "where": ["b"], "why": "why", "what": "a victim met a trace.", "what_to_do": "isolate"}
RECOMPILED = failed("RecompileError", "compiled after warm-up:\n- forward")


@dataclass
class Run:
    code: int
    output: str
    failed: dict[str, str]  # item -> text of its failure in JUnit
    passed: set[str]


class Front:
    """Runs pytest in this process, with recorded measurements (one a minute) and a recorded report of fxprobe."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.directory, self._monkeypatch, self._capsys = directory, monkeypatch, capsys

    def __call__(
        self, *measured: Measurement, report: dict[str, Any] = CLEAN_REPORT, options: tuple[str, ...] = (), earlier: float = 0.0
    ) -> Run:
        """`earlier`: the throughput of a baseline of three measurements, 0 for none."""
        if earlier:
            recorded = [measurement(per_device=earlier, time=f"2025-12-3{day}T00:00:00+00:00") for day in (0, 1)]
            recorded.append(measurement(per_device=earlier, time="2025-12-29T00:00:00+00:00"))
            baseline.record(recorded, self.directory / "baselines")
        waiting = [dataclasses.replace(one, time=f"{one.time[:14]}{n:02}:00+00:00") for n, one in enumerate(measured)]
        with self._monkeypatch.context() as patch:
            patch.chdir(ROOT)
            patch.setattr(front, "run_and_measure", lambda *_, **__: waiting.pop(0))
            patch.setattr(probing, "run_to_success", lambda command, **_: self._write(command, report))
            patch.setattr(front.environment, "series_key", lambda _: "0123456789ab")
            code = pytest.main([*self._arguments(), *options])
        assert code == 4 or not waiting
        told = self._capsys.readouterr()
        return read(int(code), told.out + told.err, self.directory / "junit.xml")

    def _arguments(self) -> list[str]:
        return [
            *("-s", "-p", "no:cacheprovider", "-p", "no:faulthandler", "regression/", "--gpus", "0", "--attempts", "2"),
            *("--segments", "2", "--segment-seconds", "1", "--baselines", str(self.directory / "baselines")),
            *("--basetemp", str(self.directory / "temporary"), "--junitxml", str(self.directory / "junit.xml")),
        ]

    @staticmethod
    def _write(command: list[str], report: dict[str, Any]) -> None:
        Path(command[command.index("--json") + 1]).write_text(json.dumps(report))


def read(code: int, output: str, junit: Path) -> Run:
    cases = list(ET.parse(junit).getroot().iter("testcase")) if junit.exists() else []
    fails = {
        str(case.get("name")): str(found.get("message")) for case in cases for found in case if found.tag in ("failure", "error")
    }
    return Run(code, output, fails, {str(case.get("name")) for case in cases} - set(fails))


@pytest.fixture
def run_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Front:
    return Front(tmp_path, monkeypatch, capsys)


def test_a_clean_run_passes_and_skips_nothing(run_front: Front) -> None:
    run = run_front(measurement(), earlier=100.0)
    assert (run.code, run.failed, len(run.passed)) == (0, {}, 7), run.output
    assert "skipped" not in run.output
    assert "test_throughput_has_not_fallen: PASS: 100.0 tok/s per device" in run.output


def test_a_drop_that_the_second_measurement_confirms_fails_the_throughput_item_with_its_verdict(run_front: Front) -> None:
    run = run_front(measurement(per_device=90.0), measurement(per_device=91.0), earlier=100.0)
    assert run.code == 1
    assert set(run.failed) == {"test_throughput_has_not_fallen"}
    assert "91.0 tok/s per device, -9.0% to the median of 3 nights" in run.failed["test_throughput_has_not_fallen"]
    assert "measurement 1 of at most 2, 90.0 tok/s per device, measured again: SUSPECT" in run.output
    assert "FAILED regression/test_training.py::test_throughput_has_not_fallen" in run.output


def test_a_drop_that_the_second_measurement_does_not_confirm_passes(run_front: Front) -> None:
    run = run_front(measurement(per_device=90.0), measurement(per_device=99.0), earlier=100.0)
    assert (run.code, run.failed) == (0, {}), run.output


def test_a_drop_that_cannot_be_confirmed_is_insufficient(run_front: Front) -> None:
    busy = measurement(per_device=90.0, invalid=("busy",))
    run = run_front(measurement(per_device=90.0), busy, busy, earlier=100.0)
    assert (run.code, run.failed) == (3, {"test_throughput_has_not_fallen": "INSUFFICIENT DATA: INVALID: busy"})


def test_a_fault_fails_the_item_of_its_name(run_front: Front) -> None:
    fallen = measurement(result=result(fallbacks=2), returncode=1)
    report = {**CLEAN_REPORT, "findings": [{**FINDING, "severity": "error"}]}
    run = run_front(fallen, report=report, earlier=100.0)
    assert run.code == 1
    assert set(run.failed) == {"test_training_never_falls_back_to_uncompiled_code", "test_fxprobe_finds_no_error"}
    assert "F1: a victim met a trace. isolate" in run.failed["test_fxprobe_finds_no_error"]


def test_a_hazard_warns_and_is_counted(run_front: Front) -> None:
    run = run_front(measurement(), report={**CLEAN_REPORT, "findings": [{**FINDING, "severity": "hazard"}]}, earlier=100.0)
    assert run.code == 0, run.output
    assert "HazardWarning: F1: a victim met a trace." in run.output
    assert 'name="hazards" value="1"' in (run_front.directory / "junit.xml").read_text()


def test_a_run_that_recompiled_fails_that_item_and_the_others_are_open(run_front: Front) -> None:
    run = run_front(RECOMPILED, earlier=100.0)
    assert run.code == 1
    assert "compiled after warm-up" in run.failed["test_training_compiles_nothing_after_the_warm_up"]
    assert run.passed == {"test_fxprobe_finds_no_error"}
    assert run.failed["test_memory_does_not_rise"].startswith("INSUFFICIENT DATA")


def test_a_throughput_that_never_counts_is_insufficient_data_with_exit_code_3(run_front: Front) -> None:
    busy = measurement(invalid=("somebody was busy",))
    run = run_front(busy, busy, options=("--store", str(run_front.directory / "store"), "--color", "yes"), earlier=100.0)
    assert run.code == 3, run.output
    assert run.failed == {"test_throughput_has_not_fallen": "INSUFFICIENT DATA: INVALID: somebody was busy"}
    assert "attempt 1 of 2 is INVALID: somebody was busy" in run.output
    assert "\x1b[35m" in run.output  # purple
    assert len(Store(run_front.directory / "store").read()[0]) == 2


def test_the_second_attempt_counts(run_front: Front) -> None:
    run = run_front(measurement(invalid=("busy",)), measurement(per_device=101.0), earlier=100.0)
    assert (run.code, run.failed) == (0, {}), run.output


def test_without_a_baseline_the_item_fails_with_the_command_and_the_command_works(run_front: Front) -> None:
    run = run_front(measurement())
    told = run.failed["test_throughput_has_not_fallen"]
    assert run.code == 1
    assert "no baseline of the series" in told
    assert "\n    pytest regression/ --gpus 0 --segments 2 --segment-seconds 1 --baselines " in told
    assert told.endswith(" --record-baseline")
    recorded = run_front(*[measurement()] * 5, options=("--record-baseline",))
    assert (recorded.code, recorded.failed) == (0, {}), recorded.output
    assert len(baseline.load(SERIES, run_front.directory / "baselines")) == 5
    later = "2026-01-02T00:00:00+00:00"
    assert run_front(measurement(per_device=80.0, time=later), measurement(per_device=80.0, time=later)).code == 1


def test_measurements_that_do_not_count_become_no_baseline(run_front: Front) -> None:
    busy = measurement(invalid=("busy",))
    run = run_front(busy, busy, measurement(), options=("--record-baseline", "--baseline-measurements", "2"))
    assert run.code == 3
    assert run.failed == {
        "test_throughput_has_not_fallen": "INSUFFICIENT DATA: not recorded: 1 of 2 measurements count, 2 are needed (busy)"
    }


def test_a_drop_that_the_controls_explain_is_measured_again_and_insufficient_not_failed(run_front: Front) -> None:
    base = [measurement(time=f"2025-12-1{day}T00:00:00+00:00", controls={"matmul": 50.0}) for day in range(3)]
    baseline.record(base, run_front.directory / "baselines")
    slow_machine, slow_code = (measurement(per_device=90.0, controls={"matmul": speed}) for speed in (45.0, 50.0))
    run = run_front(slow_machine, slow_machine, options=("--color", "yes"))
    assert (run.code, set(run.failed)) == (3, {"test_throughput_has_not_fallen"}), run.output
    assert "the machine changed" in run.failed["test_throughput_has_not_fallen"]
    assert "measured again: HARDWARE: -10.0%" in run.output
    assert "\x1b[35m" in run.output  # purple
    assert run_front(slow_code, slow_code).code == 1
    assert run_front(slow_machine, slow_code, slow_code, options=("--attempts", "3")).code == 1


def test_files_of_an_earlier_format_are_told(run_front: Front) -> None:
    (run_front.directory / "baselines").mkdir()
    (run_front.directory / "baselines" / "old.json").write_text("{}")
    assert "baseline: old.json: in another format" in run_front(measurement(), earlier=100.0).output


def verdict(kind: Kind, loss: float = 0.1) -> gate.Verdict:
    return gate.Verdict(kind=kind, loss=loss, interval=(0.0, 0.2), p=0.001, pairs=8, sentence=f"{kind}: as measured")


@pytest.mark.parametrize(("kind", "code"), [(Kind.FAIL, 1), (Kind.PASS, 0), (Kind.INSUFFICIENT, 3)])
def test_with_a_baseline_commit_the_gate_judges_whatever_is_stored(
    run_front: Front, monkeypatch: pytest.MonkeyPatch, kind: Kind, code: int
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        ab, "compare", lambda commit, spec, _, **given: asked.update(given, commit=commit, spec=spec) or verdict(kind)
    )
    options = ("--baseline-commit", "HEAD", "--burn-share", "0.1", "--tolerance", "0.04", "--pairs", "3", "--busy-counts")
    run = run_front(measurement(per_device=50.0, invalid=("busy",)), options=options, earlier=100.0)
    assert run.code == code, run.output
    assert (set(run.failed) == {"test_throughput_has_not_fallen"}) == bool(code)
    assert (asked["commit"], asked["spec"].segments, asked["busy_counts"]) == ("HEAD", 1, True)
    assert asked["planted"] == ("--measure.burn-share", "0.1")  # the candidate's only
    assert (asked["spec"].planted, asked["rule"].fail_loss, asked["rule"].looks) == ((), pytest.approx(0.03), (3,))
    assert 'name="loss" value="0.1"' in (run_front.directory / "junit.xml").read_text()


def test_a_win_writes_the_baseline_that_the_next_run_is_judged_by(run_front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ab, "compare", lambda *_, **__: verdict(Kind.WIN, loss=-0.1))
    pairs = ("--baseline-commit", "HEAD", "--baseline-measurements", "3")
    run = run_front(*[measurement(per_device=120.0)] * 3, options=pairs, earlier=100.0)
    assert (run.code, run.failed) == (0, {}), run.output
    path = baseline.path_of(SERIES, run_front.directory / "baselines")
    assert f"baseline written, commit it: {path}" in run.output
    assert [one.per_device for one in baseline.load(SERIES, path.parent)] == [120.0] * 3
    later = [measurement(per_device=100.0, time="2026-01-02T00:00:00+00:00")] * 2
    assert run_front(*later).code == 1


def test_a_win_with_a_planted_slowdown_writes_nothing(run_front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ab, "compare", lambda *_, **__: verdict(Kind.WIN))
    run = run_front(measurement(), options=("--baseline-commit", "HEAD", "--burn-share", "0.1"))
    assert (run.code, "Nothing is written" in run.output) == (0, True)
    assert not (run_front.directory / "baselines").exists()


def test_a_comparison_that_does_not_run_is_insufficient(run_front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise SideError("cannot check out")

    monkeypatch.setattr(ab, "compare", fail)
    run = run_front(measurement(), options=("--baseline-commit", "HEAD"))
    assert (run.code, "the comparison did not run: cannot check out" in run.output) == (3, True)


@pytest.mark.parametrize(
    "options",
    [
        ("--gpus", "1000"),
        ("--segments", "0"),
        ("--segment-seconds", "0"),
        ("-n", "2"),
        ("--attempts", "0"),
        ("--baseline-measurements", "0"),
        ("--pairs", "1"),
        ("--tolerance", "0"),
        ("--baseline-commit", "no-such-commit"),
        ("--baseline-commit", "HEAD", "--record-baseline"),
    ],
)
def test_what_would_measure_nothing_is_bad_usage(run_front: Front, options: tuple[str, ...]) -> None:
    run = run_front(measurement(), options=options)
    assert (run.code, run.passed) == (4, set()), run.output
    assert "ERROR" in run.output
