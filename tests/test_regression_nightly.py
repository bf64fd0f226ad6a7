"""Laws of the nightly command: what it decides, and what it leaves behind."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from test_regression_measurement import measurement

from regression import nightly
from regression.child import ChildFailed
from regression.measurement import Measurement
from regression.nightly import MIN_NIGHTS, judge, main, read_series
from regression.spec import RunSpec
from regression.store import Store


def nights(*rates: float) -> list[Measurement]:
    return [measurement(tokens_per_second=rate) for rate in rates]


def test_a_clean_night_with_history_is_fine_and_shows_its_ratio_to_the_median() -> None:
    verdict = judge(measurement(tokens_per_second=90.0), nights(100.0, 100.0, 1000.0, 100.0, 1.0))
    assert (verdict.status, verdict.exit_code, verdict.ratio, verdict.nights) == ("fine", 0, 0.9, 5)
    assert "tokens per second: 0.900 of the median of 5 earlier nights (shown, not judged)" in verdict.sentences


@pytest.mark.parametrize("key", ["fx_errors", "recompiles_after_warmup", "fallbacks"])
def test_a_problem_fails_whatever_the_history(key: str) -> None:
    verdict = judge(measurement(**{key: 1}, invalid=("busy",)), [])
    assert (verdict.status, verdict.exit_code) == ("failed", 1)


def test_fewer_than_five_nights_are_insufficient() -> None:
    verdict = judge(measurement(), nights(*[100.0] * (MIN_NIGHTS - 1)))
    assert (verdict.status, verdict.exit_code) == ("insufficient history", 3)
    assert judge(measurement(), []).ratio is None


def test_an_invalid_night_is_neither_pass_nor_fail() -> None:
    verdict = judge(measurement(invalid=("busy",)), nights(*[100.0] * 9))
    assert (verdict.status, verdict.exit_code) == ("invalid", 3)


def test_invalid_and_failed_nights_are_no_history() -> None:
    bad = [measurement(invalid=("busy",), tokens_per_second=1.0), measurement(fx_errors=1, tokens_per_second=1.0)]
    assert judge(measurement(tokens_per_second=50.0), [*nights(100.0), *bad]).ratio == 0.5


def test_only_nights_of_the_same_series_are_compared(tmp_path: Path) -> None:
    store = Store(tmp_path / "history.jsonl")
    for series in ("a", "b", "a"):
        store.append(dataclasses.replace(measurement(), series=series).to_dict())
    store.append({"version": "another"})
    history, problems = read_series(store, "a")
    assert len(history) == 2
    assert len(problems) == 1


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[RunSpec]:
    """The command without training: what it measures is recorded, and what it asked for is returned."""
    asked: list[RunSpec] = []

    def measure(spec: RunSpec, directory: Path, *, timeout_seconds: float) -> Measurement:
        assert timeout_seconds > 0
        assert not directory.exists()
        asked.append(spec)
        return measurement()

    def data(output: Path, *, timeout_seconds: float) -> Path:
        assert timeout_seconds > 0
        return output / "data"

    monkeypatch.setattr(nightly, "measure", measure)
    monkeypatch.setattr(nightly, "prepare_data", data)
    return asked


def test_each_night_is_appended_and_the_sixth_has_enough_history(
    tmp_path: Path, measured: list[RunSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    codes = [main(["--output", str(tmp_path / "nights")]) for _ in range(MIN_NIGHTS + 1)]
    assert codes == [3] * MIN_NIGHTS + [0]
    entries, problems = Store(tmp_path / "nights" / "history.jsonl").read()
    assert (len(entries), problems, len(measured)) == (MIN_NIGHTS + 1, [], MIN_NIGHTS + 1)
    assert "tok/s per device" in capsys.readouterr().err


def test_a_torn_history_is_reported_and_the_night_still_counts(
    tmp_path: Path, measured: list[RunSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"series": "s", "torn')
    assert main(["--output", str(tmp_path)]) == 3
    assert "torn or not ours" in " ".join(capsys.readouterr().err.split())
    assert len(Store(path).read()[0]) == len(measured) == 1


def test_a_run_without_result_fails_and_shows_why(
    tmp_path: Path, measured: list[RunSpec], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_arguments: Any, **_keywords: Any) -> Measurement:
        raise ChildFailed("ended with exit code 2: the [reason]")

    monkeypatch.setattr(nightly, "measure", fails)
    assert main(["--output", str(tmp_path)]) == 1
    assert "the [reason]" in capsys.readouterr().err
    assert measured == []
    assert not (tmp_path / "history.jsonl").exists()


@pytest.mark.parametrize("arguments", [[], ["--gpus", "-1"], ["--gpus", "1000"]])
def test_bad_usage_is_told_before_anything_runs(tmp_path: Path, measured: list[RunSpec], arguments: list[str]) -> None:
    where = ["--output", str(tmp_path)] if arguments else []
    with pytest.raises(SystemExit) as stop:
        main([*where, *arguments])
    assert (stop.value.code, measured) == (2, [])
