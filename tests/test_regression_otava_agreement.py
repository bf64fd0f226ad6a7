"""Laws of the comparison with Apache Otava; Otava itself is asked by `nox -s otava`."""

from __future__ import annotations

import dataclasses
import stat
import sys
from pathlib import Path

import numpy as np
import pytest

from regression import otava_agreement
from regression.otava_agreement import Answers, Difference, NotObservedError, ask_otava, differences, make_series

# The shape of what Otava 0.8.0 printed for one series with a change and one without.
RECORDED = (
    '{"series0": [{"time": 1769817600, "attributes": {}, "changes": [{"metric": "throughput", "index": 30, "time": 1769817600, '
    '"forward_change_percent": "-5", "magnitude": "0.053203", "mean_before": "100.121016", "stddev_before": "0.881764", '
    '"mean_after": "95.063400", "stddev_after": "0.834764", "pvalue": "0.000000"}]}]}\n{"series1": []}'
)


def command(path: Path, body: str) -> Path:
    """A program in place of `otava`."""
    path.write_text(f"#!{sys.executable}\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def answers(**points: list[int]) -> Answers:
    return Answers(**{field.name: {"s": points.get(field.name, [])} for field in dataclasses.fields(Answers)})


def causes(**points: list[int]) -> list[tuple[int, str, str]]:
    return [(one.night, one.only, one.cause) for one in differences(answers(**points), {"s": []})]


def test_series_change_where_planted_and_are_the_same_for_one_seed() -> None:
    series, planted = make_series()
    assert make_series()[0] == series
    assert make_series(1)[0] != series
    (night,) = planted["fall 10%"]
    values = np.array(series["fall 10%"])
    assert np.median(values[night:]) / np.median(values[:night]) == pytest.approx(0.9, abs=0.01)
    assert planted["steady"] == []


def test_points_of_one_night_or_nearly_agree() -> None:
    assert causes(ours=[10, 40], otava=[13, 37]) == []


@pytest.mark.parametrize(
    ("experiment", "cause"),
    [
        ({"ours_independent": [9]}, "correlation"),
        ({"ours_half_penalty": [12]}, "threshold"),
        ({"ours_independent_half_penalty": [10]}, "correlation and threshold"),
        ({"otava_without_outliers": []}, "outliers"),
        ({"otava_one_window": []}, "window"),
        ({}, ""),
    ],
)
def test_what_only_otava_reports_goes_with_its_cause(experiment: dict[str, list[int]], cause: str) -> None:
    same = {"otava": [10], "otava_without_outliers": [10], "otava_one_window": [10]}
    assert causes(**{**same, **experiment}) == [(10, "Otava", cause)]


@pytest.mark.parametrize(
    ("experiment", "cause"),
    [
        ({"otava_without_outliers": [10]}, "outliers"),
        ({"otava_larger_p": [10]}, "threshold"),
        ({"otava_without_outliers_larger_p": [10]}, "outliers and threshold"),
        ({"otava_one_window": [8]}, "window"),
        ({"ours_more_replaced": []}, "dense outliers"),
        ({}, ""),
    ],
)
def test_what_only_we_report_goes_with_its_cause(experiment: dict[str, list[int]], cause: str) -> None:
    assert causes(**{"ours": [10], "ours_more_replaced": [10], **experiment}) == [(10, "ours", cause)]


def test_one_change_in_two_places_is_said_to_be_that() -> None:
    assert causes(ours=[10], otava=[18]) == [(10, "ours", "place"), (18, "Otava", "place")]


def test_planted_differences_are_marked() -> None:
    assert differences(answers(ours=[50], otava_larger_p=[50]), {"s": [51]}) == [Difference("s", 50, "ours", True, "threshold")]


def test_the_answer_of_otava_is_read_and_its_input_is_csv(tmp_path: Path) -> None:
    copy = tmp_path / "seen"
    otava = command(
        tmp_path / "otava",
        "import json, os, pathlib, sys\n"
        "config = json.loads(pathlib.Path(os.environ['OTAVA_CONFIG']).read_text())\n"
        "first = pathlib.Path(config['tests']['series0']['file']).read_text()\n"
        f"pathlib.Path({str(copy)!r}).write_text(first + ' '.join(sys.argv[1:]))\n"
        f"print({RECORDED!r})",
    )
    assert ask_otava(otava, {"a": [1.5, 2.5], "b": [1.0]}, "-P", "0.01") == {"a": [30], "b": []}
    assert copy.read_text().split("\n") == [
        "time,throughput",
        "2025-01-01T00:00:00+00:00,1.5",
        "2025-01-02T00:00:00+00:00,2.5",
        "analyze series0 series1 --since 2024-01-01 --output json -P 0.01",
    ]


@pytest.mark.parametrize(
    ("body", "message"), [("print('{\"series0\": []}')", "exit code 0, 1 of 2 answers"), ("raise SystemExit(4)", "exit code 4")]
)
def test_a_missing_answer_is_not_taken_for_no_change(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(NotObservedError, match=message):
        ask_otava(command(tmp_path / "otava", body), {"a": [1.0], "b": [1.0]})


def test_without_otava_nothing_is_observed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert otava_agreement.main(["--otava", str(tmp_path / "none")]) == 3
    assert "not observed" in capsys.readouterr().out


@pytest.mark.parametrize(("half", "code"), [([30], 0), ([], 1)])
def test_an_unexplained_difference_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], half: list[int], code: int
) -> None:
    same = {"otava": [30], "otava_without_outliers": [30], "otava_one_window": [30], "ours_half_penalty": half}
    monkeypatch.setattr(otava_agreement, "make_series", lambda _seed: ({"s": [1.0]}, {"s": []}))
    monkeypatch.setattr(otava_agreement, "ask_both", lambda *_: answers(**same))
    assert otava_agreement.main(["--otava", "otava"]) == code
    shown = capsys.readouterr().out
    assert ("UNEXPLAINED" in shown) == bool(code)
    assert f"0 of 1 series agree; 1 differences, {code} unexplained" in shown
