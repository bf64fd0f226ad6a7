"""The whole claim on one machine: the gate, training by threads and by processes, cold starts, transport, scaling.

    python -m regression.headline --output DIR [--gpus N] [--only NAME,...] [--list]

Each command runs in a fresh process, ends within ten minutes, and leaves DIR/NAME.json; one that has it is not run again, so the
rest can follow in another call, or after a kill. Training commands run for `--seconds` after their first step and are then asked
to end. DIR/headline.json has everything with the fingerprint, in the form of `regression/baselines/h200-*.json`.
What lacks GPUs is left out and named. Without GPUs the CPU workload stands for every step: that shows that all of it runs.
Exit codes: 0 every step did what is expected; 1 one did not; 2 bad usage; 3 a step is left out, or left no result.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dflash.files import write_whole
from dflash.standard_output import outlive_reader
from diagnostics import environment
from diagnostics.gpu import missing_gpus
from regression import baseline
from regression.child import ChildFailed, Running
from regression.headline_steps import Sizes, Step, steps

LIMIT_SECONDS = 600.0  # of one command
_POLL_SECONDS = 0.2
_MUST_BE_ZERO = ("recompiles_after_warmup", "fallbacks", "fx_errors")  # of a training command
_SHOWN = (
    "tokens_per_second",
    "tokens_per_second_per_device",
    "recompiles_after_warmup",
    "fallbacks",
    "fx_errors",
    "supply_demand",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing; returns the exit code."""
    options = _options(arguments)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 160)
    chosen, left_out = steps(_sizes(options))
    known = {step.name for step in chosen}
    wanted = set(options.only.split(",")) if options.only else known
    if wanted - known:
        _fail(f"unknown step {min(wanted - known)!r}: here are {', '.join(step.name for step in chosen)}")
    if options.list:
        for step in chosen:
            command = shlex.join(_command(step, options.output))
            ends = "" if step.seconds is None else f"    (asked to end {step.seconds:g} s after its first step)\n"
            console.print(f"{step.name}: {step.what}\n{ends}    {command}", markup=False, highlight=False, soft_wrap=True)
        return 0
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _fail(f"--output {options.output} cannot be made ({error.strerror}): name a directory for the results")
    for step in chosen:
        path = options.output / f"{step.name}.json"
        if step.name in wanted and not path.exists():
            console.print(f"{step.name}: {step.what}", markup=False, highlight=False)
            write_whole(path, (json.dumps(_run(step, options.output), indent=1) + "\n").encode())
    rows = {step.name: json.loads(path.read_text()) for step in chosen if (path := options.output / f"{step.name}.json").exists()}
    console.print(_table(rows))
    for sentence in left_out:
        console.print(f"left out: {sentence}", markup=False, highlight=False)
    values: dict[str, Any] = {
        "kind": baseline.RESULT,
        "command": f"python -m regression.headline {' '.join(sys.argv[1:])}".strip(),
    }
    values |= {"fingerprint": environment.fingerprint(), "left_out": left_out, "steps": rows}
    write_whole(options.output / "headline.json", (json.dumps(values, indent=1) + "\n").encode())
    code = _exit_code(rows, complete=len(rows) == len(chosen) and not left_out)
    expected = {name: row["as_expected"] for name, row in rows.items()}
    print(json.dumps({"exit_code": code, "as_expected": expected, "left_out": left_out}))  # noqa: T201 - the command's result
    return code


def _run(step: Step, output: Path) -> dict[str, Any]:
    """One command: what it was, how it ended, and its result line or file."""
    started, log = time.monotonic(), output / f"{step.name}.log"
    command, figures = _command(step, output), output / f"{step.name}.figures.json"
    row: dict[str, Any] = {"what": step.what, "command": step.command, "as_expected": False}
    try:
        with Running.started(command, log=log) as running:
            if step.seconds is not None:
                _until_trained(running, output / f"{step.name}.run" / "events.jsonl", step.seconds)
            code, printed = running.output(max(1.0, LIMIT_SECONDS - (time.monotonic() - started)))
    except ChildFailed as error:
        return {**row, "failure": str(error), "seconds": time.monotonic() - started}
    if step.leaves_json and figures.exists():
        result: Any = json.loads(figures.read_text())
    else:
        result = _last_object(printed.decode(errors="replace"))
    expected = code in step.exit_codes and not any((result or {}).get(count) for count in _MUST_BE_ZERO)
    row |= {"exit_code": code, "as_expected": expected, "seconds": time.monotonic() - started, "result": result}
    if step.seconds is not None and not result:
        row |= {"as_expected": False, "failure": f"no result line; see {log}"}
    return row


def _command(step: Step, output: Path) -> list[str]:
    """The command with where its results go."""
    command = list(step.command)
    if step.leaves_json:
        command += ["--json", str(output / f"{step.name}.figures.json")]
    if step.seconds is not None or step.needs_output:
        command += ["--output", str(output / f"{step.name}.run")]
    return command


def _until_trained(running: Running, events: Path, seconds: float) -> None:
    """Wait until the run has trained for so long, then ask it to end. Returns early when it ends by itself, or takes too long."""
    deadline, first = time.monotonic() + LIMIT_SECONDS - 60.0, None
    while time.monotonic() < deadline and not running.has_ended():
        if first is None and events.exists() and '"name": "step"' in events.read_text():
            first = time.monotonic()
        if first is not None and time.monotonic() - first >= seconds:
            break
        time.sleep(_POLL_SECONDS)
    running.ask_to_end()


def _last_object(printed: str) -> Any:
    for line in reversed(printed.strip().splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except ValueError:
                return None
    return None


def _table(rows: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="headline", title_justify="left")
    for name in ("step", "as expected", "seconds", "result"):
        table.add_column(name, overflow="fold")
    for name, row in rows.items():
        table.add_row(name, "yes" if row["as_expected"] else "NO", f"{row['seconds']:.0f}", _words(row))
    return table


def _words(row: dict[str, Any]) -> str:
    result = row.get("result") or {}
    if "failure" in row:
        return str(row["failure"]).splitlines()[-1][:200]
    if "sentence" in result:
        return str(result["sentence"])
    shown = {key: result[key] for key in _SHOWN if key in result}
    if shown:
        return ", ".join(f"{key} {value:,.0f}" if isinstance(value, float) else f"{key} {value}" for key, value in shown.items())
    return f"exit code {row['exit_code']}"


def _exit_code(rows: dict[str, dict[str, Any]], *, complete: bool) -> int:
    if any("failure" not in row and not row["as_expected"] for row in rows.values()):
        return 1
    return 0 if complete and all("failure" not in row for row in rows.values()) else 3


def _sizes(options: argparse.Namespace) -> Sizes:
    return Sizes(
        gpus=options.gpus,
        seconds=options.seconds,
        scaling_seconds=options.scaling_seconds,
        starts=options.starts,
        segment_seconds=options.segment_seconds,
        starts_at_once=options.starts_at_once,
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m regression.headline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="results; those that are there are kept")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="GPUs to use; 0 (default): the CPU workload")
    parser.add_argument("--only", default="", metavar="NAMES", help="steps to run now, comma-separated (see --list)")
    parser.add_argument("--list", action="store_true", help="print the commands and end")
    parser.add_argument("--seconds", type=float, default=390.0, help="of training in the main rows (default 390)")
    parser.add_argument("--scaling-seconds", type=float, default=60.0, help="of training in the scaling rows (default 60)")
    parser.add_argument("--starts", type=int, default=20, help="cold starts of each policy (default 20)")
    parser.add_argument("--starts-at-once", type=int, default=1, metavar="N", help="cold starts at one time (default 1)")
    parser.add_argument("--segment-seconds", type=float, default=20.0, help="of each side in a pair of the gate (default 20)")
    options = parser.parse_args(arguments)
    seconds = (options.seconds, options.scaling_seconds, options.segment_seconds)
    if options.gpus < 0 or min(options.starts, options.starts_at_once) < 1 or min(seconds) <= 0:
        parser.error("use --gpus 0 or more, one start or more, and positive seconds")
    if not options.list and options.gpus:
        missing = missing_gpus(options.gpus, _gpus_found(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        if missing:
            parser.error(missing)
    return options


def _gpus_found() -> int:
    """In a process of its own: counting must not touch CUDA in one that starts others."""
    count = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    return int(subprocess.run(count, capture_output=True, text=True, check=True).stdout)


def _fail(message: str) -> None:
    print(f"headline: {message}", file=sys.stderr)  # noqa: T201 - a message of the command
    sys.exit(2)


if __name__ == "__main__":
    outlive_reader()
    sys.exit(main())
