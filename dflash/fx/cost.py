"""What isolation costs, as ratios to a process without it: `python -m dflash.fx.cost [--rounds N] [--json FILE]`.

Each piece of work is timed in four states in every round: without isolation, without it again (A/A: what the machine makes of
two equal things), with it while nothing traces, and with it while another thread is inside a trace. The order turns around from
round to round. The clock counts the processor time of the calling thread, and a round keeps the shortest of a few stretches,
which a busy machine disturbs least; what is reported is the median over rounds of the ratio within each, and its quartiles.
A goal that is missed by less than the A/A spread says nothing.

Goals decide nothing. Exit codes: 0 measured, 1 `nn.Module` was patched while nothing traced, 2 bad usage, 3 isolation refused.
Known limits: CPU. The other thread is parked inside its trace: what two busy threads cost each other is Python's matter.
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
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from dflash.fx import seams
from dflash.fx.checks import in_trace
from dflash.fx.isolation import IsolationError, isolated
from dflash.standard_output import outlive_reader

State = Literal["none", "again", "idle", "beside"]
Quartiles = tuple[float, float, float]
_STRETCHES = 5  # in a round; the shortest counts
_STRETCH_SECONDS = 0.004


@dataclass(frozen=True, kw_only=True)
class Work:
    """Something to time, and the ratios that it should stay under; None: there is no goal."""

    name: str
    call: Callable[[], object]
    idle_goal: float | None = None
    beside_goal: float | None = None
    alone: bool = False  # not timed beside a trace: it traces itself


@dataclass(frozen=True, kw_only=True)
class Row:
    """Ratios to none: lower quartile, median, upper quartile over rounds."""

    name: str
    microseconds: float  # of one call without isolation
    again: Quartiles
    idle: Quartiles
    beside: Quartiles | None
    idle_goal: float | None
    beside_goal: float | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, return the exit code."""
    options = _options(arguments)
    works = make_works()
    patched: list[str] = []
    try:
        rows = measure(works, options.rounds, patched)
    except IsolationError as error:
        print(error, file=sys.stderr)  # noqa: T201 - a message of the command
        return 3
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(_table(rows))
    where = f"torch {torch.__version__}, Python {sys.version.split()[0]}, {options.rounds} rounds"
    console.print(f"{where}; patched on nn.Module while nothing traced: {', '.join(patched) or 'nothing'}", highlight=False)
    if options.json is not None:
        content = {
            "version": 1,
            "torch": torch.__version__,
            "patched": patched,
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if patched else 0


def measure(works: Sequence[Work], rounds: int, patched: list[str]) -> list[Row]:
    """Time every work in every state. Methods of nn.Module found patched at quiet moments are added to `patched`."""
    counts = {work.name: _calls(work) for work in works}
    seen: dict[str, list[dict[State, float]]] = {work.name: [] for work in works}
    for number in range(rounds):
        found: dict[str, dict[State, float]] = {work.name: {} for work in works}
        for with_isolation in (False, True) if number % 2 else (True, False):
            states: list[State] = ["idle", "beside"] if with_isolation else ["none", "again"]
            with isolated() if with_isolation else nullcontext():
                for state in states if number % 4 < 2 else reversed(states):
                    _time(works, state, counts, found, patched)
        for name, times in found.items():
            seen[name].append(times)
    return [_row(work, seen[work.name]) for work in works]


def make_works() -> list[Work]:
    """What is timed. The goals are those of the project."""
    x, leaf = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
    identity, linear = nn.Identity(), nn.Linear(2, 2)
    compiled = torch.compile(_add_one, backend="eager")
    return [
        Work(name="module call", call=lambda: identity(x), idle_goal=1.00, beside_goal=1.30),
        Work(name="Linear call", call=lambda: linear(x), idle_goal=1.00, beside_goal=1.30),
        Work(name="compiled call", call=lambda: compiled(x), idle_goal=1.03),
        Work(name="backward of two operations", call=lambda: _backward(leaf), idle_goal=1.06),
        Work(name="is_compiling()", call=torch.compiler.is_compiling),
        Work(name="make_fx", call=lambda: make_fx(_add_one)(x), idle_goal=1.03, alone=True),
        Work(name="symbolic_trace", call=lambda: torch.fx.symbolic_trace(linear), idle_goal=1.03, alone=True),
    ]


def _add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _backward(leaf: torch.Tensor) -> None:
    torch.autograd.grad((leaf * 2).sum(), leaf)


def _time(
    works: Sequence[Work],
    state: State,
    calls: dict[str, int],
    found: dict[str, dict[State, float]],
    patched: list[str],
) -> None:
    gc.collect()
    with in_trace() if state == "beside" else nullcontext():
        for work in works:
            if state != "beside" or not work.alone:
                found[work.name][state] = min(_stretch(work.call, calls[work.name]) for _ in range(_STRETCHES))
    patched += [name for name in seams.tracing_state().patched_methods or () if name not in patched]


def _stretch(call: Callable[[], object], calls: int) -> float:
    """Seconds of a call. The first calls, in which Python adapts to changed code, and the garbage collector are off the clock."""
    for _ in range(max(2, calls // 10)):
        call()
    numbers = range(calls)
    gc.disable()
    try:
        start = time.thread_time()
        for _ in numbers:
            call()
        return (time.thread_time() - start) / calls
    finally:
        gc.enable()


def _calls(work: Work) -> int:
    _stretch(work.call, 10)
    return max(3, round(_STRETCH_SECONDS / _stretch(work.call, 10)))


def _row(work: Work, rounds: Sequence[dict[State, float]]) -> Row:
    def ratios(state: State) -> Quartiles:
        # To the mean of both readings of the same thing, so that the noise of the base counts half.
        low, middle, high = statistics.quantiles(
            [times[state] / _base(times, state) for times in rounds], n=4, method="inclusive"
        )
        return low, middle, high

    return Row(
        name=work.name,
        microseconds=statistics.median(times["none"] for times in rounds) * 1e6,
        again=ratios("again"),
        idle=ratios("idle"),
        beside=None if work.alone else ratios("beside"),
        idle_goal=work.idle_goal,
        beside_goal=work.beside_goal,
    )


def _base(times: dict[State, float], state: State) -> float:
    return times["none"] if state == "again" else (times["none"] + times["again"]) / 2


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="Cost of isolation as a ratio to none: median \\[quartiles]", title_justify="left")
    for header in ("work", "none, us", "A/A", "nothing traces", "goal", "another thread traces", "goal "):
        table.add_column(header, justify="left" if header == "work" else "right")
    for row in rows:
        cells = (_text(row.again), _text(row.idle), _goal(row.idle_goal), _text(row.beside), _goal(row.beside_goal))
        table.add_row(row.name, f"{row.microseconds:.3f}", *cells)
    return table


def _text(ratios: Quartiles | None) -> str:
    return "-" if ratios is None else f"{ratios[1]:.3f} \\[{ratios[0]:.3f}, {ratios[2]:.3f}]"


def _goal(goal: float | None) -> str:
    return "-" if goal is None else f"{goal:.2f}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dflash.fx.cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40, help="default 40: one to four minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error("use at least 2 --rounds")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no directory {options.json.absolute().parent}")
    return options


if __name__ == "__main__":
    outlive_reader()
    sys.exit(main())
