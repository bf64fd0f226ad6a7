"""Laws of measuring: it changes nothing, it waits for steadiness, it says what is missing."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro
from helpers_training import make_config

from dflash import burner, checkpoint, trainer
from dflash.__main__ import _exit_code
from dflash.compile_policy import CompilePolicy, RecompileError
from dflash.config import ConfigError, MeasureConfig, RunConfig
from dflash.device_time import timed_drafters
from dflash.engine.queue import WorkerFailed
from dflash.measuring import FAILURE_FILE, STEPS_FILE
from dflash.segments import Mark, Window, segment_between, why_unsteady

CONSTANT_RATE = {"learning_rate": 3e-3, "schedule": "wsd", "warmup_fraction": 0.0, "decay_fraction": 0.0}
SHORT = {"on": True, "segments": 2, "segment_seconds": 0.2, "warmup_segments": 100.0}


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [line["fields"]["loss"] for line in lines if line["name"] == "step"]


def measure(output: Path, *, steps: int = 100_000, **changes: Any) -> dict[str, Any]:
    return trainer.train(make_config(output, optim={"steps": steps, **CONSTANT_RATE}, measure={**SHORT, **changes}))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    output = tmp_path_factory.mktemp("measured")
    return output, measure(output)


def test_measuring_leaves_the_training_as_it_is(tmp_path: Path, measured: tuple[Path, dict[str, Any]]) -> None:
    trainer.train(make_config(tmp_path / "plain", optim={"steps": 8, **CONSTANT_RATE}))
    assert losses(measured[0])[:8] == losses(tmp_path / "plain")


def test_a_segment_is_the_sum_of_its_steps_and_follows_the_one_before(measured: tuple[Path, dict[str, Any]]) -> None:
    output, result = measured
    steps = json.loads((output / STEPS_FILE).read_text())
    segments = result["measure"]["segments"]
    assert len(segments) == 2
    assert result["measure"]["incomplete"] is None
    for number, segment in enumerate(segments):
        mine = [place for place, owner in enumerate(steps["segment"]) if owner == number]
        assert segment["steps"] == len(mine)
        assert segment["tokens"] == sum(steps["tokens"][place] for place in mine) > 0
        began = steps["end_seconds"][mine[0] - 1]
        assert segment["seconds"] == pytest.approx(steps["end_seconds"][mine[-1]] - began)
        assert segment["seconds"] >= 0.2
        assert segment["steps"] >= 3
        assert segment["tokens_per_second"] == segment["tokens"] / segment["seconds"]
    assert segments[0]["ended"] == segments[1]["began"]
    assert steps["segment"] == sorted(steps["segment"])
    assert steps["segment"].count(-1) == result["measure"]["warmup_steps"] >= 6
    assert len({len(column) for column in steps.values()}) == 1


def test_the_rate_is_tokens_over_time_of_all_segments_and_per_device(measured: tuple[Path, dict[str, Any]]) -> None:
    result = measured[1]["measure"]
    total = sum(s["tokens"] for s in result["segments"]) / sum(s["seconds"] for s in result["segments"])
    assert result["tokens_per_second"] == total
    assert result["tokens_per_second_per_device"] == total / 2  # 1t+1d: every worker thread counts on a CPU


def test_every_worker_and_stage_has_a_row(measured: tuple[Path, dict[str, Any]]) -> None:
    for segment in measured[1]["measure"]["segments"]:
        rows = {row["worker"]: row for row in segment["workers"]}
        assert set(rows) == {"target-0", "drafter-0"}
        assert rows["drafter-0"]["items"] == 4 * segment["steps"]
        assert {row["stage"] for row in segment["stages"]} == {"target.forward", "drafter.accumulate", "drafter.step"}
        assert all(row["device_seconds"] is None for row in segment["workers"])  # no CUDA events on a CPU
        spent = sum(rows["drafter-0"][name] for name in ("busy_seconds", "wait_seconds", "sync_seconds"))
        assert spent > 0


def test_a_measuring_run_saves_no_checkpoint(measured: tuple[Path, dict[str, Any]]) -> None:
    assert checkpoint.list_complete(measured[0]) == []
    assert measured[1]["checkpoint"] is None


def test_a_run_that_ends_before_its_segments_says_so(tmp_path: Path) -> None:
    result = measure(tmp_path, steps=2)
    assert result["measure"]["incomplete"] == "never steady: no step ended"
    assert _exit_code(result) == 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"tokens_per_second": 119.0}, None),
        ({"tokens_per_second": 121.0}, "throughput changed by +21%"),
        ({"tokens_per_second": 79.0}, "throughput changed by -21%"),
        ({"compiles": 1}, "1 compile phases"),
        ({"queue_occupancy": 0.8}, "queue occupancy changed by +0.30"),
    ],
)
def test_steady_means_no_compile_and_two_windows_alike(change: dict[str, float], reason: str | None) -> None:
    before = Window(tokens_per_second=100.0, queue_occupancy=0.5, compiles=0)
    found = why_unsteady(before, dataclasses.replace(before, **change))  # type: ignore[arg-type]
    assert found == reason if reason is None else found is not None and found.startswith(reason)


def test_a_compile_in_the_window_before_is_too_recent() -> None:
    now = Window(tokens_per_second=100.0, queue_occupancy=0.5, compiles=0)
    assert why_unsteady(dataclasses.replace(now, compiles=2), now) is not None
    assert why_unsteady(None, now) is not None


def test_a_run_that_goes_on_compiling_is_never_steady_says_so_and_exits_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = CompilePolicy.check
    functions = (torch.compile(lambda x, n=n: x + n, backend="eager") for n in itertools.count())

    def compile_something(policy: CompilePolicy) -> None:
        check(policy)
        with torch.compiler.set_stance("default"):
            next(functions)(torch.ones(1))

    monkeypatch.setattr(CompilePolicy, "check", compile_something)
    config = make_config(
        tmp_path,
        optim={"steps": 100_000},
        measure={**SHORT, "warmup_segments": 0.01},
        compile={"policy": "eager", "allow_recompiles": ("<lambda>",)},
    )
    result = trainer.train(config)
    assert "compile phases ended in the last two windows" in result["measure"]["incomplete"]
    assert (result["measure"]["segments"], result["measure"]["tokens_per_second"]) == ([], None)
    assert _exit_code(result) == 3


def test_a_failed_run_leaves_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_policy: CompilePolicy) -> None:
        raise RecompileError("compiled after warm-up:\n- forward")

    monkeypatch.setattr(CompilePolicy, "check", fails)
    with pytest.raises(WorkerFailed):
        measure(tmp_path)
    failure = json.loads((tmp_path / FAILURE_FILE).read_text())
    assert (failure["type"], failure["message"]) == ("RecompileError", "compiled after warm-up:\n- forward")
    assert (tmp_path / STEPS_FILE).exists()


def test_host_stall_is_what_is_left_of_the_wall_time_and_a_worker_that_came_later_counts_from_nothing() -> None:
    def mark(seconds: float, device_seconds: dict[str, float], **items: int) -> Mark:
        times = {"device": "cuda:0", "tokens": 0, "busy_seconds": 0.0, "wait_seconds": 0.0, "sync_seconds": 0.0}
        workers = {name.replace("_", "-"): {**times, "items": count} for name, count in items.items()}
        return Mark(seconds, seconds, int(seconds), int(seconds) * 10, 0, seconds / 2, 0, workers, {}, device_seconds)

    begin = mark(10.0, {"target-0": 7.0}, target_0=10)
    segment = segment_between(begin, mark(14.0, {"target-0": 10.0, "drafter-0": 1.0}, target_0=14, drafter_0=3), num_devices=2)
    rows = {row["worker"]: row for row in segment["workers"]}
    assert (rows["target-0"]["device_seconds"], rows["target-0"]["host_stall_seconds"], rows["target-0"]["items"]) == (
        3.0,
        1.0,
        4,
    )
    assert (rows["drafter-0"]["device_seconds"], rows["drafter-0"]["host_stall_seconds"], rows["drafter-0"]["items"]) == (
        1.0,
        3.0,
        3,
    )
    assert (segment["tokens_per_second"], segment["tokens_per_second_per_device"], segment["queue_occupancy"]) == (10.0, 5.0, 0.5)


def test_without_the_flag_nothing_is_measured(tmp_path: Path) -> None:
    assert "measure" not in trainer.train(make_config(tmp_path, optim={"steps": 1}))
    assert not (tmp_path / STEPS_FILE).exists()


@pytest.mark.parametrize("change", [{"burn_share": 0.1}, {"segments": 4}, {"segment_seconds": 1.0}])
def test_fields_of_measuring_are_refused_without_the_flag(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="has no meaning without --measure"):
        MeasureConfig(**change)
    MeasureConfig(on=True, **change)


@pytest.mark.parametrize("change", [{"segments": 0}, {"segment_seconds": 0.0}, {"burn_share": 0.95}, {"burn_share": -0.1}])
def test_impossible_values_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="measure"):
        MeasureConfig(on=True, **change)


def test_the_flag_is_called_measure() -> None:
    config = tyro.cli(RunConfig, args=["--measure", "--measure.segments", "2", "--measure.burn-share", "0.1"])
    assert config.measure == MeasureConfig(on=True, segments=2, burn_share=0.1)


def test_at_least_the_planted_share_is_burned(tmp_path: Path) -> None:
    result = measure(tmp_path, segments=1, burn_share=0.5)["measure"]
    assert (result["burn_share"], result["incomplete"]) == (0.5, None)
    assert result["burned_share"] >= 0.45  # of the time to the end of the last step, which had no burn after it yet


def test_no_python_thread_goes_on_while_the_process_stands_still() -> None:
    longest, begun, done = [0.0], threading.Event(), threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        begun.set()
        while not done.is_set():
            now = time.perf_counter()
            longest[0], last = max(longest[0], now - last), now

    ticking = threading.Thread(target=tick)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        ticking.start()
        assert begun.wait(20)
        burner._stand_still(0.3)
    finally:
        done.set()
        ticking.join()
        sys.setswitchinterval(interval)
    assert longest[0] >= 0.29


def test_workers_on_a_cpu_are_not_wrapped() -> None:
    class Worker:
        device = torch.device("cpu")

        def accumulate(self, states: Any) -> None: ...

        def settle(self) -> None: ...

    worker = Worker()
    assert timed_drafters([worker], MeasureConfig(on=True))[0] is worker
