"""Laws of the simulation: the noise is what it says, the production code decides, a missed bound is an error."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from regression import gate, simulate, watch
from regression import simulate_machine as wandering
from regression.simulate import Result
from regression.verdict import Kind


def generator() -> np.random.Generator:
    return np.random.default_rng(7)


def test_nights_have_the_stated_deviation_correlation_and_outliers() -> None:
    logarithms = np.log(simulate.throughputs(400, 200, generator(), outliers=0.0))
    assert logarithms.std() == pytest.approx(simulate.NIGHT_SD, rel=0.02)
    assert np.corrcoef(logarithms[:, :-1].ravel(), logarithms[:, 1:].ravel())[0, 1] == pytest.approx(0.3, abs=0.02)
    slow = np.array(simulate.throughputs(400, 200, generator())) < 0.955  # 4.5 standard deviations, or an outlier
    assert slow.mean() == pytest.approx(simulate.OUTLIERS, abs=0.002)


def test_the_loss_begins_with_its_night() -> None:
    values = np.array(simulate.throughputs(400, 20, generator(), loss=0.1, since=15))
    assert np.median(values[:, 14]) == pytest.approx(1.0, abs=0.003)
    assert np.median(values[:, 15]) == pytest.approx(0.9, abs=0.003)


def test_drift_cancels_over_two_pairs_in_abba_order() -> None:
    pairs = [pair for _ in range(500) for pair in simulate.source(0.02, generator())(8)]
    ratios = np.log([pair.candidate / pair.baseline for pair in pairs])
    assert [pair.number for pair in pairs[:8]] == list(range(1, 9))
    assert np.exp(ratios.mean()) == pytest.approx(0.98, abs=0.001)


def test_further_pairs_have_new_numbers() -> None:
    more = simulate.source(0.0, generator())
    assert [pair.number for count in (8, 4) for pair in more(count)] == list(range(1, 13))


def test_a_threshold_at_the_tolerance_misses_what_the_rule_finds() -> None:
    rates = [
        simulate.gate_rate(replace(gate.DEFAULT, fail_loss=threshold), 0.02, Kind.FAIL, generator(), runs=300)[0]
        for threshold in (0.02, 0.015)
    ]
    assert rates[0] < 0.8
    assert rates[1] > 0.95


def test_the_production_code_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "judge", lambda *_: gate.Verdict(kind=Kind.WIN, loss=0, interval=None, p=0, pairs=8, sentence=""))
    monkeypatch.setattr(watch, "median_and_limit", lambda reference: (1.0, 2.0 if len(reference) >= 30 else 0.0))
    assert simulate.gate_rate(gate.DEFAULT, 0.5, Kind.WIN, generator(), runs=5)[0] == 1.0
    values = simulate.throughputs(1, 32, generator())[0]
    assert simulate.kinds(values, 30, 0.0, None) == [Kind.SUSPECT, Kind.FAIL]
    assert simulate.kinds(values, 30, 0.0, generator()) == [Kind.CLEARED, Kind.CLEARED]


def test_an_alarm_is_counted_once_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = [Kind.SUSPECT, Kind.FAIL, Kind.FAIL, Kind.PASS, Kind.SUSPECT, Kind.FAIL]
    monkeypatch.setattr(simulate, "kinds", lambda *_: row)
    assert simulate.alarm_rate(generator(), gated=False)[0] == pytest.approx(2 * 100 / simulate._WATCHED)


def test_all_bounds_are_met_in_a_small_run(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (("_SERIES", 60), ("_STEPS", 300), ("_GATES", 600), ("_FRONTS", 100), ("_MACHINES", 10))
    for name, size in sizes:
        monkeypatch.setattr(simulate, name, size)
    results = list(simulate.simulate(seed=0))
    assert [result.name for result in results if result.met is False] == []
    assert sum(result.met is True for result in results) == 15


def test_the_machine_moves_throughput_and_controls_alike_and_a_loss_only_the_throughput() -> None:
    assert wandering.night(0, 0.1, 0.8, generator(), controls=True, sd=0.0).value == pytest.approx(0.9 * 0.8)
    one = generator()
    nights = [wandering.night(number, 0.5, 0.8, one, controls=True, sd=0.0) for number in range(2000)]
    draws = np.log([[rate for _, rate in night.controls] for night in nights])
    assert np.mean(draws) == pytest.approx(np.log(0.8), abs=0.001)
    assert np.std(draws) == pytest.approx(wandering.CONTROL_SD, rel=0.05)
    assert wandering.night(0, 0.0, 1.0, generator(), controls=False, sd=0.0).controls == ()


def test_without_controls_a_slower_machine_fails_and_with_them_it_is_undecided() -> None:
    kinds = [wandering.front_kind(0.0, 0.8, generator(), controls=controls) for controls in (False, True)]
    assert kinds == [Kind.FAIL, Kind.HARDWARE]


def test_rows_of_failures_are_counted_once() -> None:
    assert wandering.rows([Kind.FAIL, Kind.FAIL, Kind.PASS, Kind.HARDWARE, Kind.FAIL]) == 2


def test_a_table_that_cannot_be_written_is_refused_before_the_work(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        simulate.main(["--json", str(tmp_path / "none" / "table.json")])
    assert stopped.value.code == 2
    assert "there is no directory" in capsys.readouterr().err


def test_one_seed_gives_one_result() -> None:
    runs = [simulate.gate_rate(gate.DEFAULT, 0.015, Kind.FAIL, np.random.default_rng(seed), runs=50) for seed in (1, 1)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("at_most", "at_least", "met"),
    [(0.5, None, True), (0.4, None, False), (None, 0.5, True), (None, 0.6, False), (None, None, None)],
)
def test_a_bound_is_met_by_the_value(at_most: float | None, at_least: float | None, met: bool | None) -> None:
    assert Result(name="x", value=0.5, error=0.1, at_most=at_most, at_least=at_least).met is met


@pytest.mark.parametrize(("bound", "code"), [(0.9, 0), (0.1, 1)])
def test_a_missed_bound_is_shown_and_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, bound: float, code: int
) -> None:
    lines = [Result(name="alarms", value=0.5, error=0.01, at_most=bound), Result(name="shown", value=1.0, error=0.0)]
    monkeypatch.setattr(simulate, "simulate", lambda seed: iter(lines if seed == 5 else ()))
    file = tmp_path / "table.json"
    assert simulate.main(["--json", str(file), "--seed", "5"]) == code
    shown = capsys.readouterr().out
    assert ("NO" in shown) == bool(code)
    assert "alarms" in shown
    written = json.loads(file.read_text())
    assert (written["seed"], [line["met"] for line in written["results"]]) == (5, [not code, None])
