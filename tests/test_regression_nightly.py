"""Laws of the nightly command: what it decides, and what it leaves behind."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from helpers_regression import failed, measurement, result

from regression import nightly
from regression.measurement import Measurement
from regression.nightly import exit_code, judge, main, read
from regression.store import Store


def night(number: int, per_device: float = 100.0, **changes: Any) -> Measurement:
    return measurement(per_device=per_device, time=f"2026-01-{number:02}T00:00:00+00:00", **changes)


HISTORY = [night(1, 99.0), night(2, 100.0), night(3, 101.0)]


def test_a_night_like_the_others_is_fine() -> None:
    assert exit_code(judge(night(4), HISTORY)) == 0


def test_a_first_drop_is_open_and_a_second_in_a_row_fails() -> None:
    outcomes = judge(night(4, 90.0), HISTORY)
    assert {name for name, outcome in outcomes.items() if outcome.kind != "PASS"} == {"throughput"}
    assert exit_code(outcomes) == 3
    assert exit_code(judge(night(5, 90.0), [*HISTORY, night(4, 90.0)])) == 1


@pytest.mark.parametrize("key", ["fx_errors", "recompiles_after_warmup", "fallbacks"])
def test_a_problem_fails_whatever_the_history(key: str) -> None:
    assert exit_code(judge(night(4, result=result(**{key: 1}), invalid=("busy",)), HISTORY)) == 1


def test_a_first_night_and_an_invalid_one_are_insufficient_not_failed() -> None:
    assert exit_code(judge(night(4), [])) == 3
    assert exit_code(judge(night(4, invalid=("busy",)), HISTORY)) == 3
    assert exit_code(judge(night(4, 50.0), [night(1, invalid=("busy",))])) == 3


def test_a_run_that_failed_fails() -> None:
    assert exit_code(judge(failed("WorkerFailed", "why"), HISTORY)) == 1


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Measurement]:
    """The command without training: it takes these measurements, one an attempt."""
    waiting: list[Measurement] = []

    def measure(_spec: Any, directory: Path, *, timeout_seconds: float, baseline_clock_mhz: float | None) -> Measurement:
        assert timeout_seconds > 0
        assert baseline_clock_mhz is None
        assert not directory.exists()
        return waiting.pop(0)

    monkeypatch.setattr(nightly, "measure", measure)
    return waiting


def test_every_attempt_is_kept_and_the_last_one_decides(
    tmp_path: Path, measured: list[Measurement], capsys: pytest.CaptureFixture[str]
) -> None:
    measured += [night(1), night(2, invalid=("busy",)), night(3, 99.0), night(4, 90.0), night(5, 90.0)]
    codes = [main(["--output", str(tmp_path / "nights"), "--gpus", "0"]) for _ in range(4)]
    assert codes == [3, 0, 3, 1]
    history, _, problems = read(Store(tmp_path / "nights" / "store"))
    assert ([one.per_device for one in history], problems) == ([100.0, 100.0, 99.0, 90.0, 90.0], [])
    told = capsys.readouterr().err
    assert "attempt 1 of 3 is INVALID: busy" in told
    assert "FAIL throughput: 90.0 tok/s per device" in told


def test_a_night_that_cannot_be_read_is_told_and_the_others_count(
    tmp_path: Path, measured: list[Measurement], capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(tmp_path / "store")
    store.add(night(1).to_record())
    store.add({"kind": "measurement", "series": "s", "time": "2026-01-01T00:00:00+00:00", "version": "another"})
    store.accept("s", "why")
    measured.append(night(2))
    assert main(["--output", str(tmp_path)]) == 0
    assert "in another format, skipped" in " ".join(capsys.readouterr().err.split())


def test_only_nights_of_the_same_series_are_compared(tmp_path: Path, measured: list[Measurement]) -> None:
    Store(tmp_path / "store").add(dataclasses.replace(night(1, 500.0), series="another").to_record())
    measured.append(night(2))
    assert main(["--output", str(tmp_path)]) == 3


@pytest.mark.parametrize("change", [["--gpus", "-1"], ["--gpus", "1000"], ["--attempts", "0"], ["--segment-seconds", "0"], None])
def test_bad_usage_is_told_before_anything_runs(tmp_path: Path, measured: list[Measurement], change: list[str] | None) -> None:
    with pytest.raises(SystemExit) as stop:
        main([] if change is None else ["--output", str(tmp_path), *change])
    assert (stop.value.code, measured) == (2, [])
