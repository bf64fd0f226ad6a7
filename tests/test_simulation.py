"""Laws of dflash.simulation: nothing is faster than its slowest station, and what one run was measured to do is foretold."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.__main__ import main
from dflash.config import ConfigError, Topology
from dflash.simulation import Fleet, Stages, best_split, report, simulate, stages_of

STAGES = Stages(target_seconds=0.1, drafter_seconds=0.2, update_seconds=0.05, tokens=100.0, batches_per_drafter=2.0, slots=3)
ALONE = Fleet(gpus_per_node=8)


def rate(stages: Stages, topology: str, fleet: Fleet = ALONE, *, spread: float = 0.0) -> float:
    return simulate(stages, Topology.parse(topology), fleet, spread=spread).tokens_per_second


def test_drafters_that_targets_keep_busy_set_the_pace() -> None:
    assert rate(STAGES, "1t+1d") == pytest.approx(2 * 100 / (2 * 0.2 + 0.05))
    assert rate(STAGES, "4t+4d") == pytest.approx(4 * 2 * 100 / (2 * 0.2 + 0.05))


def test_targets_that_cannot_keep_up_set_the_pace() -> None:
    assert rate(dataclasses.replace(STAGES, target_seconds=1.0), "1t+1d") == pytest.approx(100 / 1.0, rel=0.02)
    assert rate(dataclasses.replace(STAGES, target_seconds=1.0), "2t+1d") == pytest.approx(2 * 100 / 1.0, rel=0.02)


def test_a_link_that_is_slower_than_both_sets_the_pace_between_machines_and_not_inside_one() -> None:
    slow = Fleet(gpus_per_node=1, network_gb_per_second=1.0, states_bytes=2e9)
    assert rate(STAGES, "1t+1d", slow) == pytest.approx(100 / 2.0, rel=0.02)
    assert rate(STAGES, "1t+1d", dataclasses.replace(slow, gpus_per_node=2)) == pytest.approx(rate(STAGES, "1t+1d"), rel=0.02)


def test_summing_gradients_costs_a_ring_and_a_lone_drafter_nothing() -> None:
    heavy = Fleet(gpus_per_node=8, link_gb_per_second=1.0, gradient_bytes=0.5e9)
    assert rate(STAGES, "1t+1d", heavy) == pytest.approx(rate(STAGES, "1t+1d"))
    assert rate(STAGES, "4t+2d", heavy) == pytest.approx(2 * 2 * 100 / (2 * 0.2 + 0.05 + 0.5))


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0.01, 1.0), st.floats(0.01, 1.0), st.floats(0.0, 0.5), st.integers(1, 5), st.integers(1, 5), st.integers(1, 4),
    st.floats(0.0, 0.3),
)  # fmt: skip
def test_nothing_is_faster_than_its_slowest_station(
    making: float, learning: float, update: float, targets: int, drafters: int, slots: int, spread: float
) -> None:
    stages = dataclasses.replace(STAGES, target_seconds=making, drafter_seconds=learning, update_seconds=update, slots=slots)
    found = simulate(stages, Topology(targets, drafters), ALONE, spread=spread)
    bounds = (targets * 100 / making, drafters * 2 * 100 / (2 * learning + update))
    lucky = 1 + 3 * spread  # so many draws of a spread seldom have a mean further from theirs
    assert found.tokens_per_second <= min(bounds) * lucky * 1.05
    assert 0 <= found.queue_occupancy <= 1.0 + 1e-9
    assert found == simulate(stages, Topology(targets, drafters), ALONE, spread=spread)


def test_the_best_split_is_the_best_of_all() -> None:
    found = best_split(STAGES, 7, ALONE, spread=0.0)
    every = [rate(STAGES, f"{7 - drafters}t+{drafters}d") for drafters in range(1, 7)]
    assert found[0].tokens_per_second == pytest.approx(max(every))
    with pytest.raises(ConfigError, match="2 or more"):
        best_split(STAGES, 1, ALONE)


RESULT: dict[str, Any] = {
    "topology": "1t+2d",
    "engine": "threads",
    "steps": 10,
    "tokens": 4000,
    "tokens_per_second": 500.0,
    "queue_occupancy": 0.5,
    "workers": [
        {"worker": "target-0", "items": 44, "busy_seconds": 4.4, "sync_seconds": 0.0},
        {"worker": "drafter-0", "items": 20, "busy_seconds": 7.0, "sync_seconds": 1.0},
        {"worker": "drafter-1", "items": 20, "busy_seconds": 7.6, "sync_seconds": 0.4},
    ],
}
CONFIG = {"telemetry": {"queue_items": 5}}


def test_stage_times_are_what_workers_did_and_the_last_drafter_of_a_step_waits_for_nobody() -> None:
    found = stages_of(RESULT, CONFIG)
    assert found.target_seconds == pytest.approx(0.1)
    assert found.drafter_seconds == pytest.approx(0.365)
    assert found.update_seconds == pytest.approx(0.04)
    assert (found.tokens, found.batches_per_drafter, found.slots) == (100.0, 2.0, 3)


def run(place: Path, result: str = json.dumps(RESULT)) -> Path:
    place.mkdir(exist_ok=True)
    (place / "result.json").write_text(result)
    (place / "config.json").write_text(json.dumps(CONFIG))
    return place


def test_a_run_stands_beside_what_is_foretold_of_it(tmp_path: Path) -> None:
    found = report([run(tmp_path)], [4], ALONE, spread=0.0)
    (row,) = found["runs"]
    assert row["ratio"] == pytest.approx(row["simulated_tokens_per_second"] / 500.0)
    assert row["simulated_tokens_per_second"] == pytest.approx(2 * 2 * 100 / (2 * 0.365 + 0.04), rel=0.01)
    assert {one["topology"] for one in found["best"]["4"]} == {"1t+3d", "2t+2d", "3t+1d"}


@pytest.mark.parametrize("content", ["", "[]", "{}", json.dumps({**RESULT, "workers": []})])
def test_a_directory_without_stage_times_is_bad_input(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--simulate", str(run(tmp_path, content))]) == 2
    assert "training run that ended" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--optim.steps", "3"], ["--gpus-per-node", "0"], ["--spread", "-1"]])
def test_bad_usage_is_told(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--simulate", str(run(tmp_path)), *flags]) == 2
    assert "--simulate" in capsys.readouterr().err
