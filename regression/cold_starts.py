"""Cold starts of the trainer under each compile policy: how many fail, how, and how long the others take to full speed.

    python -m regression.cold_starts --policies none,force,lock,prewarm,isolate --starts 20

Each start is a fresh process with an empty compile cache, in which drafter threads meet their first micro-batches. Policies
take turns, so that a busy minute of the machine meets all of them; `--at-once N` starts so many together: more starts an hour,
and times that only compare policies. The file of `--json` grows with every start.
Exit code 0 when every start of `--must-hold` (default: prewarm and isolate) was clean, else 1.

| outcome | meaning |
|---|---|
| clean | the run ended, every call ran compiled |
| uncompiled | calls ran no compiled graph, in silence but for the trainer's counting |
| recompiled | something compiled after its first micro-batch |
| hang | no end within `--timeout-seconds`; the process was ended |
| crash | anything else; told by its exception |

Time to full speed runs from the end of loading to the first step of at least 90 % of the steady rate, which is the median over
the last half of the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dflash.files import write_whole
from dflash.standard_output import outlive_reader
from regression.child import ChildFailed, run_json

POLICIES = ("none", "force", "lock", "prewarm", "isolate")
MUST_HOLD = ("prewarm", "isolate")
FULL_SPEED = 0.9
_CPU = (
    "--preset tiny-cpu --target.path random:qwen3 --target.mask-token-id 5 --data.path synthetic:64 --data.sequence-length 64 "
    "--drafter.init random --drafter.num-layers 2 --drafter.num-features 2 --compile.backend aot_eager"
)
_GPU = "--preset qwen3-8b"


@dataclass(frozen=True, kw_only=True)
class Start:
    """One cold start."""

    policy: str
    outcome: str  # "clean", "uncompiled", "recompiled", "hang" or "crash"
    reason: str  # of what is not clean
    seconds_to_full_speed: float | None
    tokens_per_second: float | None  # steady


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all starts; returns the exit code."""
    options = _options(arguments)
    console = Console(stderr=True)
    starts: list[Start] = []

    def one(policy: str) -> Start:
        return cold_start(policy, _command(options), timeout_seconds=options.timeout_seconds)

    with ThreadPoolExecutor(options.at_once) as pool:
        for start in pool.map(one, (policy for _ in range(options.starts) for policy in options.policies)):
            starts.append(start)
            number = sum(other.policy == start.policy for other in starts)
            told = f"{number}/{options.starts} {start.policy}: {start.outcome} {start.reason}"
            console.print(told, highlight=False, soft_wrap=True)
            if options.json:
                values = {"command": _command(options), "at_once": options.at_once, "starts": [vars(each) for each in starts]}
                write_whole(options.json, json.dumps(values, indent=1).encode())
    console.print(_table(starts, options.policies))
    print(json.dumps(summary(starts, options.policies)))  # noqa: T201 - the command's result
    failed = [start for start in starts if start.policy in options.must_hold and start.outcome != "clean"]
    return 1 if failed else 0


def cold_start(policy: str, command: Sequence[str], *, timeout_seconds: float) -> Start:
    """Train once under `policy` with an empty compile cache."""
    with tempfile.TemporaryDirectory(prefix="cold-start-") as scratch:
        run, log = Path(scratch) / "run", Path(scratch) / "stderr.log"
        flags = ("--output", str(run), "--compile.policy", policy, "--compile.cache", str(Path(scratch) / "cache"))
        try:
            child = run_json([*command, *flags], log=log, timeout_seconds=timeout_seconds)
            outcome, reason = outcome_of(child.result, "")
        except ChildFailed as error:
            outcome, reason = ("hang", "") if "did not end within" in str(error) else outcome_of({}, log.read_text())
        seconds, rate = speed(run / "events.jsonl") if outcome == "clean" else (None, None)
    return Start(policy=policy, outcome=outcome, reason=reason, seconds_to_full_speed=seconds, tokens_per_second=rate)


def outcome_of(result: dict[str, Any], errors: str) -> tuple[str, str]:
    """Outcome and reason, from the result line of a run or, without one, from its standard error."""
    if result:
        for key, outcome in (("fallbacks", "uncompiled"), ("recompiles_after_warmup", "recompiled"), ("fx_errors", "crash")):
            if result.get(key):
                return outcome, f"{result[key]} {key}"
        return "clean", ""
    if "compiled code was bypassed" in errors:
        return "uncompiled", _line_after(errors, "compiled code was bypassed")
    if "compiled after warm-up" in errors:
        return "recompiled", _line_after(errors, "compiled after warm-up")
    raised = re.findall(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception|Unsupported|Failed|Hit))(?:: (.*))?$", errors, flags=re.MULTILINE)
    return "crash", ": ".join(part for part in raised[0] if part)[:160] if raised else errors.strip()[-160:]


def speed(events: Path) -> tuple[float | None, float | None]:
    """Seconds from the end of loading to full speed, and the steady tokens per second, from the events of a run."""
    begun, steps = None, []
    for line in events.read_text().splitlines():
        event = json.loads(line)
        if event["name"] == "phase" and event["fields"]["text"].startswith("building"):
            begun = event["time_seconds"]
        elif event["name"] == "step":
            steps.append((event["time_seconds"], event["fields"]["tokens_per_second"]))
    if begun is None or not steps:
        return None, None
    steady = statistics.median(rate for _, rate in steps[len(steps) // 2 :])
    return next(time - begun for time, rate in steps if rate >= FULL_SPEED * steady), steady


def summary(starts: Sequence[Start], policies: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Counts and medians for each policy."""
    found = {}
    for policy in policies:
        mine = [start for start in starts if start.policy == policy]
        outcomes = Counter(start.outcome for start in mine)
        found[policy] = {
            "starts": len(mine),
            **{name: outcomes[name] for name in ("clean", "crash", "hang", "uncompiled", "recompiled")},
            "seconds_to_full_speed": _median([start.seconds_to_full_speed for start in mine]),
            "tokens_per_second": _median([start.tokens_per_second for start in mine]),
            "reasons": dict(Counter(start.reason for start in mine if start.reason).most_common()),
        }
    return found


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _line_after(text: str, words: str) -> str:
    lines = text[text.index(words) :].splitlines()
    return lines[1].strip("- ") if len(lines) > 1 else words


def _command(options: argparse.Namespace) -> list[str]:
    where = _CPU if options.devices == "cpu" else _GPU
    common = f"--topology {options.topology} --devices {options.devices} --optim.steps {options.steps}"
    batches = f"--optim.batches-per-step {options.batches_per_step} --checkpoint.no-keep-untrained --telemetry.wandb off"
    return [sys.executable, "-m", "dflash", "train", *f"{where} {common} {batches}".split(), *options.train_flags]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    def names(text: str) -> tuple[str, ...]:
        return tuple(text.split(","))

    parser = argparse.ArgumentParser(
        prog="python -m regression.cold_starts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", type=names, default=POLICIES, help=f"default {','.join(POLICIES)}")
    parser.add_argument("--must-hold", type=names, default=MUST_HOLD, help=f"default {','.join(MUST_HOLD)}")
    parser.add_argument("--starts", type=int, default=20, help="of each policy (default 20)")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="processes that start at one time (default 1)")
    parser.add_argument("--topology", default="1t+3d")
    parser.add_argument("--devices", default="cpu", help='"cpu", or as in the trainer: "cuda:0,cuda:0,cuda:0,cuda:0"')
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batches-per-step", type=int, default=6)
    parser.add_argument("--timeout-seconds", type=float, default=240.0)
    parser.add_argument("--json", type=Path, help="write every start there")
    parser.add_argument("train_flags", nargs="*", help="further flags of the trainer, after --")
    options = parser.parse_args(arguments)
    unknown = set(options.policies) - {*POLICIES, "eager"}
    if unknown or min(options.starts, options.at_once) < 1:
        asked = f"--policies {','.join(options.policies)} --starts {options.starts} --at-once {options.at_once}"
        parser.error(f"{asked}: policies are {', '.join(POLICIES)} and eager, and there must be at least one start")
    return options


def _table(starts: Sequence[Start], policies: Sequence[str]) -> Table:
    table = Table(title="cold starts", title_justify="left")
    for name in ("policy", "starts", "clean", "crash", "hang", "uncompiled", "recompiled", "to full speed", "tok/s"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for policy, row in summary(starts, policies).items():
        seconds, rate = row["seconds_to_full_speed"], row["tokens_per_second"]
        counts = [str(row[name]) for name in ("starts", "clean", "crash", "hang", "uncompiled", "recompiled")]
        table.add_row(policy, *counts, "-" if seconds is None else f"{seconds:.1f} s", "-" if rate is None else f"{rate:,.0f}")
    return table


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    outlive_reader()
    sys.exit(main())
