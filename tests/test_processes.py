"""Laws of the engine of processes, with real processes and real signals. All runs are made by one program, at the start."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_training import make_config, without_anchors

from dflash import checkpoint
from dflash.config import RunConfig
from dflash.data.packing import PackedStream
from dflash.trainer import train

ROOT = Path(__file__).parent.parent
STEPS, PER_STEP = 9, 3  # of the interrupted run: three and a bit epochs of eight micro-batches
WITHOUT_ANCHORS = (7, 16)
SECONDS = 2


def arguments(config: RunConfig) -> list[str]:
    """The flags of a configuration of the tests, beside a preset."""
    values = {
        "seed": config.seed,
        "topology": config.topology,
        "output": config.output,
        **{f"target.{k}": getattr(config.target, k) for k in ("path", "mask_token_id", "dtype")},
        **{f"drafter.{k}": getattr(config.drafter, k) for k in ("block_size", "num_layers", "num_features", "attention", "init")},
        **{f"data.{k}": getattr(config.data, k) for k in ("path", "sequence_length", "rows_per_batch", "num_anchors")},
        **{f"optim.{k}": getattr(config.optim, k) for k in ("steps", "batches_per_step", "learning_rate")},
        **{f"checkpoint.{k}": getattr(config.checkpoint, k) for k in ("every_steps", "keep_last")},
        "compile.policy": config.compile.policy,
        "telemetry.wandb": "off",
        "acceptance.decode_every_steps": 0,
        "engine_timeout_seconds": SECONDS,
    }
    flags = [part for key, value in values.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    return ["--preset", "tiny-cpu", "--engine", "processes", *flags]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a scenario left."""

    codes: dict[str, int]
    left: list[int]
    run: Path
    logs: Path

    def said(self, life: int | None = None) -> str:
        """What all ranks wrote to stderr."""
        lives = "attempt_*" if life is None else f"attempt_{life}"
        return "".join(path.read_text() for path in sorted(self.logs.glob(f"*/{lives}/*/stderr.log")))

    def errors(self, life: int = 0) -> list[str]:
        return [line for line in self.said(life).splitlines() if line.startswith("error:")]


def interrupted(output: Path, **changes: Any) -> RunConfig:
    checkpoints = {"every_steps": 1, "keep_last": 20}
    return make_config(output, optim={"steps": STEPS, "batches_per_step": PER_STEP}, checkpoint=checkpoints, **changes)


def scenarios(base: Path) -> dict[str, dict[str, Any]]:
    def one(name: str, config: RunConfig, *more: str, **rest: Any) -> dict[str, Any]:
        return {"arguments": [*arguments(config), *more], "ranks": 3, "logs": str(base / name / "logs"), **rest}

    def small(name: str) -> RunConfig:
        return make_config(base / name / "run", topology="1t+2d")

    def fault(worker: str, number: int, what: str) -> dict[str, Any]:
        return {"faults": [{"life": 0, "worker": worker, "number": number, "do": what}]}

    lives = [
        {"life": 0, "worker": "target-0", "number": 13, "do": "kill"},
        {"life": 1, "saving": 6, "do": "kill"},
        {"life": 2, "worker": "drafter-1", "number": 19, "do": "kill"},
    ]
    whole = make_config(base / "whole" / "run", topology="1t+2d", optim={"steps": 50, "batches_per_step": 2})
    killed = interrupted(base / "killed" / "run", topology="1t+2d")
    return {
        "whole": one("whole", whole, "--transport.checksums"),
        "killed": one("killed", killed, "--resume", restarts=3, faults=lives, without_anchors=WITHOUT_ANCHORS),
        "stopped": one("stopped", small("stopped"), **fault("target-0", 9, "stop")),
        "asked": one("asked", small("asked"), "--optim.steps", "200", **fault("drafter-1", 9, "term")),
        "nan": one("nan", small("nan"), **fault("target-0", 9, "nan")),
        "flags": one("flags", small("flags"), "--optim.steps", "0"),
        "differs": one("differs", small("differs"), of_rank={"2": ["--seed", "4"]}),
        "again": one("again", make_config(base / "whole" / "run", topology="1t+2d")),
    }


def keep_until(run: Path, step: int) -> None:
    """Leave what a run that ended after `step` would have left."""
    for name in checkpoint.list_complete(run):
        if name > checkpoint.step_name(step):
            shutil.rmtree(checkpoint.checkpoint_dir(run) / name)


def train_without_anchors(config: RunConfig) -> dict[str, Any]:
    """By threads of this process, with the batches of the ranks of `killed`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedStream, "batch", without_anchors(PackedStream.batch, WITHOUT_ANCHORS))
        return train(config)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    base = tmp_path_factory.mktemp("processes")
    planned = scenarios(base)
    for name, scenario in planned.items():
        Path(scenario["logs"]).mkdir(parents=True)
        (base / f"{name}.json").write_text(json.dumps(scenario))
    train_without_anchors(interrupted(base / "killed" / "run", topology="1t+1d"))  # the first steps, by threads
    keep_until(base / "killed" / "run", 2)
    command = [sys.executable, "tests/programs/ranks.py", *(str(base / f"{name}.json") for name in planned)]
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240, env=os.environ | paths)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"codes"')]
    return {
        name: Outcome(codes=line["codes"], left=line["left"], run=base / name / "run", logs=Path(planned[name]["logs"]))
        for name, line in zip(planned, lines, strict=True)
    }


def steps_of(run: Path) -> dict[int, dict[str, Any]]:
    """The last telling of every step: one that was lost with a process was made again."""
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {line["fields"]["step"]: line["fields"] for line in lines if line["name"] == "step"}


def losses(run: Path) -> list[float]:
    return [fields["loss"] for _, fields in sorted(steps_of(run).items())]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(checkpoint.resolve(run, "last")).weights


def same_bits(first: Path, second: Path) -> bool:
    one, other = weights(first), weights(second)
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


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
    assert 0 < result["queue_occupancy"] <= 1
    printed = [p.read_text() for p in sorted(outcomes["whole"].logs.glob("*/*/*/stdout.log"))]
    assert [bool(text) for text in printed] == [True, False, False]
    assert json.loads(printed[0].splitlines()[-1])["tokens"] == result["tokens"]


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
    ],
)
def test_bad_input_is_told_by_one_rank_with_exit_code_2(outcomes: dict[str, Outcome], name: str, message: str) -> None:
    (error,) = outcomes[name].errors()
    assert message in error
    assert set(outcomes[name].codes.values()) == {2}
    assert not (outcomes[name].run / "config.json").exists()


def test_a_wrong_flag_is_told_by_one_rank(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["flags"].said().count("optim.steps is 0") == 1
    assert set(outcomes["flags"].codes.values()) == {2}


def test_no_process_is_left(outcomes: dict[str, Outcome]) -> None:
    assert {name: outcome.left for name, outcome in outcomes.items() if outcome.left} == {}
