"""`python -m dflash prepare | train | evaluate | export | check | plan | import`: parse, run, print one JSON line, exit code.

Progress and errors go to stderr; the last line of stdout is the result as one JSON object. Exit codes: 0 fine, 1 the run
failed, found an FX error or lost tokens in float32, or a check failed, 2 bad usage or input, 3 asked to measure or check
and could not, 130 interrupted.

Each command imports what takes seconds (torch, transformers) when its flags are known to be good, and ranks of a run when they
have agreed with the others: help and bad input are told at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import tyro
from safetensors import SafetensorError

from dflash import events, plan_options, presets
from dflash.checking.settings import CheckConfig
from dflash.command_config import EvaluateConfig, PrepareConfig
from dflash.config import ConfigError, RunConfig, TargetConfig
from dflash.data.meta import DataError, PrepareFailed
from dflash.engine.queue import WorkerFailed
from dflash.errors import CheckpointError, ContractError
from dflash.standard_output import outlive_reader

USAGE = """usage: python -m dflash COMMAND ...
  prepare   prompts to conversations answered by the target: --prompts FILE --output DIR --target.path TARGET
  train     train a drafter: --preset {presets} --output DIR [--topology 1t+2d] [any field, see train --help]
  capture   target features to disk, to train without targets (--data.features DIR): --preset P --output DIR [any field]
  evaluate  speculative decoding of held-out prompts: evaluate RUN [--checkpoint best]
  export    write a run's drafter in z-lab's DFlash format: export RUN OUT [--checkpoint best]
  check     is a drafter what a server will take it for: check RUN|CHECKPOINT|EXPORT [--target T]
  plan      memory, work and speed of a run beforehand: plan --preset P [--gpus N] [--rates FILE] [--gpu-memory-gib G] [field]
            or of larger ones, by measured runs: plan --simulate RUN... [--gpus 8 64 1024]
  import    a drafter of another program in z-lab's DFlash format: import SOURCE OUT --target T"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """`python -m dflash export RUN OUT`: write the drafter in z-lab's DFlash format."""

    run: tyro.conf.Positional[Path]  # directory of a training run
    out: tyro.conf.Positional[Path]  # new directory
    checkpoint: str = "best"  # "best", "last", or a name such as step-000500


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """`python -m dflash import SOURCE OUT --target T`: a drafter of another program in z-lab's DFlash format."""

    source: tyro.conf.Positional[Path]  # local directory with config.json and safetensors: z-lab, SpecForge or speculators
    out: tyro.conf.Positional[Path]  # new directory
    target: str  # path of the target, as --target.path of train
    gguf_file: str | None = None  # file in it
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of the target, for later checks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command not in COMMANDS:
        wanted_help = command in ("-h", "--help")
        print(USAGE.format(presets="|".join(presets.PRESETS)), file=sys.stdout if wanted_help else sys.stderr)
        return 0 if wanted_help else 2
    try:
        result = COMMANDS[command](rest)
    except (ConfigError, DataError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OSError, SafetensorError) as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted; checkpoints that were saved are whole", file=sys.stderr)
        return 130
    except (ContractError, PrepareFailed, WorkerFailed) as failure:
        if isinstance(failure, WorkerFailed):
            traceback.print_exception(failure.__cause__ or failure, file=sys.stderr)
        print(f"error: {failure}", file=sys.stderr)
        return 1
    if result is not None:  # None: one of several processes, and not the one that reports
        print(json.dumps(events.finite(result)), flush=True)
        if incomplete := result.get("measure", {}).get("incomplete"):
            print(f"not measured: {incomplete}; give the run more --optim.steps", file=sys.stderr)
    return _exit_code(result or {})


def train_command(arguments: list[str]) -> dict[str, Any] | None:
    """`train`: the preset's fields are the defaults of the flags."""
    config = _train_config(arguments)
    if config.engine == "processes":
        from dflash.engine.processes import joined  # noqa: PLC0415 - torch takes seconds; --help should not

        with joined(config) as ranks:  # before the long imports: what is wrong with the start is said at once
            from dflash.trainer import train_rank  # noqa: PLC0415 - see above

            return train_rank(config, ranks)
    from dflash.trainer import train  # noqa: PLC0415 - see above

    return train(config)


def capture_command(arguments: list[str]) -> dict[str, Any]:
    """`capture`: fields as in `train`."""
    config = tyro.cli(RunConfig, prog="python -m dflash capture", default=_preset_of(arguments), args=arguments)
    from dflash.capture import capture  # noqa: PLC0415 - see train_command

    return capture(config)


def plan_command(arguments: list[str]) -> dict[str, Any]:
    """`plan`: fields as in `train`."""
    own, fields = plan_options.options(arguments)
    if own.simulate:
        if fields:
            raise ConfigError(f"plan --simulate takes no fields of a run, found {shlex.join(fields)}: the runs hold theirs")
        return plan_options.simulated(own)
    config = tyro.cli(RunConfig, prog="python -m dflash plan", default=_preset_of(fields), args=fields)
    if own.gpus and (len(own.gpus) > 1 or any(field.startswith(("--topology", "--devices")) for field in fields)):
        raise ConfigError("plan --gpus takes one number, and decides --topology and --devices: leave them out")
    from dflash import plan  # noqa: PLC0415 - see train_command

    rates = plan.read_rates(own.rates) if own.rates else None
    found: dict[str, Any] = {}
    if own.gpus:
        config, found = plan.split(config, own.gpus[0], rates)
    return plan.plan(config, rates, own.gpu_memory_gib) | found


def prepare_command(arguments: list[str]) -> dict[str, Any]:
    """`prepare`."""
    config = tyro.cli(PrepareConfig, prog="python -m dflash prepare", args=arguments)
    from dflash.data.prepare import prepare  # noqa: PLC0415 - see train_command

    try:
        return prepare(config)
    except PrepareFailed as failure:
        again = shlex.join(("python", "-m", "dflash", "prepare", *arguments))
        raise PrepareFailed(f"{failure}\nWhat was answered is kept; go on with: {again}") from failure


def evaluate_command(arguments: list[str]) -> dict[str, Any]:
    """`evaluate`."""
    config = tyro.cli(EvaluateConfig, prog="python -m dflash evaluate", args=arguments)
    from dflash.decoding.evaluate import evaluate  # noqa: PLC0415 - see train_command
    from dflash.device import intra_op_threads  # noqa: PLC0415 - see train_command

    with intra_op_threads(config.device, config.cpu_threads):
        return evaluate(config)


def export_command(arguments: list[str]) -> dict[str, Any]:
    """`export`."""
    config = tyro.cli(ExportConfig, prog="python -m dflash export", args=arguments)
    from dflash import checkpoint  # noqa: PLC0415 - see train_command
    from dflash.modeling.contract import write_export  # noqa: PLC0415 - see train_command

    directory = checkpoint.resolve(config.run, config.checkpoint)
    state = checkpoint.load(directory)
    shape = checkpoint.shape_of(state)
    record = {
        "run": str(config.run.absolute()),
        "step": state.step,
        "target": dataclasses.asdict(state.config.target),
        "data": str(state.config.data.path),
    }
    write_export(config.out, state.weights, shape, state.config.target.path, record)
    return {"checkpoint": str(directory), "step": state.step, "export": str(config.out)}


def check_command(arguments: list[str]) -> dict[str, Any]:
    """`check`."""
    config = tyro.cli(CheckConfig, prog="python -m dflash check", args=arguments)
    from dflash.checking.runner import check  # noqa: PLC0415 - see train_command
    from dflash.device import intra_op_threads  # noqa: PLC0415 - see train_command

    with intra_op_threads(config.device, config.cpu_threads):
        return check(config)


def import_command(arguments: list[str]) -> dict[str, Any]:
    """`import`."""
    config = tyro.cli(ImportConfig, prog="python -m dflash import", args=arguments)
    target = TargetConfig(path=config.target, gguf_file=config.gguf_file, dtype=config.dtype)
    from dflash.interchange.convert import convert  # noqa: PLC0415 - see train_command

    return convert(config.source, config.out, target)


COMMANDS: dict[str, Callable[[list[str]], dict[str, Any] | None]] = {
    "prepare": prepare_command,
    "train": train_command,
    "capture": capture_command,
    "evaluate": evaluate_command,
    "export": export_command,
    "check": check_command,
    "plan": plan_command,
    "import": import_command,
}


def _train_config(arguments: list[str]) -> RunConfig:
    """The flags of `train`. What is wrong with them is said by one rank only where torchrun has started several."""

    def parse(*, aloud: bool) -> RunConfig:
        with contextlib.ExitStack() as silent:
            if not aloud:
                silent.enter_context(contextlib.redirect_stderr(io.StringIO()))
                silent.enter_context(contextlib.redirect_stdout(io.StringIO()))
            return tyro.cli(RunConfig, prog="python -m dflash train", default=_preset_of(arguments), args=arguments)

    rank = os.environ.get("RANK", "0")
    try:
        return parse(aloud=rank == "0")
    except (ConfigError, SystemExit) as error:
        if "TORCHELASTIC_RUN_ID" not in os.environ or (isinstance(error, SystemExit) and not error.code):
            raise
        from dflash.engine.launch import Silent, told_by_rank_0  # noqa: PLC0415 - see train_command

        if rank == "0" and isinstance(error, ConfigError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        if told_by_rank_0():
            raise Silent(2) from None
    return parse(aloud=True)  # rank 0 has other flags


def _preset_of(arguments: list[str]) -> RunConfig:
    named = [value for argument, value in itertools.pairwise(arguments) if argument == "--preset"]
    named += [argument.removeprefix("--preset=") for argument in arguments if argument.startswith("--preset=")]
    if len(named) > 1:
        raise ConfigError(f"a run has one preset, found {', '.join(named)}: leave the others out")
    if named:
        return presets.preset(named[0])
    if {"-h", "--help"} & set(arguments):
        return RunConfig()
    raise ConfigError(f"a run needs --preset: one of {', '.join(presets.PRESETS)}")


def _exit_code(result: dict[str, Any]) -> int:
    # In bfloat16 a block rounds differently from one token at a time, so only float32 promises equal tokens.
    parts = (result, *result.get("trees", ()))
    lost = any(part.get("lossless") is False for part in parts) and result.get("dtype") == "float32"
    if lost or any(result.get(key) for key in ("fx_errors", "recompiles_after_warmup", "fallbacks", "failed")):
        return 1
    return 3 if result.get("measure", {}).get("incomplete") or result.get("required_missing") else 0


if __name__ == "__main__":
    outlive_reader()
    sys.exit(main())
