"""The table of a stress run: policy by threads, with errors by failure of the catalogue. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from diagnostics.stress.combination import Combination, failure_of_leak

_COLUMNS = ("policy", "threads", "actions", "errors", "wrong results", "left behind", "wrong afterwards", "probes", "compiles")
Results = Sequence[tuple[Combination, dict[str, Any]]]


def print_results(console: Console, results: Results) -> None:
    """One row for each combination, then the first examples, stacks and what was not observed."""
    table = Table(title="Stress", title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, overflow="fold")
    for combination, result in results:
        cells = [result["failure"], *[""] * (len(_COLUMNS) - 3)] if "failure" in result else _cells(result)
        table.add_row(combination.policy, str(combination.threads), *map(escape, cells))
    console.print(table)
    for combination, result in results:
        name = f"{combination.policy}, {combination.threads} threads"
        for kind, text in result.get("examples", {}).items():
            console.print(f"{name}, first {kind}:\n{escape(text)}", highlight=False)
        if "stacks" in result:
            console.print(f"{name}, {escape(result['failure'])}:\n{escape(result['stacks'])}", highlight=False)
        for sentence in result.get("notes", []):
            console.print(f"{name}, note: {escape(sentence)}", highlight=False)
        for sentence in result.get("not_observed", []):
            console.print(f"{name}, [yellow]not observed[/]: {escape(sentence)}", highlight=False)


def print_problems(console: Console, problems: Sequence[tuple[Combination, str]]) -> None:
    """What broke a promise, and the commands that replay it."""
    for combination, problem in problems:
        name = f"{combination.policy}, {combination.threads} threads"
        console.print(f"[bold red]not clean[/] {name}: {escape(problem)}", highlight=False)
    for command in dict.fromkeys(combination.replay_command() for combination, _ in problems):
        console.print(f"replay: {command} --must-be-clean", highlight=False, soft_wrap=True, markup=False)
    if not problems:
        console.print("[bold green]clean[/]: every policy that had to be", highlight=False)


def _cells(result: Mapping[str, Any]) -> list[str]:
    found: Counter[str] = Counter()
    for finding in result["findings"]:
        found[f"{finding['severity']} {finding['id']}"] += finding["count"]
    return [
        str(sum(result["actions"].values())),
        _counts(result["errors"]),
        _counts(result["wrong_results"]),
        _counts(Counter(map(failure_of_leak, result["leaks"]))),
        f"{len(result['wrong_afterwards'])} of {result['afterwards']}",
        _counts(found),
        str(result["compiles_by_threads"]),
    ]


def _counts(counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    return "\n".join([f"{total}:", *(f"{name} {count}" for name, count in sorted(counts.items()))]) if total else "0"
