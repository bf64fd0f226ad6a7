"""Measure once and append to a history: `python -m regression.nightly --output DIR [--gpus N]`.

Fails (exit code 1) on FX errors, recompiles after the warm-up, and fallbacks. Throughput is shown as a ratio to the median of
the valid nights before it, of the same workload and fingerprint, and not judged yet. Exit codes: 0 fine, 1 failed, 2 bad
usage, 3 measured but invalid, or fewer than five nights to compare with.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from regression.child import ChildFailed
from regression.measurement import Measurement, measure, prepare_data
from regression.spec import workload
from regression.store import Store

MIN_NIGHTS = 5
_SHOWN_NIGHTS = 20


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one night decides."""

    status: Literal["fine", "failed", "invalid", "insufficient history"]
    sentences: tuple[str, ...]
    ratio: float | None  # throughput to the median of the nights before
    nights: int  # that it was compared with

    @property
    def exit_code(self) -> int:
        """Of the command."""
        return {"fine": 0, "failed": 1, "invalid": 3, "insufficient history": 3}[self.status]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare, measure, append, show, decide."""
    options = _options(arguments)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 140)
    night: Path = options.output / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    try:
        limit: float = options.timeout_seconds
        data = prepare_data(options.output, timeout_seconds=limit) if options.gpus == 0 else Path()
        tonight = measure(workload(options.gpus, data=data, steps=options.steps), night, timeout_seconds=limit)
    except ChildFailed as failure:
        console.print(f"[bold red]failed:[/] {escape(str(failure))}", highlight=False)
        return 1
    store = Store(options.output / "history.jsonl")
    history, problems = read_series(store, tonight.series)
    store.append(tonight.to_dict())
    verdict = judge(tonight, history)
    for problem in problems:
        console.print(f"[yellow]history:[/] {escape(problem)}", highlight=False)
    console.print(_table(tonight, history))
    for sentence in verdict.sentences:
        console.print(escape(sentence), highlight=False)
    console.print(f"[bold]{verdict.status}[/]", highlight=False)
    return verdict.exit_code


def read_series(store: Store, series: str) -> tuple[list[Measurement], list[str]]:
    """The measurements of one series, the oldest first, and what could not be read."""
    entries, problems = store.read()
    measurements = []
    for entry in entries:
        try:
            measurement = Measurement.from_dict(entry)
        except (KeyError, TypeError) as error:
            problems.append(f"{store.path}: an entry of another version, skipped ({error})")
        else:
            if measurement.series == series:
                measurements.append(measurement)
    return measurements, problems


def judge(tonight: Measurement, history: Sequence[Measurement]) -> Verdict:
    """Decide about `tonight` with the nights before it."""
    rates = [night.tokens_per_second for night in history if not night.invalid and not night.problems()]
    known = [rate for rate in rates if rate is not None]
    rate = tonight.tokens_per_second
    ratio = rate / statistics.median(known) if rate is not None and known else None
    problems = tonight.problems()
    shown = "no earlier night" if ratio is None else f"{ratio:.3f} of the median of {len(known)} earlier nights"
    sentences = [
        *problems,
        *(f"invalid: {reason}" for reason in tonight.invalid),
        f"tokens per second: {shown} (shown, not judged)",
    ]
    if problems:
        return Verdict(status="failed", sentences=tuple(sentences), ratio=ratio, nights=len(known))
    if tonight.invalid:
        return Verdict(status="invalid", sentences=tuple(sentences), ratio=ratio, nights=len(known))
    if len(known) < MIN_NIGHTS:
        sentences.append(f"insufficient history: {len(known)} valid nights of this series, {MIN_NIGHTS} needed")
        return Verdict(status="insufficient history", sentences=tuple(sentences), ratio=ratio, nights=len(known))
    return Verdict(status="fine", sentences=tuple(sentences), ratio=ratio, nights=len(known))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m regression.nightly", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="holds history.jsonl and one directory a night")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs to use; 0 (default): the CPU workload")
    parser.add_argument("--steps", type=int, help="optimizer steps (another number is another series)")
    parser.add_argument("--timeout-seconds", type=float, default=3600.0, help="of each process (default 3600)")
    options = parser.parse_args(arguments)
    if options.gpus < 0:
        parser.error(f"--gpus {options.gpus}: use 0 for the CPU workload, or a number of GPUs")
    if options.gpus > 0:
        import torch  # noqa: PLC0415 - --help should not wait for it

        if torch.cuda.device_count() < options.gpus:
            parser.error(f"needs {options.gpus} GPUs, found {torch.cuda.device_count()}: use fewer, or 0 for the CPU workload")
    options.output.mkdir(parents=True, exist_ok=True)
    return options


def _table(tonight: Measurement, history: Sequence[Measurement]) -> Table:
    table = Table(title=tonight.series, title_justify="left")
    for header in ("time (UTC)", "commit", "tok/s", "tok/s per device", "FX errors", "recompiles", "fallbacks", "counts"):
        table.add_column(header)
    for night in (*history[-_SHOWN_NIGHTS:], tonight):
        git = night.fingerprint.get("git") or {}
        commit = f"{str(git.get('commit', 'none'))[:9]}{' +changes' if git.get('dirty') else ''}"
        numbers = [night.result.get(key) for key in ("tokens_per_second", "tokens_per_second_per_device")]
        rates = [f"{number:,.0f}" if isinstance(number, int | float) else "none" for number in numbers]
        counts = [str(night.result.get(key, "none")) for key in ("fx_errors", "recompiles_after_warmup", "fallbacks")]
        table.add_row(
            night.time[:19], commit, *rates, *counts, "invalid" if night.invalid else "failed" if night.problems() else "yes"
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
