"""Measure, decide, report: `python -m regression.nightly --output DIR [--gpus N]`.

1. Measure the workload until it counts; every attempt goes to the store `DIR/store`.
2. Run the same training under fxprobe for a few steps.
3. Decide by the earlier nights of the series. A night below its limit is compared with a baseline commit at once (the gate),
   and judged again.
4. Write `DIR/report.html`, `DIR/summary.md` and `DIR/junit.xml`, and mirror the night to wandb (offline without a key).

Exit codes: 0 fine, 1 failed, 2 bad usage, 3 insufficient data: the measurement did not count, it is suspect and nothing
confirmed it, or there is no earlier night. A failing mirror is told and fails nothing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dflash.standard_output import outlive_reader
from diagnostics import compile_cache, timeline, triage
from regression import baseline, confirm, laws, mirror, report
from regression.child import ChildFailed
from regression.decision import exit_code, judge, outcomes
from regression.history import History, alert_record, by_workload, read
from regression.measurement import ATTEMPTS, Measurement, measure, measure_until_valid
from regression.probing import probe, worth_keeping
from regression.secondary import missing_nights
from regression.sides import SideError
from regression.spec import RunSpec, planted, workload
from regression.store import Store

_SHOWN_NIGHTS = 20
COLOURS = {"PASS": "green", "FAIL": "bold red", "INSUFFICIENT": "bold magenta"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, probe, decide, report."""
    options = _options(arguments)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 140)
    directory: Path = options.output / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    spec = workload(
        options.gpus,
        segments=options.segments,
        segment_seconds=options.segment_seconds,
        planted=planted(options.burn_share),
        environment=os.environ,
    )
    store = Store(options.output / "store")
    before = read(store)
    for problem in before.unread:
        console.print(f"[yellow]history:[/] {escape(problem)}", highlight=False)
    tried = _measure(spec, directory, store, before, options, _teller(console))
    tonight, history = tried[-1], before.with_measurements(tried)
    note = _note(spec, directory, tonight, options, arguments)
    note |= _why(tonight, history, directory, options.output)
    note |= _gate(tonight, history, directory, options, _teller(console))
    store.add(note)
    for alert in _alerts(store):
        console.print(f"[bold magenta]MISSING[/] {escape(alert)}", highlight=False)
    history = read(store)
    console.print(_table(history.of(tonight.series)))
    found = outcomes(tonight, history)
    for name, outcome in found.items():
        console.print(f"[{COLOURS[outcome.kind]}]{outcome.kind}[/] {name}: {escape(outcome.sentence)}", highlight=False)
    for path in report.write(options.output, history, tonight):
        console.print(f"wrote {escape(str(path))}", highlight=False, soft_wrap=True)
    told = mirror.mirror(tonight, found, options.output, mode=options.wandb)
    console.print(f"wandb: {escape(told)}", highlight=False, soft_wrap=True)
    return exit_code(found)


def _measure(
    spec: RunSpec, directory: Path, store: Store, before: History, options: argparse.Namespace, tell: Callable[[str], None]
) -> list[Measurement]:
    """All attempts, kept."""
    clock = baseline.clock_mhz([one for one in before.measurements if one.name == spec.name])

    def one(attempt: int) -> Measurement:
        limit: float = options.timeout_seconds
        return measure(spec, directory / f"attempt-{attempt}", timeout_seconds=limit, baseline_clock_mhz=clock)

    tried = measure_until_valid(one, attempts=options.attempts, tell=tell)
    for measured in tried:
        store.add({**measured.to_record(), "problems": laws.problems(measured)})
    return tried


def _note(
    spec: RunSpec, directory: Path, tonight: Measurement, options: argparse.Namespace, arguments: Sequence[str] | None
) -> dict[str, Any]:
    """The record of what is found beside the measurement."""
    try:
        probed = worth_keeping(probe(spec, directory / "probed", timeout_seconds=options.timeout_seconds))
    except ChildFailed as error:
        probed = {"failure": str(error)}
    words = sys.argv[1:] if arguments is None else arguments
    commands = {
        "this night": shlex.join(["python", "-m", "regression.nightly", *words]),
        "the measured run": _shown(spec, spec.command(Path("runs/measured"))),
        "the probed run": _shown(spec, spec.probed_command(Path("runs/probed"), Path("runs/fxprobe.json"))),
    }
    return {
        "kind": "night",
        "series": tonight.series,
        "time": tonight.time,
        "name": tonight.name,
        "probed": probed,
        "commands": commands,
        "cache": compile_cache.summary(),
    }


def _why(tonight: Measurement, history: History, directory: Path, output: Path) -> dict[str, Any]:
    """For a night that failed or fell: known failures in its logs, and what is dated before the nights changed."""
    if tonight.failure is None and not judge(tonight, history).is_below:
        return {}
    logs = sorted(path for path in directory.glob("attempt-*/stderr.log") if path.is_file())
    return {"triage": triage.summary(logs), "timeline": timeline.summary(output)[-1:]}


def _shown(spec: RunSpec, command: Sequence[str]) -> str:
    variables = [f"{name}={shlex.quote(value)}" for name, value in spec.variables.items()]
    return " ".join([*variables, shlex.join(["python", *command[1:]])])


def _gate(
    tonight: Measurement, history: History, directory: Path, options: argparse.Namespace, tell: Callable[[str], None]
) -> dict[str, Any]:
    """The gate's verdict where the watch wants one, or why there is none."""
    verdict = judge(tonight, history)
    if not verdict.wants_gate:
        return {}
    commit, why = (options.baseline, "") if options.baseline else confirm.baseline_commit(tonight, history)
    if commit is None:
        tell(f"{verdict.sentence}. The gate cannot run: {why}; name a commit with --baseline")
        return {"gate_not_run": why}
    tell(f"{verdict.sentence}. Comparing with {commit} now")
    try:
        gate = confirm.run_gate(
            commit,
            directory / "gate",
            gpus=options.gpus,
            segment_seconds=options.segment_seconds,
            timeout_seconds=options.timeout_seconds,
            planted=planted(options.burn_share),
            tell=tell,
        )
    except SideError as error:
        tell(f"the gate did not run: {error}")
        return {"gate_not_run": str(error)}
    return {"gate": gate}


def _alerts(store: Store) -> list[str]:
    """Workloads that are missing and were not told today; remembered."""
    history, now = read(store), datetime.now(UTC)
    alerts = missing_nights(by_workload(history), now=now, sent=history.alerts)
    for alert in alerts:
        store.add(alert_record(alert, now))
    return [alert.sentence for alert in alerts]


def _teller(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(escape(text), style="magenta", highlight=False)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m regression.nightly", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="holds store, reports and one directory a night"
    )
    parser.add_argument("--gpus", type=int, default=0, help="GPUs to use; 0 (default): the CPU workload")
    parser.add_argument("--segments", type=int, default=3, help="of a measurement (default 3; another number is another series)")
    parser.add_argument("--segment-seconds", type=float, help="default 60 on GPUs, 5 on a CPU (another length is another series)")
    parser.add_argument("--attempts", type=int, default=ATTEMPTS, help=f"of an invalid measurement (default {ATTEMPTS})")
    parser.add_argument("--timeout-seconds", type=float, default=3600.0, help="of each process (default 3600)")
    parser.add_argument("--baseline", metavar="COMMIT", help="for the gate (default: that of the newest night that passed)")
    parser.add_argument("--burn-share", type=float, default=0.0, metavar="X", help="plant a slowdown, to see that it fails")
    parser.add_argument("--wandb", choices=mirror.MODES, default="auto", help="auto (default): online with a key, else offline")
    options = parser.parse_args(arguments)
    if options.gpus < 0:
        parser.error(f"--gpus {options.gpus}: use 0 for the CPU workload, or a number of GPUs")
    seconds = options.segment_seconds
    if options.segments < 1 or options.attempts < 1 or (seconds is not None and seconds <= 0):
        parser.error("--segments, --attempts and --segment-seconds: use positive numbers")
    if not 0 <= options.burn_share < 1:
        parser.error(f"--burn-share {options.burn_share}: use at least 0 and less than 1")
    if options.gpus > 0:
        import torch  # noqa: PLC0415 - --help should not wait for it

        if torch.cuda.device_count() < options.gpus:
            parser.error(f"needs {options.gpus} GPUs, found {torch.cuda.device_count()}: use fewer, or 0 for the CPU workload")
    options.output.mkdir(parents=True, exist_ok=True)
    return options


def _table(nights: Sequence[Measurement]) -> Table:
    table = Table(title=nights[-1].series, title_justify="left")
    for header in ("time (UTC)", "commit", "tok/s", "tok/s per device", "FX errors", "recompiles", "fallbacks", "counts"):
        table.add_column(header)
    for night in nights[-_SHOWN_NIGHTS:]:
        git = night.fingerprint.get("git") or {}
        commit = f"{str(git.get('commit', 'none'))[:9]}{' +changes' if git.get('dirty') else ''}"
        rates = ["none" if rate is None else f"{rate:,.0f}" for rate in (night.tokens_per_second, night.per_device)]
        counts = [str(night.result.get(key, "none")) for key in ("fx_errors", "recompiles_after_warmup", "fallbacks")]
        word = "invalid" if night.invalid else "failed" if laws.problems(night) else "yes"
        table.add_row(night.time[:19], commit, *rates, *counts, word)
    return table


if __name__ == "__main__":
    outlive_reader()
    sys.exit(main())
