"""Laws of dflash.simulation and dflash.simulated_runs: as a clock that ticks would have it, and as measured runs were."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.__main__ import main
from dflash.config import ConfigError, Topology
from dflash.engine import loops
from dflash.engine.loops import Doing, WorkerTimes
from dflash.presets import PRESETS
from dflash.simulated_runs import foretold, report, stages_of
from dflash.simulation import EngineName, Fleet, Stages, best_split, mean_of_runs, simulate, with_update_of
from regression.bench import planted_stages
from regression.bench.planted_stages import planted_seconds

STAGES = Stages(target_seconds=0.1, drafter_seconds=0.2, update_seconds=0.05, tokens=100.0, batches_per_drafter=2.0, slots=3)
ALONE = Fleet(gpus_per_node=8)


BASELINES = Path(__file__).parent.parent / "regression" / "baselines"


def rate(stages: Stages, topology: str, fleet: Fleet = ALONE, engine: EngineName = "processes") -> float:
    return simulate(stages, Topology.parse(topology), fleet, engine=engine).tokens_per_second


class Ticks:
    """The same run, one second after the other, by the rules of `dflash.engine`: whole stage times, no links, one node."""

    def __init__(self, stages: Stages, topology: Topology, engine: EngineName, *, steps: int) -> None:
        self.stages, self.topology, self.shared, self.steps = stages, topology, engine == "threads", steps
        self.per_step = round(stages.batches_per_drafter) * topology.drafters
        self.making: dict[int, tuple[int, int]] = {}  # number and end of each target
        self.learning: dict[int, int] = {}  # end of each drafter
        self.claimed: set[int] = set()
        self.made: set[int] = set()
        self.taken: set[int] = set()
        self.learned = [0] * topology.drafters
        self.step, self.now, self.update_ends = 0, 0, -1

    def seconds(self) -> int:
        """From the start to the end of the last update."""
        while True:
            self._end_what_ends()
            if self.step == self.steps:
                return self.now
            self._claim()
            self._take()
            self._claim()  # what was taken has made room
            self.now += 1

    def _end_what_ends(self) -> None:
        self.made |= {number for number, end in self.making.values() if end == self.now}
        self.making = {target: work for target, work in self.making.items() if work[1] != self.now}
        for drafter in [drafter for drafter, end in self.learning.items() if end == self.now]:
            del self.learning[drafter]
            self.learned[drafter] += 1
        if self.update_ends == self.now:
            self.step, self.update_ends = self.step + 1, -1
        elif len(self.taken) == (self.step + 1) * self.per_step and not self.learning and self.update_ends < 0:
            if self.stages.update_seconds == 0:
                self.step += 1
            else:
                self.update_ends = self.now + round(self.stages.update_seconds)

    def _claim(self) -> None:
        for target in set(range(self.topology.targets)) - self.making.keys():
            mine = itertools.count() if self.shared else itertools.count(target, self.topology.targets)
            number = next(number for number in mine if number not in self.claimed)
            if number < self.steps * self.per_step and self._has_room(number):
                self.claimed.add(number)
                self.making[target] = number, self.now + round(self.stages.target_seconds)

    def _has_room(self, number: int) -> bool:
        if self.shared:
            return number - len(self.taken) < self.stages.queue_items
        turn, drafter = divmod(number, self.topology.drafters)
        return turn - self.learned[drafter] < self.stages.slots

    def _take(self) -> None:
        for drafter in set(range(self.topology.drafters)) - self.learning.keys():
            mine = itertools.count() if self.shared else itertools.count(drafter, self.topology.drafters)
            number = next(number for number in mine if number not in self.taken)
            if number in self.made and number < (self.step + 1) * self.per_step:
                self.taken.add(number)
                self.learning[drafter] = self.now + round(self.stages.drafter_seconds)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["threads", "processes"]), st.integers(1, 6), st.integers(1, 6), st.integers(0, 3), st.integers(1, 3),
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 3),
)  # fmt: skip
def test_a_run_takes_as_long_as_a_clock_that_ticks_says(
    engine: EngineName, making: int, learning: int, update: int, targets: int, drafters: int, room: int, batches: int
) -> None:
    stages = Stages(
        target_seconds=making,
        drafter_seconds=learning,
        update_seconds=update,
        tokens=1.0,
        batches_per_drafter=batches,
        slots=room,
        queue_items=room,
    )
    topology, steps = Topology(targets, drafters), 3
    found = simulate(stages, topology, ALONE, engine=engine, steps=steps, warm_up_steps=0)
    spent = steps * batches * drafters / found.tokens_per_second
    assert spent == pytest.approx(Ticks(stages, topology, engine, steps=steps).seconds())
    assert 0 < found.queue_occupancy <= 1


def test_a_slow_target_holds_up_drafters_that_take_turns_and_not_those_of_one_queue() -> None:
    stages = dataclasses.replace(STAGES, drafter_spread=0.8, drafter_seconds=0.2, target_seconds=0.01, update_seconds=0.0)
    many = dataclasses.replace(stages, batches_per_drafter=8.0, queue_items=16, slots=4)
    assert rate(many, "1t+4d", engine="threads") > 1.1 * rate(many, "1t+4d")


@pytest.mark.parametrize("name", ["qwen3-8b", "smollm2-135m"])
def test_what_an_h200_was_measured_to_do_is_foretold_from_its_stage_times(name: str) -> None:
    result = json.loads((BASELINES / f"h200-{name}.json").read_text())["result"]
    config = {"telemetry": {"queue_items": PRESETS[name]().telemetry.queue_items}}
    found = foretold(result, stages_of(result, config), ALONE)
    assert found.tokens_per_second == pytest.approx(result["tokens_per_second"], rel=0.03)
    assert found.queue_occupancy == pytest.approx(result["queue_occupancy"], abs=0.02)


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
    st.sampled_from(["threads", "processes"]), st.floats(0.01, 1.0), st.floats(0.01, 1.0), st.floats(0.0, 0.5),
    st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.floats(0.0, 0.3),
)  # fmt: skip
def test_nothing_is_faster_than_its_slowest_station(
    engine: EngineName, making: float, learning: float, update: float, targets: int, drafters: int, slots: int, spread: float
) -> None:
    times = {"target_seconds": making, "drafter_seconds": learning, "update_seconds": update}
    stages = dataclasses.replace(STAGES, **times, slots=slots, queue_items=slots, target_spread=spread, drafter_spread=spread)
    found = simulate(stages, Topology(targets, drafters), ALONE, engine=engine)
    bounds = (targets * 100 / making, drafters * 2 * 100 / (2 * learning + update))
    lucky = 1 + 3 * spread  # so many draws of a spread seldom have a mean further from theirs
    assert found.tokens_per_second <= min(bounds) * lucky * 1.05
    assert 0 <= found.queue_occupancy <= 1.0 + 1e-9
    assert found == simulate(stages, Topology(targets, drafters), ALONE, engine=engine)


def test_the_best_split_is_the_best_of_all() -> None:
    found = best_split(STAGES, 7, ALONE)
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
    "seconds": {"checkpoints": 0.3, "decoding": 0.1},
    "workers": [
        {"worker": "target-0", "device": "cpu", "items": 44, "busy_seconds": 4.4, "sync_seconds": 0.0},
        {"worker": "drafter-0", "device": "cpu", "items": 20, "busy_seconds": 7.0, "sync_seconds": 1.0},
        {"worker": "drafter-1", "device": "cpu", "items": 20, "busy_seconds": 7.6, "sync_seconds": 0.4},
    ],
}
CONFIG = {"telemetry": {"queue_items": 5}}


def test_stage_times_are_what_workers_did() -> None:
    found = stages_of(RESULT, CONFIG, spread=0.0)
    assert found.target_seconds == pytest.approx(0.1)
    assert found.drafter_seconds == pytest.approx(0.365)
    waits = foretold(RESULT, dataclasses.replace(found, update_seconds=0.0), ALONE).step_wait_seconds
    assert found.update_seconds == pytest.approx((0.7 - 0.3 - 0.1) / 10 - waits)  # without saving and decoding
    assert (found.tokens, found.batches_per_drafter, found.slots, found.queue_items) == (100.0, 2.0, 3, 5)
    assert (found.target_spread, found.drafter_spread) == (0.0, 0.0)


def test_what_a_lone_drafter_does_at_the_ends_of_steps_is_update_and_not_learning() -> None:
    lone = {"worker": "drafter-0", "items": 20, "busy_seconds": 9.0, "finish_seconds": 2.0, "sync_seconds": 0.0}
    found = stages_of({**RESULT, "topology": "1t+1d", "workers": [RESULT["workers"][0], lone]}, CONFIG, spread=0.0)
    assert found.drafter_seconds == pytest.approx((9.0 - 2.0) / 20)
    assert found.update_seconds == pytest.approx((2.0 - 0.3 - 0.1) / 10)


def test_workers_count_their_micro_batches_and_what_lies_between_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    times, clock = WorkerTimes(worker="target-0", device="cpu"), [0.0]
    monkeypatch.setattr("dflash.engine.loops.time.perf_counter", lambda: clock[0])
    lasting = {0: 1.0, 1: 3.0}

    class Worker:
        device = torch.device("cpu")

        def produce(self, number: int) -> Any:
            clock[0] += lasting[number]
            return SimpleNamespace(batch=SimpleNamespace(num_tokens=5))

    queue = SimpleNamespace(claim=iter([0, 1, None]).__next__, put=lambda _number, _item: None)
    loops.target_loop(queue, times, Worker(), Doing())
    assert (times.items, times.busy_seconds, times.busy_square_seconds) == (2, 4.0, 1.0 + 9.0)
    for meets_others in (False, True):
        with loops.finishing(times, meets_others=meets_others):
            clock[0] += 7.0
    assert (times.finish_seconds, times.sync_seconds) == (7.0, 7.0)
    assert (times.busy_seconds, times.busy_square_seconds) == (11.0, 10.0)


def test_the_spread_of_a_stage_is_read_from_its_squares() -> None:
    seconds = [planted_seconds("drafter", number, 0.25, 0.2) for number in range(400)]
    row = {"busy_seconds": sum(seconds), "busy_square_seconds": sum(one**2 for one in seconds), "items": 400}
    workers = [*RESULT["workers"][:1], *({**row, "worker": f"drafter-{i}", "sync_seconds": 1.0} for i in range(2))]
    found = stages_of({**RESULT, "workers": workers}, CONFIG, spread=0.07)
    assert found.drafter_seconds == pytest.approx(0.25, rel=0.03)
    assert found.drafter_spread == pytest.approx(0.2, rel=0.1)
    assert found.target_spread == 0.07  # its row has no squares


def test_the_update_is_what_the_end_of_a_step_takes_beyond_waiting_for_others() -> None:
    stages = dataclasses.replace(STAGES, target_spread=0.3, drafter_spread=0.3, update_seconds=0.05)
    topology = Topology(2, 3)
    waits = mean_of_runs(stages, topology, ALONE, engine="threads", steps=10).step_wait_seconds
    assert waits > 0.02
    again = with_update_of(dataclasses.replace(stages, update_seconds=0.0), topology, "threads", waits + 0.05, 10)
    assert again.update_seconds == pytest.approx(0.05, rel=0.1)


def test_a_spread_that_drafters_have_in_common_makes_nobody_wait() -> None:
    stages = dataclasses.replace(STAGES, drafter_spread=0.4, update_seconds=0.0)
    topology = Topology(2, 3)
    alone = mean_of_runs(stages, topology, ALONE, engine="processes", steps=20).step_wait_seconds
    found = with_update_of(stages, topology, "processes", alone / 2, 20)
    assert 0 < found.drafter_spread < stages.drafter_spread
    assert mean_of_runs(found, topology, ALONE, engine="processes", steps=20).step_wait_seconds == pytest.approx(
        alone / 2, rel=0.1
    )


def test_planting_wants_three_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert planted_stages.main(["0.1", "train", "--preset", "tiny-cpu"]) == 2
    assert "expected TARGET, DRAFTER (seconds), SPREAD" in capsys.readouterr().err


def run(place: Path, result: str = json.dumps(RESULT)) -> Path:
    place.mkdir(exist_ok=True)
    (place / "result.json").write_text(result)
    (place / "config.json").write_text(json.dumps(CONFIG))
    return place


def test_a_run_stands_beside_what_is_foretold_of_it(tmp_path: Path) -> None:
    found = report([run(tmp_path)], [4], ALONE, spread=0.0)
    (row,) = found["runs"]
    assert row["ratio"] == pytest.approx(row["simulated_tokens_per_second"] / 500.0)
    assert row["simulated_tokens_per_second"] == pytest.approx(10 * 4 * 100 / (0.1 + 10 * (2 * 0.365 + 0.03)), rel=0.01)
    assert {one["topology"] for one in found["best"]["4"]} == {"1t+3d", "2t+2d", "3t+1d"}


def on(*devices: str, **more: Any) -> dict[str, Any]:
    rows = [row | {"device": device} for row, device in zip(RESULT["workers"], devices, strict=True)]
    return RESULT | {"workers": rows} | more


@pytest.mark.parametrize(
    ("result", "config", "told"),
    [
        (on("cpu", "cpu", "cpu", leaders_machine={"cores": 2, "workers": 3}), {}, "3 workers shared 2 cores"),
        (
            on("cpu", "cpu", "cpu", leaders_machine={"cores": 4, "workers": 3}),
            {"cpu_threads": 2},
            "3 workers of 2 threads each shared 4 cores",
        ),
        (on("cpu", "cpu", "cpu"), {}, "does not say how many cores"),
        (on("cpu", "cpu", "cpu", leaders_machine={"cores": 4, "workers": 3}), {"cpu_threads": 1}, None),
        (on("cuda:0", "cuda:1", "cuda:0"), {}, "workers shared cuda:0"),
        (on("cuda:0", "cuda:1", "cuda:2"), {}, None),
        (on("cuda:0", "cuda:1", "cuda:0", engine="processes"), {}, None),  # of two machines
    ],
)
def test_a_run_whose_workers_shared_cores_or_a_gpu_is_cautioned_against(
    result: dict[str, Any], config: dict[str, Any], told: str | None, tmp_path: Path
) -> None:
    place = run(tmp_path, json.dumps(result))
    (place / "config.json").write_text(json.dumps(CONFIG | config))
    (row,) = report([place], [4], ALONE, spread=0.0)["runs"]
    if told is None:
        assert row["cautions"] == []
    else:
        (caution,) = row["cautions"]
        assert told in caution


@pytest.mark.parametrize("content", ["", "[]", "{}", json.dumps({**RESULT, "workers": []})])
def test_a_directory_without_stage_times_is_bad_input(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--simulate", str(run(tmp_path, content))]) == 2
    assert "training run that ended" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--optim.steps", "3"], ["--gpus-per-node", "0"], ["--spread", "-1"]])
def test_bad_usage_is_told(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--simulate", str(run(tmp_path)), *flags]) == 2
    assert "--simulate" in capsys.readouterr().err
