"""Laws of one real measurement, shared by all tests here, and of what it is made from."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tyro
from helpers_regression import measurement, result

from dflash.config import ConfigError, MeasureConfig, RunConfig, Topology
from dflash.presets import preset
from regression import controls, laws
from regression import measurement as measurement_module
from regression.child import ChildResult
from regression.interval import batch_means, lag_one
from regression.measurement import Measurement, measure
from regression.spec import RunSpec, topology, visible_gpus, workers, workload
from regression.store import Store

SPEC = workload(0, segments=2, segment_seconds=1.0)
CPU_CONTROLS = {"python_loop_million_per_second", "numpy_matmul_gflops", "numpy_copy_gb_per_second"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    return measure(SPEC, tmp_path_factory.mktemp("real") / "one", timeout_seconds=800.0)


def test_a_real_measurement_holds_every_law(measured: Measurement) -> None:
    assert measured.failure is None
    assert laws.problems(measured) == []
    assert measured.name == "tiny-cpu on CPU, 2 x 1 s"


def test_a_real_measurement_has_its_numbers(measured: Measurement) -> None:
    segments = measured.result["measure"]["segments"]
    assert measured.per_device is not None
    assert measured.per_device == pytest.approx(
        sum(s["tokens"] for s in segments) / sum(s["seconds"] for s in segments) / 3
    )  # 1t+2d
    assert measured.steps["segment"].count(1) == segments[1]["steps"]
    assert measured.controls.keys() == CPU_CONTROLS
    assert all(rate > 0 for rate in measured.controls.values())
    assert measured.state["samples"] >= 1
    assert 0 <= measured.state["foreign_cpu_share"] <= 1


def test_a_real_measurement_goes_through_the_store_unchanged(measured: Measurement, tmp_path: Path) -> None:
    Store(tmp_path).add({**measured.to_record(), "problems": laws.problems(measured)})
    (record,), problems = Store(tmp_path).read(measured.series)
    assert (Measurement.from_record(record), problems) == (measured, [])
    frame, _ = Store(tmp_path).frame()
    assert frame["tokens_per_second_per_device"][0] == measured.per_device


def test_a_run_without_result_is_a_measurement_with_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controls, "run", lambda *_: {})
    spec = RunSpec(preset="tiny-cpu", gpus=0, segment_seconds=1.0, overrides=("--no-such-flag",))
    found = measure(spec, tmp_path / "one", timeout_seconds=800.0)
    assert found.failure is not None
    assert "no-such-flag" in found.failure["message"]
    assert (found.per_device, found.result, found.interval) == (None, {}, None)


def test_a_line_of_the_earlier_history_has_the_rate_of_its_whole_run() -> None:
    old = {"name": "n", "series": "s", "time": "t", "seconds": 1.0, "returncode": 0, "fingerprint": {}, "invalid": []}
    one = Measurement.from_record({**old, "result": {"tokens_per_second": 434.4, "tokens_per_second_per_device": 144.8}})
    assert (one.tokens_per_second, one.per_device) == (434.4, 144.8)


@pytest.mark.parametrize("value", [0, -1.0, None, float("nan"), float("inf"), "434"])
def test_a_throughput_that_is_no_positive_number_is_none(value: Any) -> None:
    one = measurement()
    one.result["measure"]["tokens_per_second_per_device"] = value
    assert one.per_device is None


@pytest.mark.parametrize("gpus", [0, 1, 2, 8])
def test_the_command_of_a_workload_is_one_that_the_trainer_accepts(gpus: int) -> None:
    spec = workload(gpus, segments=4, segment_seconds=7.0, planted=("--measure.burn-share", "0.1"))
    _, *command = spec.command(Path("out"))
    assert command[:3] == ["-m", "dflash", "train"]
    config = tyro.cli(RunConfig, default=preset(spec.preset), args=command[3:])
    assert config.measure == MeasureConfig(on=True, segments=4, segment_seconds=7.0, burn_share=0.1)
    assert (config.preset, config.output, config.telemetry.wandb) == (spec.preset, Path("out"), "off")
    used = Topology.parse(config.topology)
    assert gpus <= 1 or used.targets + used.drafters == gpus
    assert str(config.data.path).startswith("synthetic:")


def test_the_probed_command_trains_the_same_workload_without_measuring() -> None:
    spec = workload(0)
    command = spec.probed_command(Path("out"), Path("report.json"))
    train = command[command.index("--") + 1 :]
    assert train[:3] == ["-m", "dflash", "train"]
    config = tyro.cli(RunConfig, default=preset(spec.preset), args=train[3:])
    measuring = tyro.cli(RunConfig, default=preset(spec.preset), args=spec.command(Path("out"))[4:])
    assert not config.measure.on
    assert (config.data, config.drafter, config.topology) == (measuring.data, measuring.drafter, measuring.topology)


def test_a_planted_slowdown_belongs_to_the_series_that_it_slows() -> None:
    assert workload(0, planted=("--measure.burn-share", "0.1")).name == workload(0).name
    names = {workload(gpus, segments=n, segment_seconds=s).name for gpus in (0, 1) for n in (2, 3) for s in (1.0, 2.0)}
    assert len(names) == 8


def test_runs_are_pinned_to_the_first_of_the_visible_gpus() -> None:
    assert workload(0).variables["CUDA_VISIBLE_DEVICES"] == ""
    assert workload(2, environment={"CUDA_VISIBLE_DEVICES": "3, 5,7"}).variables["CUDA_VISIBLE_DEVICES"] == "3,5"
    assert visible_gpus(2, None) == ("0", "1")
    with pytest.raises(ConfigError, match="needs 4 GPUs, CUDA_VISIBLE_DEVICES=GPU-a names 1"):
        visible_gpus(4, "GPU-a")


@pytest.mark.parametrize("change", [{"gpus": -1}, {"segments": 0}, {"segment_seconds": 0.0}])
def test_impossible_workloads_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="use at least 1 segment"):
        RunSpec(**{"preset": "p", "gpus": 0, "segment_seconds": 1.0, **change})
    with pytest.raises(ConfigError):
        workload(**{"gpus": 0, **change})


def test_gpus_are_split_five_to_three() -> None:
    assert [str(topology(gpus)) for gpus in (2, 4, 8)] == ["1t+1d", "2t+2d", "5t+3d"]
    assert workers(topology(4)) == ["target-0", "target-1", "drafter-0", "drafter-1"]
    with pytest.raises(ConfigError, match="1 GPUs cannot hold"):
        topology(1)


def test_independent_steps_give_the_interval_of_students_t() -> None:
    generator = random.Random(1)
    hits = 0
    for _ in range(300):
        seconds = [1 / generator.gauss(100.0, 5.0) for _ in range(20)]
        found = batch_means(seconds, [1.0] * 20)
        assert found is not None
        hits += found.low is not None and found.high is not None and found.low <= 100.0 <= found.high
    assert hits >= 275  # 95 % of 300 are 285; the autocorrelation is estimated, so intervals are a little wide


def test_correlated_steps_count_for_less() -> None:
    slow_then_fast = [0.02] * 100 + [0.01] * 100
    alternating = [0.02, 0.01] * 100
    correlated, independent = (batch_means(seconds, [1.0] * 200) for seconds in (slow_then_fast, alternating))
    assert correlated is not None
    assert independent is not None
    assert correlated.n_eff < 4
    assert independent.n_eff == 20
    assert independent.rho == 0.0


def test_too_few_steps_have_no_interval() -> None:
    assert batch_means([1.0] * 3, [1.0] * 3) is None
    constant = batch_means([1.0] * 8, [5.0] * 8)
    assert constant is not None
    assert (constant.low, constant.high) == (5.0, 5.0)
    assert lag_one([1.0, 1.0]) == 0.0


def test_controls_run_before_and_after_the_workload_and_never_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def rates(_spec: RunSpec, _directory: Path, when: str) -> dict[str, float]:
        order.append(when)
        return {"matmul": {"before": 4.0, "after": 9.0}[when]}

    def run(*_: Any, **__: Any) -> ChildResult:
        order.append("workload")
        return ChildResult(returncode=0, result=result(), seconds=1.0, stderr_tail="")

    monkeypatch.setattr(controls, "run", rates)
    monkeypatch.setattr(measurement_module, "run_json", run)
    found = measure(SPEC, tmp_path / "one", timeout_seconds=1.0)
    assert order == ["before", "workload", "after"]
    assert found.controls == {"matmul": 6.0}
    assert found.state["controls_before_after"] == [{"matmul": 4.0}, {"matmul": 9.0}]


def test_controls_that_differ_before_and_after_are_unknown() -> None:
    assert controls.between({"a": 1.0}, {}) == {}
    assert controls.between({"a": 1.0}, {"b": 1.0}) == {}


def test_the_controls_print_positive_rates(capsys: pytest.CaptureFixture[str]) -> None:
    assert controls.main([]) == 0
    rates = json.loads(capsys.readouterr().out)
    assert rates.keys() == CPU_CONTROLS
    assert min(rates.values()) > 0


def test_controls_that_fail_are_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controls.sys, "executable", "false")
    assert controls.run(SPEC, tmp_path, "before") == {}


def test_a_workload_by_processes_is_a_series_of_its_own_started_by_torchrun() -> None:
    threads, processes = workload(0), workload(0, engine="processes")
    assert threads.name != processes.name
    command = processes.command(Path("out"))
    assert command[1:3] == ["-m", "torch.distributed.run"]
    assert command[command.index("--nproc-per-node") + 1] == "3"  # the preset is 1t+2d
    assert [part for part in command if part not in threads.command(Path("out"))] == [
        "torch.distributed.run", "--standalone", "--nproc-per-node", "--engine", "processes", "--topology", "1t+2d",
    ]  # fmt: skip
    assert preset(threads.preset).topology == "1t+2d"
    two = workload(8, engine="processes").command(Path("out"))
    assert two[two.index("--nproc-per-node") + 1] == "8"
    assert "torch.distributed.run" not in processes.probed_command(Path("out"), Path("r"))
    with pytest.raises(ConfigError, match="use --gpus 2 or more"):
        workload(1, engine="processes")
    with pytest.raises(ConfigError, match="names its --topology"):
        RunSpec(preset="tiny-cpu", gpus=0, segment_seconds=1.0, engine="processes")
