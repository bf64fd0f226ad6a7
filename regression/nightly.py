"""Measure once and append to a history: `python -m regression.nightly --output DIR [--gpus N]`.

Decides as `pytest regression/` does, against the earlier nights of the same series. Exit codes: 0 fine, 1 failed, 2 bad usage,
3 insufficient data: the measurement did not count, or there is no earlier night.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from regression import baseline, laws
from regression.acceptance import Acceptance
from regression.decision import counting, decide
from regression.history import acceptances
from regression.laws import LAWS, Outcome
from regression.measurement import ATTEMPTS, Measurement, measure, measure_until_valid
from regression.spec import workload
from regression.store import Store

_SHOWN_NIGHTS = 20
COLOURS = {"PASS": "green", "FAIL": "bold red", "INSUFFICIENT": "bold magenta"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, append, show, decide."""
    options = _options(arguments)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 140)
    night: Path = options.output / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    spec = workload(options.gpus, segments=options.segments, segment_seconds=options.segment_seconds, environment=os.environ)
    store = Store(options.output / "store")
    everything, accepted, unread = read(store)
    clock = baseline.clock_mhz([one for one in everything if one.name == spec.name])

    def one(attempt: int) -> Measurement:
        limit: float = options.timeout_seconds
        return measure(spec, night / f"attempt-{attempt}", timeout_seconds=limit, baseline_clock_mhz=clock)

    tried = measure_until_valid(one, attempts=options.attempts, tell=lambda text: console.print(escape(text), style="magenta"))
    for measured in tried:
        store.add({**measured.to_record(), "problems": laws.problems(measured)})
    tonight, history = tried[-1], [one for one in everything if one.series == tried[-1].series]
    for problem in unread:
        console.print(f"[yellow]history:[/] {escape(problem)}", highlight=False)
    console.print(_table([*history, *tried]))
    outcomes = judge(tonight, history, accepted)
    for name, outcome in outcomes.items():
        console.print(f"[{COLOURS[outcome.kind]}]{outcome.kind}[/] {name}: {escape(outcome.sentence)}", highlight=False)
    return exit_code(outcomes)


def judge(tonight: Measurement, history: Sequence[Measurement], accepted: Sequence[Acceptance] = ()) -> dict[str, Outcome]:
    """Every law and the throughput. A first night, and a first one below the limit, are insufficient, not failed."""
    outcomes = {name: law(tonight) for name, law in LAWS.items()}
    if counting(history) or tonight.invalid or tonight.failure:
        outcomes["throughput"] = decide(tonight, history, record="", accepted=accepted, suspect_fails=False)
    else:
        outcomes["throughput"] = Outcome(kind="INSUFFICIENT", sentence="no earlier night of this series counts")
    return outcomes


def exit_code(outcomes: dict[str, Outcome]) -> int:
    """Of the command."""
    kinds = {outcome.kind for outcome in outcomes.values()}
    return 1 if "FAIL" in kinds else 3 if "INSUFFICIENT" in kinds else 0


def read(store: Store) -> tuple[list[Measurement], list[Acceptance], list[str]]:
    """All measurements, the oldest first, the accepted changes, and what could not be read."""
    records, unread = store.read()
    measurements = []
    for record in records:
        if record["kind"] != "measurement":
            continue
        try:
            measurements.append(Measurement.from_record(record))
        except (KeyError, TypeError) as error:
            unread.append(f"a measurement of {record['time']} in another format, skipped ({error})")
    return measurements, acceptances(records), unread


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m regression.nightly", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="holds the store and one directory a night")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs to use; 0 (default): the CPU workload")
    parser.add_argument("--segments", type=int, default=3, help="of a measurement (default 3; another number is another series)")
    parser.add_argument("--segment-seconds", type=float, help="default 60 on GPUs, 5 on a CPU (another length is another series)")
    parser.add_argument("--attempts", type=int, default=ATTEMPTS, help=f"of an invalid measurement (default {ATTEMPTS})")
    parser.add_argument("--timeout-seconds", type=float, default=3600.0, help="of each process (default 3600)")
    options = parser.parse_args(arguments)
    if options.gpus < 0:
        parser.error(f"--gpus {options.gpus}: use 0 for the CPU workload, or a number of GPUs")
    seconds = options.segment_seconds
    if options.attempts < 1 or options.segments < 1 or (seconds is not None and seconds <= 0):
        parser.error("--attempts, --segments and --segment-seconds: use positive numbers")
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
    sys.exit(main())
