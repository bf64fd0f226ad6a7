"""Runs in processes with planted faults, all made by one program, and what they left; the fixture is in conftest.py."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_training import make_config, without_anchors, write_synthetic

from dflash import checkpoint
from dflash.capture import capture
from dflash.config import RunConfig
from dflash.data.packing import PackedStream
from dflash.trainer import train

ROOT = Path(__file__).parent.parent
STEPS, PER_STEP = 9, 3  # of the interrupted run: three and a bit epochs of eight micro-batches
WITHOUT_ANCHORS = (7, 16)
SECONDS = 2
MEASURED = ("--measure", "--measure.segments", "2", "--measure.segment-seconds", "0.5", "--optim.steps", "100000")
PATIENT = ("--engine-timeout-seconds", "30")  # for what holds the interpreter for long: compiling, cutting


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
        "telemetry.log_every_steps": config.telemetry.log_every_steps,
        "acceptance.decode_every_steps": 0,
        "engine_timeout_seconds": SECONDS,
    }
    if config.data.features is not None:
        values["data.features"] = config.data.features
    flags = [part for key, value in values.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    return ["--preset", "tiny-cpu", "--engine", "processes", *flags]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a scenario left."""

    codes: dict[str, int]
    left: list[str]
    seconds: float
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


def sharded(base: Path, *, output: Path, **changes: Any) -> RunConfig:
    """A run of six steps with prepared data below `base`."""
    values: dict[str, Any] = {
        "topology": "1t+1d",
        "data": {"path": base / "data"},
        "drafter": {"num_layers": 2},
        "optim": {"steps": 6, "batches_per_step": 4},
        "checkpoint": {"every_steps": 2, "keep_last": 9},
    }
    return make_config(output, **(values | changes))


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
    faults = [
        {"life": 0, "worker": "target-0", "number": 7, "sending": True, "do": "kill"},
        {"life": 1, "saving": 4, "do": "full"},
        {"life": 2, "saving": 5, "do": "damage"},
        {"life": 3, "worker": "target-0", "number": 17, "do": "unplug"},
        {"life": 4, "worker": "target-0", "do": "slow"},
    ]
    whole = make_config(base / "whole" / "run", topology="1t+2d", optim={"steps": 50, "batches_per_step": 2})
    offline = make_config(base / "offline" / "run", topology="0t+2d", data={"features": base / "features"})
    faulty = interrupted(base / "faulty" / "run", topology="1t+2d")
    killed = interrupted(base / "killed" / "run", topology="1t+2d")
    shard = sharded(base, output=base / "sharded" / "run", topology="1t+2d")
    dying = make_config(base / "sharded-killed" / "run", topology="1t+2d")
    return {
        "whole": one("whole", whole, "--transport.checksums"),
        "killed": one("killed", killed, "--resume", restarts=3, faults=lives, without_anchors=WITHOUT_ANCHORS),
        "faulty": one("faulty", faulty, restarts=4, faults=faults),
        "offline": one("offline", offline) | {"ranks": 2},
        "sharded": one("sharded", shard, "--fully-shard", "--resume", *PATIENT),
        "sharded-killed": one("sharded-killed", dying, "--fully-shard", **fault("drafter-1", 9, "kill")),
        "measured": one("measured", small("measured"), *MEASURED, *PATIENT),
        "teams": one("teams", small("teams"), "--topology", "1t+1d", "--target.tensor-parallel", "2", *PATIENT),
        "stopped": one("stopped", small("stopped"), **fault("target-0", 9, "stop")),
        "asked": one("asked", small("asked"), "--optim.steps", "200", **fault("drafter-1", 9, "term")),
        "nan": one("nan", small("nan"), **fault("target-0", 9, "nan")),
        "flags": one("flags", small("flags"), "--optim.steps", "0"),
        "differs": one("differs", small("differs"), of_rank={"2": ["--seed", "4"]}, restarts=1),
        "again": one("again", make_config(base / "whole" / "run", topology="1t+2d")),
        "longer": one("longer", dataclasses.replace(whole, optim=dataclasses.replace(whole.optim, steps=60)), "--resume"),
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


def run_all(base: Path) -> dict[str, Outcome]:
    """Run every scenario."""
    planned = scenarios(base)
    for name, scenario in planned.items():
        Path(scenario["logs"]).mkdir(parents=True)
        (base / f"{name}.json").write_text(json.dumps(scenario))
    train_without_anchors(interrupted(base / "killed" / "run", topology="1t+1d"))  # the first steps, by threads
    keep_until(base / "killed" / "run", 2)
    write_synthetic(make_config(base / "data"), base / "data", [32] * 16)
    train(sharded(base, output=base / "sharded" / "run"))  # the first steps, by threads
    keep_until(base / "sharded" / "run", 2)
    capture(make_config(base / "features"))
    command = [sys.executable, "tests/programs/ranks.py", *(str(base / f"{name}.json") for name in planned)]
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | paths)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"codes"')]
    return {
        name: Outcome(**line, run=base / name / "run", logs=Path(planned[name]["logs"]))
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
