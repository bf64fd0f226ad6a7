"""The report on standard error: what was found and what to do, what traced and compiled, and what was not observed."""

from __future__ import annotations

from collections.abc import Sequence

from rich import table as rich_table
from rich.console import Console
from rich.markup import escape

from diagnostics.records import Finding
from diagnostics.session import Outcome
from diagnostics.tables import Table, tables

COLOURS = {"error": "red", "hazard": "yellow", "info": "cyan"}
_MAX_ROWS = 30


def print_report(console: Console, outcome: Outcome, findings: Sequence[Finding]) -> None:
    """Print everything, the verdict last: it is what stays in view."""
    console.rule("fxprobe")
    for table in tables(outcome.processes):
        _print_table(console, table)
    _print_findings(console, findings)
    for sentence in outcome.not_observed:
        console.print(f"[yellow]not observed[/]: {escape(sentence)}", highlight=False)
    for sentence in outcome.notes:
        console.print(f"note: {escape(sentence)}", highlight=False)
    console.print(summary(outcome, findings), style="bold", highlight=False)


def summary(outcome: Outcome, findings: Sequence[Finding]) -> str:
    """One line: which torch, how many processes, how many findings."""
    versions = ", ".join(sorted({record.torch for record in outcome.processes if record.torch})) or "not imported"
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in COLOURS}
    others = f" and {outcome.others} without it" if outcome.others else ""
    return (
        f"torch {versions}, {_count(len(outcome.processes), 'process', 'processes')} with torch{others}, "
        f"{outcome.seconds:.1f} s: {_count(counts['error'], 'error', 'errors')}, "
        f"{_count(counts['hazard'], 'hazard', 'hazards')}, {counts['info']} infos, "
        f"{_count(len(outcome.not_observed), 'thing', 'things')} not observed"
    )


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _print_table(console: Console, table: Table) -> None:
    if not table.rows:
        return
    printed = rich_table.Table(title=table.title, title_justify="left")
    for header in table.headers:
        printed.add_column(header, overflow="fold")
    for row in table.rows[:_MAX_ROWS]:
        printed.add_row(*(escape(cell) for cell in row))
    console.print(printed)
    if len(table.rows) > _MAX_ROWS:
        console.print(f"... and {len(table.rows) - _MAX_ROWS} more rows: --json FILE has all of them", highlight=False)


def _print_findings(console: Console, findings: Sequence[Finding]) -> None:
    if not findings:
        console.print("Findings: none", highlight=False)
    for finding in findings:
        colour = COLOURS[finding.severity]
        times = f" ({finding.count} times)" if finding.count > 1 else ""
        console.print(f"[bold {colour}]{finding.severity} {finding.id}[/] {escape(finding.what)}{times}", highlight=False)
        for label, text in details(finding):
            console.print(f"    {label}: {escape(text)}", highlight=False)


def details(finding: Finding) -> list[tuple[str, str]]:
    """What is told about a finding beside its title; nothing that is empty."""
    told = (
        ("process", finding.process),
        ("threads", ", ".join(finding.who)),
        ("where", " <- ".join(reversed(finding.where))),
        ("why", finding.why),
        ("what to do", finding.what_to_do),
    )
    return [(label, text) for label, text in told if text]
