"""What the probes cost while nothing traces: `python -m diagnostics.overhead [--json FILE]`.

Three pieces of work are timed with and without probes: a call of a compiled function, a call of an `nn.Module`, and a training
step (forward, backward, AdamW) of a compiled MLP. A repetition times both sides in one process, one after the other, in
alternating order, with attaching and a warm-up outside the clock; what is reported is the median over repetitions of the
difference within each, and its quartiles, which say how far the machine lets the number be trusted. Stretches are short, so that
what else the machine does hits few of the pairs.

Goals are printed beside the measurements and decide nothing. Exit codes: 0 measured, 2 bad usage, 3 a probe was not attached.

Known limits: CPU, one thread of the program; the cost while something traces is another question. On a busy machine the
difference of a training step drowns in the spread: then its sign means nothing. `--clock cpu` counts the processor time of the
process instead of the wall's, which a busy machine disturbs less, and which does not see waiting.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from diagnostics.observe import observed
from diagnostics.records import Log

_WIDTH, _LAYERS = 256, 8  # of the MLP
_PROBING_ROWS = 64  # of the step that the number of rows is chosen by
_WARM_UP_CALLS = 3
_CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Work:
    """Something to time by `clock`; `goal` is the most that the probes should add, in `unit`, or per cent if `is_percent`."""

    name: str
    call: Callable[[], object]
    calls: int  # in one timed stretch
    unit: str
    seconds_per_unit: float
    goal: float
    is_percent: bool = False
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True)
class Row:
    """One work's cost per call, in `unit`: medians over repetitions; `added` are (lower quartile, median, upper quartile)."""

    name: str
    unit: str
    without: float
    with_probes: float
    added: tuple[float, float, float]
    ratio: float
    added_percent: tuple[float, float, float]
    goal: float
    goal_unit: str
    calls: int
    repetitions: int

    @property
    def compared(self) -> tuple[float, float, float]:
        """What the goal is about."""
        return self.added_percent if self.goal_unit == "%" else self.added


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    options = _options(arguments)
    works = (
        compiled_call(options.calls),
        module_call(options.calls),
        training_step(options.steps, options.step_milliseconds / 1000),
    )
    not_observed: dict[str, None] = {}
    clock = _CLOCKS[options.clock]
    rows = [measure(dataclasses.replace(work, clock=clock), options.repetitions, not_observed) for work in works]
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(_table(rows))
    how = f"{options.clock} clock, {options.repetitions} repetitions"
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads of torch, {how}", highlight=False)
    for sentence in not_observed:
        console.print(f"[yellow]not observed[/]: {escape(sentence)}", highlight=False)
    if options.json is not None:
        content = {
            "version": 1,
            "torch": torch.__version__,
            "clock": options.clock,
            "rows": [dataclasses.asdict(row) for row in rows],
            "not_observed": list(not_observed),
        }
        try:
            options.json.write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            print(f"overhead: cannot write {options.json}: {error}", file=sys.stderr)  # noqa: T201 - a message of the command
            return 2
    return 3 if not_observed else 0


def measure(work: Work, repetitions: int, not_observed: dict[str, None]) -> Row:
    """Time `work` with and without probes; sentences of probes that were not attached go to `not_observed`."""
    gc.collect()
    pairs: list[tuple[float, float]] = []
    for repetition in range(repetitions):
        if repetition % 2:
            with_probes, without = _observed(work, not_observed), _timed(work)
        else:
            without, with_probes = _timed(work), _observed(work, not_observed)
        pairs.append((without, with_probes))
    added = [with_probes - without for without, with_probes in pairs]
    percent = [100 * (with_probes / without - 1) for without, with_probes in pairs]
    return Row(
        name=work.name,
        unit=work.unit,
        without=statistics.median(without for without, _ in pairs),
        with_probes=statistics.median(with_probes for _, with_probes in pairs),
        added=_quartiles(added),
        ratio=statistics.median(with_probes / without for without, with_probes in pairs),
        added_percent=_quartiles(percent),
        goal=work.goal,
        goal_unit="%" if work.is_percent else work.unit,
        calls=work.calls,
        repetitions=repetitions,
    )


def compiled_call(calls: int) -> Work:
    """A call of a compiled function that does next to nothing."""

    def add_one(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    compiled = torch.compile(add_one, backend="eager")
    x = torch.ones(1)
    return Work("compiled call", lambda: compiled(x), calls, "us", 1e-6, goal=1.0)


def module_call(calls: int) -> Work:
    """A call of a module that does nothing."""
    module = torch.nn.Identity()
    x = torch.ones(1)
    return Work("nn.Module call", lambda: module(x), calls, "us", 1e-6, goal=0.1)


def training_step(steps: int, step_seconds: float) -> Work:
    """Forward, backward and AdamW of a compiled MLP, with as many rows as take about `step_seconds` uncompiled."""
    layers = [layer for _ in range(_LAYERS) for layer in (torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    forward: Callable[[torch.Tensor], torch.Tensor] = model

    def step(x: torch.Tensor) -> None:
        loss = forward(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        optimizer.zero_grad()

    x = torch.randn(_PROBING_ROWS, _WIDTH)
    probing = Work("", lambda: step(x), 3, "s", 1.0, goal=0.0)
    fixed = _timed(dataclasses.replace(probing, call=optimizer.step))
    rows = max(1, round(_PROBING_ROWS * max(0.0, step_seconds - fixed) / max(1e-9, _timed(probing) - fixed)))
    forward = torch.compile(model, backend="aot_eager")
    x = torch.randn(rows, _WIDTH)
    return Work(f"training step, {rows} rows", lambda: step(x), steps, "ms", 1e-3, goal=0.5, is_percent=True)


def _observed(work: Work, not_observed: dict[str, None]) -> float:
    with observed() as log:
        result = _timed(work)
    not_observed.update(dict.fromkeys(_sentences(log, work)))
    return result


def _sentences(log: Log, work: Work) -> list[str]:
    seen = log.observations()
    sentences = [one.name for one in seen if one.kind == "not_observed"]
    return sentences + [f"{work.name}: {one.name} was compiled under the clock" for one in seen if one.kind == "compile"]


def _timed(work: Work) -> float:
    """`work.unit`s per call. The garbage collector does not run under the clock."""
    for _ in range(_WARM_UP_CALLS):
        work.call()
    call, clock, numbers = work.call, work.clock, range(work.calls)
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = clock()
        for _ in numbers:
            call()
        seconds = clock() - start
    finally:
        if collecting:
            gc.enable()
    return seconds / work.calls / work.seconds_per_unit


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="What the probes add while nothing traces (medians; quartiles in brackets)", title_justify="left")
    for header in ("work", "without", "with", "ratio", "added", "goal"):
        table.add_column(header, justify="left" if header == "work" else "right")
    for row in rows:
        low, middle, high = row.compared
        table.add_row(
            escape(row.name),
            f"{row.without:.3f} {row.unit}",
            f"{row.with_probes:.3f} {row.unit}",
            f"{row.ratio:.4f}",
            escape(f"{middle:+.3f} [{low:+.3f}, {high:+.3f}] {row.goal_unit}"),
            f"under {row.goal:g} {row.goal_unit}",
        )
    return table


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m diagnostics.overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--repetitions", type=int, default=60, help="of each pair (default 60)")
    parser.add_argument("--calls", type=int, default=1000, help="compiled and module calls in one stretch (default 1000)")
    parser.add_argument("--steps", type=int, default=2, help="training steps in one stretch (default 2)")
    parser.add_argument("--clock", choices=tuple(_CLOCKS), default="wall", help="default wall; cpu on a busy machine")
    parser.add_argument("--step-milliseconds", type=float, default=50.0, help="about how long a step takes (default 50)")
    options = parser.parse_args(arguments)
    if min(options.calls, options.steps) < 1 or options.step_milliseconds <= 0 or options.repetitions < 2:
        parser.error("use at least 2 --repetitions, 1 --calls, 1 --steps, and --step-milliseconds above 0")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no directory {options.json.absolute().parent}")
    return options


if __name__ == "__main__":
    sys.exit(main())
