"""What the probes cost while nothing traces: `python -m diagnostics.overhead [--json FILE]`.

Three pieces of work are timed with and without probes: a call of a compiled function, a call of an `nn.Module`, and a training
step (forward, backward, AdamW) of a compiled MLP. A round times three short stretches, one after the other: without probes, with
them, and without again, in one order and then in the reverse; attaching and a warm-up are outside the clock. Of a stretch its
fastest timing counts: what else the machine does makes it slower, never faster. A round says what the stretch with probes took
more than the mean of the two beside it, which a machine that drifts does not change; what is printed is the median over rounds
and the interval that holds it with 95 % certainty, whatever the distribution (order statistics).

The two stretches without probes are compared in the same way, which is the noise floor: on a perfect machine it would be zero.
Where its median is beyond the goal, the machine favours a side, and nothing is judged; what else disturbs makes the interval
wide, which decides. The load of the machine is printed, too.

Goals are printed beside the measurements and decide nothing. Exit codes: 0 measured, 2 bad usage, 3 a probe was not attached, or
something was compiled under the clock.

Known limits: CPU, one thread of the program; the cost while something traces is another question. `--clock cpu` counts the
processor time of the process, which a busy machine disturbs less, and which does not see waiting.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from dflash.standard_output import outlive_reader
from diagnostics.observe import observed
from diagnostics.output import width
from diagnostics.records import Log
from diagnostics.tables import Table
from diagnostics.terminal import print_table

_WIDTH, _LAYERS = 256, 8  # of the MLP
_PROBING_ROWS = 64  # of the step that the number of rows is chosen by
_WARM_UP_CALLS = 50  # or as many as a stretch has; the interpreter adapts to a function anew when its code has changed
_TIMINGS = 10  # of calls, in a stretch: a few milliseconds each, which fit between the turns of other programs
_STEP_TIMINGS = 3  # of training steps
_CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}

_NORMAL_95 = 1.96


@dataclass(frozen=True)
class Work:
    """Something to time by `clock`; `goal` is the most that the probes should add, in `unit`, or per cent if `is_percent`."""

    name: str
    call: Callable[[], object]
    calls: int  # in one timing
    unit: str
    seconds_per_unit: float
    goal: float
    is_percent: bool = False
    timings: int = 1  # in one stretch
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True)
class Row:
    """One work's cost per call, in `unit`; `added` and `floor`, in `goal_unit`, are the median's lower end, itself, upper end."""

    name: str
    unit: str
    without: float
    with_probes: float
    added: tuple[float, float, float]
    floor: tuple[float, float, float]
    goal: float
    goal_unit: str
    calls: int
    rounds: int

    @property
    def verdict(self) -> str:
        """Whether the goal is met, as far as the noise lets this be said."""
        if abs(self.floor[1]) > self.goal:
            return "noise above the goal"
        low, _, high = self.added
        return "met" if high < self.goal else "not met" if low > self.goal else "undecided"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    options = _options(arguments)
    works = (
        compiled_call(options.calls),
        module_call(options.calls),
        training_step(options.steps, options.step_milliseconds / 1000),
    )
    not_observed: dict[str, None] = {}
    clock, load_before = _CLOCKS[options.clock], _load()
    rows = [measure(dataclasses.replace(work, clock=clock), options.rounds, not_observed) for work in works]
    console = Console(width=width(sys.stdout))
    print_table(console, _table(rows))
    how = f"{options.clock} clock, {options.rounds} rounds, load {load_before} before and {_load()} after"
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads of torch, {how}", highlight=False)
    for sentence in not_observed:
        console.print(f"[yellow]not observed[/]: {escape(sentence)}", highlight=False)
    if options.json is not None:
        content = {
            "version": 3,
            "torch": torch.__version__,
            "clock": options.clock,
            "load": [load_before, _load()],
            "rows": [dataclasses.asdict(row) for row in rows],
            "not_observed": list(not_observed),
        }
        try:
            options.json.write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            print(f"overhead: cannot write {options.json}: {error}", file=sys.stderr)  # noqa: T201 - a message of the command
            return 2
    return 3 if not_observed else 0


def measure(work: Work, rounds: int, not_observed: dict[str, None]) -> Row:
    """Time `work` with and without probes; sentences of probes that were not attached go to `not_observed`."""
    gc.collect()
    before: list[float] = []
    probed: list[float] = []
    after: list[float] = []
    for _ in range(rounds // 2):
        for sides in ((before, probed, after), (after, probed, before)):
            for side in sides:
                side.append(min(_observed(work, not_observed) if side is probed else _timed(work)))
    return Row(
        name=work.name,
        unit=work.unit,
        without=statistics.median([*before, *after]),
        with_probes=statistics.median(probed),
        added=_added(work, [(one + other) / 2 for one, other in zip(before, after, strict=True)], probed),
        floor=_added(work, before, after),
        goal=work.goal,
        goal_unit="%" if work.is_percent else work.unit,
        calls=work.calls,
        rounds=len(probed),
    )


def compiled_call(calls: int) -> Work:
    """A call of a compiled function that does next to nothing."""

    def add_one(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    compiled = torch.compile(add_one, backend="eager")
    x = torch.ones(1)
    return Work("compiled call", lambda: compiled(x), calls, "us", 1e-6, goal=1.0, timings=_TIMINGS)


def module_call(calls: int) -> Work:
    """A call of a module that does nothing."""
    module = torch.nn.Identity()
    x = torch.ones(1)
    return Work("nn.Module call", lambda: module(x), calls, "us", 1e-6, goal=0.1, timings=_TIMINGS)


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
    (fixed,) = _timed(dataclasses.replace(probing, call=optimizer.step))
    (whole,) = _timed(probing)
    rows = max(1, round(_PROBING_ROWS * max(0.0, step_seconds - fixed) / max(1e-9, whole - fixed)))
    forward = torch.compile(model, backend="aot_eager")
    x = torch.randn(rows, _WIDTH)
    return Work(
        f"training step, {rows} rows", lambda: step(x), steps, "ms", 1e-3, goal=0.5, is_percent=True, timings=_STEP_TIMINGS
    )


def _observed(work: Work, not_observed: dict[str, None]) -> list[float]:
    with observed() as log:
        result = _timed(work)
    not_observed.update(dict.fromkeys(_sentences(log, work)))
    return result


def _sentences(log: Log, work: Work) -> list[str]:
    seen = log.observations()
    sentences = [one.name for one in seen if one.kind == "not_observed"]
    return sentences + [f"{work.name}: {one.name} was compiled under the clock" for one in seen if one.kind == "compile"]


def _timed(work: Work) -> list[float]:
    """`work.unit`s per call, of each timing. The garbage collector does not run under the clock."""
    for _ in range(min(_WARM_UP_CALLS, work.calls)):
        work.call()
    call, clock, numbers, seconds = work.call, work.clock, range(work.calls), []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(work.timings):
            start = clock()
            for _ in numbers:
                call()
            seconds.append(clock() - start)
    finally:
        if collecting:
            gc.enable()
    return [each / work.calls / work.seconds_per_unit for each in seconds]


def _added(work: Work, less: Sequence[float], more: Sequence[float]) -> tuple[float, float, float]:
    """What the rounds of `more` add to those of `less`: the median, between the ends of its 95 % interval."""
    added = sorted(
        100 * (with_it / without - 1) if work.is_percent else with_it - without
        for without, with_it in zip(less, more, strict=True)
    )
    middle, reach = (len(added) - 1) / 2, _NORMAL_95 * math.sqrt(len(added)) / 2
    low, high = max(0, math.floor(middle - reach)), min(len(added) - 1, math.ceil(middle + reach))
    return added[low], statistics.median(added), added[high]


def _load() -> str:
    """Running programs on this machine, averaged over the last minute, and its processors."""
    try:
        return f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    except (AttributeError, OSError):  # not a Unix, or not allowed
        return "unknown"


def _table(rows: Sequence[Row]) -> Table:
    title = "What the probes add while nothing traces (median over rounds; its 95 % interval in brackets)"
    headers = ("work", "without", "with", "added", "noise floor", "goal", "verdict")
    cells = (
        (
            row.name,
            f"{row.without:.3f} {row.unit}",
            f"{row.with_probes:.3f} {row.unit}",
            _range(row.added, row.goal_unit),
            _range(row.floor, row.goal_unit),
            f"under {row.goal:g} {row.goal_unit}",
            row.verdict,
        )
        for row in rows
    )
    return Table(title, headers, tuple(cells))


def _range(values: tuple[float, float, float], unit: str) -> str:
    low, median, high = values
    return f"{median:+.3f} [{low:+.3f}, {high:+.3f}] {unit}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m diagnostics.overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--rounds", type=int, default=200, help="of three stretches each, an even number (default 200)")
    parser.add_argument("--calls", type=int, default=100, help="compiled and module calls in one timing (default 100)")
    parser.add_argument("--steps", type=int, default=1, help="training steps in one timing (default 1)")
    parser.add_argument("--clock", choices=tuple(_CLOCKS), default="wall", help="default wall; cpu on a busy machine")
    parser.add_argument("--step-milliseconds", type=float, default=20.0, help="about how long a step takes (default 20)")
    options = parser.parse_args(arguments)
    if min(options.calls, options.steps) < 1 or options.step_milliseconds <= 0 or options.rounds < 2 or options.rounds % 2:
        parser.error("use an even number of --rounds, at least 1 --calls, 1 --steps, and --step-milliseconds above 0")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no directory {options.json.absolute().parent}")
    return options


if __name__ == "__main__":
    outlive_reader()
    sys.exit(main())
