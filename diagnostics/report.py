"""The report on standard error: what was found and what to do, what traced and compiled, and what was not observed."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from diagnostics.records import Finding
from diagnostics.session import Outcome
from diagnostics.tables import tables
from diagnostics.terminal import print_detail, print_table

COLOURS = {"error": "red", "hazard": "yellow", "info": "cyan"}
_MAX_ROWS = 30


def print_report(console: Console, outcome: Outcome, findings: Sequence[Finding]) -> None:
    """Print everything, the verdict last: it is what stays in view."""
    console.rule("fxprobe")
    for table in tables(outcome.processes):
        print_table(console, table, max_rows=_MAX_ROWS)
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


def _print_findings(console: Console, findings: Sequence[Finding]) -> None:
    if not findings:
        console.print("Findings: none", highlight=False)
    for finding in findings:
        colour = COLOURS[finding.severity]
        times = f" ({finding.count} times)" if finding.count > 1 else ""
        console.print(f"[bold {colour}]{finding.severity} {finding.id}[/] {escape(finding.what)}{times}", highlight=False)
        for label, text in details(finding):
            print_detail(console, label, text)


def details(finding: Finding) -> list[tuple[str, str]]:
    """What is told about a finding beside its title; nothing that is empty."""
    chain, several = " <- ".join(reversed(finding.where)), len(finding.who) > 1 or finding.others
    told = (
        ("process", finding.process),
        ("threads", ", ".join(finding.who)),
        ("where", f"{finding.who[-1]}: {chain}" if chain and finding.who and several else chain),
        *(("where", other) for other in finding.others),
        ("why", finding.why),
        ("what to do", finding.what_to_do),
    )
    return [(label, text) for label, text in told if text]
