"""Many threads at once: `python -m diagnostics.stress [--seconds S] [--threads N] [--seed K]`.

Runs the scenario `protected` (a warm-up in one thread, then calls from N threads), which must be clean, and beside it
`unprotected`, which shows for comparison what this torch does and never fails the command. Each runs in a process of its
own, at a switch interval of 1e-5 s. Exit codes: 0 clean, 1 the protected scenario was not, 2 bad usage, 3 not observed.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from diagnostics.stress.runner import KINDS

_START_AND_END_SECONDS = 180.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both scenarios, print their counts and the command that replays them."""
    parser = argparse.ArgumentParser(
        prog="python -m diagnostics.stress", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each scenario (default 10)")
    parser.add_argument("--threads", type=int, default=4, help="default 4")
    parser.add_argument("--seed", type=int, default=0, help="decides what each thread does (default 0)")
    options = parser.parse_args(arguments)
    if options.seconds <= 0 or options.threads < 2:
        parser.error("use --seconds above 0 and at least 2 --threads")
    console = Console(width=None if sys.stdout.isatty() else 140)
    results = {kind: _child(kind, options) for kind in KINDS}
    console.print(_table(results))
    for kind, result in results.items():
        for name, text in result.get("examples", {}).items():
            console.print(f"{kind}, first {name}:\n{escape(text)}", highlight=False)
        for sentence in result.get("not_observed", []):
            console.print(f"{kind}, [yellow]not observed[/]: {escape(sentence)}", highlight=False)
    problems = unclean(results["protected"])
    for problem in problems:
        console.print(f"[bold red]protected scenario:[/] {escape(problem)}", highlight=False)
    console.print(
        f"replay: python -m diagnostics.stress --seconds {options.seconds:g} --threads {options.threads} --seed {options.seed}",
        highlight=False,
    )
    if problems:
        return 1
    return 3 if results["protected"]["not_observed"] else 0


def unclean(result: dict[str, Any]) -> list[str]:
    """Why a scenario that must be clean is not."""
    if "failure" in result:
        return [result["failure"]]
    found = [f"{count} times {name}" for name, count in result["errors"].items()]
    found += [f"{count} wrong results of {name}" for name, count in result["wrong_results"].items()]
    found += [f"{finding['severity']} {finding['id']}: {finding['what']}" for finding in result["findings"]]
    if result["compiles_by_threads"]:
        found.append(f"{result['compiles_by_threads']} compiles after the warm-up")
    if not result["actions"]:
        found.append("the threads did nothing")
    return found


def _child(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "diagnostics.stress.runner", kind, "--seconds", str(options.seconds)]
    command += ["--threads", str(options.threads), "--seed", str(options.seed)]
    limit = options.seconds + _START_AND_END_SECONDS
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"failure": f"hung: no end within {limit:.0f} s, killed"}
    if child.returncode == 0:
        result: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
        return result
    how = f"signal {signal.Signals(-child.returncode).name}" if child.returncode < 0 else f"exit code {child.returncode}"
    hint = " (a CUDA build of torch without a GPU crashes when a second thread compiles)" if child.returncode < 0 else ""
    return {"failure": f"died by {how}{hint}: {' | '.join(child.stderr.strip().splitlines()[-3:])}"}


def _table(results: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="Stress", title_justify="left")
    table.add_column("")
    for kind in results:
        table.add_column(kind, justify="right", overflow="fold")
    rows: dict[str, dict[str, str]] = {}
    for kind, result in results.items():
        for row, value in _rows(result):
            rows.setdefault(row, {})[kind] = value
    for row, values in rows.items():
        table.add_row(escape(row), *(escape(values.get(kind, "0")) for kind in results))
    return table


def _rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    if "failure" in result:
        return [("failure", result["failure"])]
    rows = [(f"done: {name}", str(count)) for name, count in sorted(result["actions"].items())]
    rows += [(f"raised: {name}", str(count)) for name, count in sorted(result["errors"].items())]
    rows += [(f"wrong result: {name}", str(count)) for name, count in sorted(result["wrong_results"].items())]
    found: Counter[tuple[str, str]] = Counter()
    for finding in result["findings"]:
        found[finding["severity"], finding["id"]] += finding["count"]
    rows += [(f"probes: {severity} {name}", str(count)) for (severity, name), count in sorted(found.items())]
    return [*rows, ("compiles by the threads", str(result["compiles_by_threads"]))]


if __name__ == "__main__":
    sys.exit(main())
