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

from regression import baseline
from regression import conftest as front
from regression.measurement import Measurement
from regression.store import Store

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
    """Runs pytest in this process, with recorded measurements (one an attempt) and a recorded report of fxprobe."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.directory, self._monkeypatch, self._capsys = directory, monkeypatch, capsys

    def __call__(
        self, *measured: Measurement, report: dict[str, Any] = CLEAN_REPORT, options: tuple[str, ...] = (), earlier: float = 0.0
    ) -> Run:
        """`earlier`: the throughput of a baseline, 0 for none."""
        if earlier:
            baseline.record(measurement(per_device=earlier, time="2025-12-01T00:00:00+00:00"), self.directory / "baselines")
        with self._monkeypatch.context() as patch:
            patch.chdir(ROOT)
            patch.setattr(front, "run_and_measure", lambda _spec, place, **_: measured[int(place.name[-1]) - 1])
            patch.setattr(front, "run_to_success", lambda command, **_: self._write(command, report))
            patch.setattr(front.environment, "series_key", lambda _: "0123456789ab")
            code = pytest.main([*self._arguments(), *options])
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


def test_a_drop_fails_the_throughput_item_with_its_verdict(run_front: Front) -> None:
    run = run_front(measurement(per_device=90.0), earlier=100.0)
    assert run.code == 1
    assert set(run.failed) == {"test_throughput_has_not_fallen"}
    assert "90.0 tok/s per device, SUSPECT: -10.0% to the median" in run.failed["test_throughput_has_not_fallen"]
    assert "FAILED regression/test_training.py::test_throughput_has_not_fallen" in run.output


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
    assert len(Store(run_front.directory / "store").read()[0]) == 1  # both attempts are equal here


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
    recorded = run_front(measurement(), options=("--record-baseline",))
    assert (recorded.code, recorded.failed) == (0, {}), recorded.output
    assert baseline.load(SERIES, run_front.directory / "baselines") == [dataclasses.replace(measurement(), steps={})]
    assert run_front(measurement(per_device=80.0, time="2026-01-02T00:00:00+00:00")).code == 1


def test_a_measurement_that_does_not_count_becomes_no_baseline(run_front: Front) -> None:
    busy = measurement(invalid=("busy",))
    run = run_front(busy, busy, options=("--record-baseline",))
    assert run.code == 3
    assert run.failed == {
        "test_throughput_has_not_fallen": "INSUFFICIENT DATA: not recorded: the measurement does not count (busy)"
    }


@pytest.mark.parametrize(
    "options", [("--gpus", "1000"), ("--segments", "0"), ("--segment-seconds", "0"), ("-n", "2"), ("--attempts", "0")]
)
def test_what_would_measure_nothing_is_bad_usage(run_front: Front, options: tuple[str, ...]) -> None:
    run = run_front(measurement(), options=options)
    assert (run.code, run.passed) == (4, set()), run.output
    assert "ERROR" in run.output
