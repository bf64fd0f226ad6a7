"""Calls of one thread while others trace without a pause: `python -m diagnostics.stress.victims --policy isolate|none`.

The main thread calls compiled functions and modules, forward, and compares each result with the one from before the threads
started; a compiled call must also run its graph. Threads run `make_fx` and `torch.fx.symbolic_trace` all the while, half of
them on a module that the main thread calls too, and compare their graphs. The run ends after `--calls` calls or `--stop-after`
failures. Calls are small, because a thread waits for its turn after each operation of torch: that sets their rate.
Exit codes: 0 clean, 1 failures, or state left behind, 2 bad usage, 3 no failure but a thread finished no trace.

Known limits: forward only; the backend is a counter around the captured graph, so that generated code is not what is tested.
Who meets whom is the machine's choice: a clean run says that nothing happened, `python -m diagnostics.selftest` leaves no choice.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from dflash.fx import seams
from dflash.standard_output import outlive_reader
from diagnostics.catalogue import match
from diagnostics.stress import policies
from diagnostics.stress.workers import describe


@dataclass(kw_only=True)
class Victim:
    """A call of the main thread; `graph_runs` counts runs of compiled code, None where nothing is compiled."""

    name: str
    call: Callable[[], Any]
    expected: list[float]
    graph_runs: Callable[[], int] | None = None


@dataclass(kw_only=True)
class Outcome:
    """What happened."""

    torch: str
    policy: str
    tracers: int
    calls: int = 0  # of the main thread, those that failed included
    traces: list[int] = field(default_factory=list)  # by thread
    seconds: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)  # exceptions, by kind
    wrong: Counter[str] = field(default_factory=Counter)  # results, by kind
    left_behind: list[str] = field(default_factory=list)

    @property
    def failures(self) -> int:
        """Errors and wrong results."""
        return self.errors.total() + self.wrong.total()

    def note(self, who: str, error: Exception) -> None:
        """Count an exception."""
        failure = match(str(error))
        self.errors[f"{who}: {failure + ' ' if failure else ''}{describe(error)}"] += 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, return the exit code."""
    options = _options(arguments)
    interval = sys.getswitchinterval()
    outcome = Outcome(torch=torch.__version__, policy=options.policy, tracers=options.tracers)
    with policies.around_process(options.policy):
        victims = make_victims()
        sys.setswitchinterval(options.switch_interval)
        try:
            run(outcome, victims, calls=options.calls, stop_after=options.stop_after)
        finally:
            sys.setswitchinterval(interval)
    print("\n".join(_report(outcome)))  # noqa: T201 - the command's result
    if options.json is not None:
        options.json.write_text(json.dumps({"version": 1, **vars(outcome)}, indent=1) + "\n")
    if outcome.failures or outcome.left_behind:
        return 1
    return 0 if all(outcome.traces) else 3


def run(outcome: Outcome, victims: Sequence[Victim], *, calls: int, stop_after: int) -> None:
    """Call the victims in turn while threads trace; fills `outcome`. Without failures it makes exactly `calls` calls."""
    with _tracing(outcome):
        start = time.perf_counter()
        while outcome.calls < calls and not 0 < stop_after <= outcome.failures:
            call_once(outcome, victims[outcome.calls % len(victims)])
            if outcome.calls % 100_000 == 0:
                print(f"{outcome.calls:,} calls, {outcome.failures} failures", file=sys.stderr)  # noqa: T201 - progress
        outcome.seconds = time.perf_counter() - start
    outcome.left_behind = seams.leaks(seams.tracing_state())


def call_once(outcome: Outcome, victim: Victim) -> None:
    """One call, and everything that it must keep."""
    outcome.calls += 1
    before = victim.graph_runs() if victim.graph_runs is not None else 0
    try:
        found = victim.call()
    except Exception as error:  # noqa: BLE001 - what the command counts
        outcome.note(victim.name, error)
        return
    if type(found) is not Tensor:
        outcome.wrong[f"{victim.name}: returned a {type(found).__name__}"] += 1
    elif found.tolist() != victim.expected:
        outcome.wrong[f"{victim.name}: other values"] += 1
    elif victim.graph_runs is not None and victim.graph_runs() != before + 1:
        outcome.wrong[f"{victim.name}: F2 ran uncompiled"] += 1


def make_victims() -> list[Victim]:
    """Compile, and call each once for its reference, alone."""
    x = torch.tensor([-1.0, 2.0])
    function, function_runs = _counted(_double)
    module, module_runs = _counted(nn.ReLU())
    own = nn.ReLU()
    calls: list[tuple[str, Callable[[], Any], Callable[[], int] | None]] = [
        ("compiled function", lambda: function(x), function_runs),
        ("compiled module", lambda: module(x), module_runs),
        ("module", lambda: own(x), None),
        ("module that others trace", lambda: _shared(x), None),
    ]
    expected = [[-2.0, 4.0], [0.0, 2.0], [0.0, 2.0], [0.0, 2.0]]
    for (name, call, _), values in zip(calls, expected, strict=True):
        assert call().tolist() == values, name
    return [
        Victim(name=name, call=call, expected=values, graph_runs=runs)
        for (name, call, runs), values in zip(calls, expected, strict=True)
    ]


def _double(x: Tensor) -> Tensor:
    return x * 2


_shared = nn.Sequential(nn.Identity(), nn.ReLU())


def _counted(function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[[], int]]:
    """The function, compiled, and how often its graph has run."""
    runs = [0]

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        forward = graph.forward

        def counting(*arguments: Any) -> Any:
            runs[0] += 1
            return forward(*arguments)

        return counting

    return torch.compile(function, backend=backend, dynamic=False), lambda: runs[0]


@contextmanager
def _tracing(outcome: Outcome) -> Iterator[None]:
    """Threads that trace until the block ends."""
    stop, everyone = threading.Event(), threading.Barrier(outcome.tracers + 1)
    outcome.traces = [0] * outcome.tracers
    kinds = (_make_fx, _symbolic_trace)
    expected = [kind() for kind in kinds]

    def trace(number: int) -> None:
        kind, nodes = kinds[number % 2], expected[number % 2]
        everyone.wait()
        while not stop.is_set():
            try:
                found = kind()
            except Exception as error:  # noqa: BLE001 - what the command counts
                outcome.note(kind.__name__.strip("_"), error)
                continue
            outcome.traces[number] += 1
            if found != nodes:
                outcome.wrong[f"{kind.__name__.strip('_')}: another graph"] += 1

    threads = [threading.Thread(target=trace, args=(number,), name=f"traces-{number}") for number in range(outcome.tracers)]
    for thread in threads:
        thread.start()
    everyone.wait()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _make_fx() -> list[str]:
    return _nodes(make_fx(_double)(torch.ones(2)))


def _symbolic_trace() -> list[str]:
    return _nodes(torch.fx.symbolic_trace(_shared))


def _nodes(graph: torch.fx.GraphModule) -> list[str]:
    return [f"{node.op} {node.name}" for node in graph.graph.nodes]


def _report(outcome: Outcome) -> list[str]:
    rate = outcome.calls / outcome.seconds if outcome.seconds else 0.0
    errors, wrong = outcome.errors.total(), outcome.wrong.total()
    lines = [
        f"torch {outcome.torch}, policy {outcome.policy}, {outcome.tracers} threads made {sum(outcome.traces):,} traces",
        f"{outcome.calls:,} calls in {outcome.seconds:.1f} s, {rate:,.0f} a second: {errors} errors, {wrong} wrong results",
    ]
    for title, counts in (("error", outcome.errors), ("wrong", outcome.wrong)):
        lines += [f"  {title} {count:6} x  {kind}" for kind, count in counts.most_common()]
    lines += [f"  left behind: {sentence.partition('. ')[0]}" for sentence in outcome.left_behind]
    if not outcome.failures and not all(outcome.traces):
        lines.append("  not observed: a thread finished no trace")
    return lines


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m diagnostics.stress.victims", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=1_000_000, help="of the main thread (default 1000000)")
    parser.add_argument("--policy", choices=("isolate", "none"), default="isolate", help="default isolate")
    parser.add_argument("--tracers", type=int, default=4, help="threads that trace (default 4)")
    parser.add_argument("--stop-after", type=int, default=20, metavar="N", help="failures (default 20; 0: never)")
    parser.add_argument(
        "--switch-interval", type=float, default=1e-4, metavar="SECONDS", help="of Python's threads (default 1e-4)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcome")
    options = parser.parse_args(arguments)
    if min(options.calls, options.tracers) < 1 or options.stop_after < 0 or options.switch_interval <= 0:
        parser.error("use at least 1 for --calls and --tracers, 0 or more for --stop-after, and --switch-interval above 0")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no directory {options.json.absolute().parent}")
    return options


if __name__ == "__main__":
    outlive_reader()
    sys.exit(main())
