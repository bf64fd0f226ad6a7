"""Laws of the engine of processes, with real processes and real signals; helpers_processes.py makes the runs."""

from __future__ import annotations

import json
import pickle
import shutil
from collections import Counter
from pathlib import Path

import pytest
from helpers_processes import (
    PER_STEP,
    STEPS,
    Outcome,
    interrupted,
    keep_until,
    losses,
    same_bits,
    steps_of,
    train_without_anchors,
)
from helpers_training import make_config

from dflash import checkpoint
from dflash.trainer import train

pytestmark = pytest.mark.timeout(2700)  # whoever comes first waits for all runs in processes


def test_processes_equal_threads_and_one_process_with_double_batch(outcomes: dict[str, Outcome], tmp_path: Path) -> None:
    run = outcomes["whole"].run
    assert outcomes["whole"].codes == {}, outcomes["whole"].said()
    train(make_config(tmp_path / "threads", topology="1t+2d", optim={"steps": 50, "batches_per_step": 2}))
    train(make_config(tmp_path / "wide", data={"rows_per_batch": 4}, optim={"steps": 50, "batches_per_step": 1}))
    assert len(losses(run)) == 50
    assert same_bits(run, tmp_path / "threads")
    assert losses(run) == losses(tmp_path / "threads")
    assert losses(run) == pytest.approx(losses(tmp_path / "wide"), rel=1e-5)


def test_the_result_counts_all_ranks(outcomes: dict[str, Outcome]) -> None:
    result = json.loads((outcomes["whole"].run / "result.json").read_text())
    assert [(w["worker"], w["items"]) for w in result["workers"]] == [("drafter-0", 50), ("drafter-1", 50), ("target-0", 100)]
    assert result["tokens"] == 50 * 2 * 2 * 32
    assert (result["engine"], len(result["devices"])) == ("processes", 3)
    assert result["leaders_machine"]["workers"] == 3
    assert 0 < result["queue_occupancy"] <= 1
    printed = [p.read_text() for p in sorted(outcomes["whole"].logs.glob("*/*/*/stdout.log"))]
    assert [bool(text) for text in printed] == [True, False, False]
    assert json.loads(printed[0].splitlines()[-1])["tokens"] == result["tokens"]


def test_a_measuring_run_is_measured_by_the_leader_with_a_row_for_every_rank(outcomes: dict[str, Outcome]) -> None:
    measured = outcomes["measured"]
    assert measured.codes == {}, measured.said()
    result = json.loads((measured.run / "result.json").read_text())
    measure = result["measure"]
    assert (measure["incomplete"], len(measure["segments"]), measure["num_devices"]) == (None, 2, 3)
    for segment in measure["segments"]:
        rows = {row["worker"]: row for row in segment["workers"]}
        assert rows.keys() == {"drafter-0", "drafter-1", "target-0"}
        assert min(row["items"] for row in rows.values()) > 0
        assert rows["target-0"]["items"] > rows["drafter-0"]["items"]  # it works for both drafters
    assert len(json.loads((measured.run / "steps.json").read_text())["tokens"]) >= result["steps"] - 1
    assert checkpoint.list_complete(measured.run) == []
    printed = [p.read_text() for p in sorted(measured.logs.glob("*/*/*/stdout.log"))]
    assert [bool(text) for text in printed] == [True, False, False]


def test_a_run_that_is_killed_again_and_again_equals_one_that_never_was(outcomes: dict[str, Outcome], tmp_path: Path) -> None:
    """Begun by threads, killed in a target, in rank 0 while it saves, in a drafter; some micro-batches without anchors."""
    killed = outcomes["killed"]
    assert killed.codes == {}, killed.said()
    for life, who in enumerate(("rank 2 (target-0", "rank 0 (drafter-0", "rank 1 (drafter-1")):
        assert len(killed.errors(life)) == 1, killed.said(life)
        assert who in killed.errors(life)[0]
    train_without_anchors(interrupted(tmp_path / "whole"))
    assert same_bits(killed.run, tmp_path / "whole")
    assert losses(killed.run) == losses(tmp_path / "whole")
    seen = [sample for _, fields in sorted(steps_of(killed.run).items()) for sample in fields["sample_ids"]]
    for epoch in range(len(seen) // 16):
        assert Counter(seen[epoch * 16 : (epoch + 1) * 16]) == Counter(f"synthetic-{n}" for n in range(16))
    assert len(seen) == STEPS * PER_STEP * 2


def test_a_run_in_processes_goes_on_in_threads(outcomes: dict[str, Outcome], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(outcomes["killed"].run, run)
    keep_until(run, 7)
    train_without_anchors(interrupted(run, topology="2t+1d", resume=True))
    assert same_bits(run, outcomes["killed"].run)
    assert losses(run) == losses(outcomes["killed"].run)


def test_a_stopped_rank_is_noticed_named_shown_and_ended(outcomes: dict[str, Outcome]) -> None:
    stopped = outcomes["stopped"]
    (error,) = stopped.errors()
    assert f"(target-0, process {pid_in(error)} on " in error
    assert "no sign of life" in error
    assert stopped.codes
    stacks = next(stopped.run.glob("stacks-*.txt")).read_text()
    assert stacks.count("== rank ") == 3
    assert "act (ranks.py" in stacks.partition("== rank 2 (target-0)")[2]  # where the stopped process stands
    assert checkpoint.list_complete(stopped.run) == ["step-000000"]
    recorded = {path.name: pickle.loads(path.read_bytes()) for path in stopped.run.glob("collectives_rank_*")}
    assert recorded.keys() == {"collectives_rank_0", "collectives_rank_1"}  # a stopped process writes nothing
    assert any(entry["profiling_name"] == "gloo:all_gather" for entry in recorded["collectives_rank_1"]["entries"])


def pid_in(error: str) -> str:
    return error.partition("process ")[2].partition(" ")[0]


def test_a_nan_is_told_once_with_the_rank_that_made_it(outcomes: dict[str, Outcome]) -> None:
    (error,) = outcomes["nan"].errors()
    assert "first non-finite tensor: target features" in error
    assert "Its target states are from rank 2 (target-0)" in error
    assert set(outcomes["nan"].codes.values()) == {1}
    assert checkpoint.list_complete(outcomes["nan"].run) == ["step-000000"]


def test_a_signal_to_any_drafter_ends_all_ranks_after_the_step(outcomes: dict[str, Outcome]) -> None:
    asked = outcomes["asked"]
    assert asked.codes == {}, asked.said()
    result = json.loads((asked.run / "result.json").read_text())
    assert result["stopped_early"]
    assert result["steps"] == 9 // 4 + 1
    assert checkpoint.list_complete(asked.run)[-1] == checkpoint.step_name(result["steps"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("differs", "config.seed is 4 on rank 2 and 3 on rank 0"),
        ("again", "already holds checkpoints up to step-000050: use --resume to go on, or another --output"),
        ("longer", "the checkpoint was trained with optim.steps 50, this run asks for 60: resume with the same value"),
    ],
)
def test_bad_input_is_told_by_one_rank_with_exit_code_2(outcomes: dict[str, Outcome], name: str, message: str) -> None:
    (error,) = outcomes[name].errors()
    assert message in error
    assert set(outcomes[name].codes.values()) == {2}
    assert not (outcomes[name].run / "config.json").exists()


def test_bad_input_is_not_looked_at_again_when_torchrun_starts_the_ranks_again(outcomes: dict[str, Outcome]) -> None:
    """In its second life nothing is wrong with `differs`, so that it would train."""
    differs = outcomes["differs"]
    assert differs.errors(1) == differs.errors(0)
    assert not (differs.run / "events.jsonl").exists()


def test_a_wrong_flag_is_told_by_one_rank(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["flags"].said().count("optim.steps is 0") == 1
    assert set(outcomes["flags"].codes.values()) == {2}


def test_nothing_is_left(outcomes: dict[str, Outcome]) -> None:
    """No process, no shared memory, no port."""
    assert {name: outcome.left for name, outcome in outcomes.items() if outcome.left} == {}
