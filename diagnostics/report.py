"""The report on standard error: what traced, what was compiled, what was found, what to do, and what was not observed."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from diagnostics.records import Finding, Observation

COVERAGE = (
    "This process only: child processes and torchrun workers are not observed; run the probe inside each of them. "
    "Backward graphs compiled lazily show as traces, not as compiles."
)
_COLOURS = {"error": "red", "hazard": "yellow", "info": "cyan"}
_MAX_ROWS = 30


def print_report(console: Console, observations: Sequence[Observation], findings: Sequence[Finding]) -> None:
    """Print everything that `observations` and `findings` say."""
    console.rule("fxprobe")
    _table(console, "Traces", ("thread", "tracer", "from", "count", "seconds", "inside Dynamo"), _trace_rows(observations))
    headers = ("function", "threads", "compiles", "recompiles", "seconds", "graph breaks", "outcome")
    _table(console, "Compiles", headers, _compile_rows(observations))
    _print_findings(console, findings)
    unobserved = [seen for seen in observations if seen.kind == "not_observed"]
    for seen in unobserved:
        console.print(f"[yellow]not observed[/]: {escape(seen.name)}", highlight=False)
    for seen in observations:
        if seen.kind == "note":
            console.print(f"note: {escape(seen.name)}", highlight=False)
    console.print(escape(COVERAGE), style="dim", highlight=False)
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in _COLOURS}
    text = f"{counts['error']} errors, {counts['hazard']} hazards, {counts['info']} notes, {len(unobserved)} things not observed"
    console.print(text, style="bold", highlight=False)


def _table(console: Console, title: str, headers: Sequence[str], rows: list[tuple[str, ...]]) -> None:
    if not rows:
        console.print(f"{title}: none", highlight=False)
        return
    table = Table(title=title, title_justify="left")
    for header in headers:
        table.add_column(header, overflow="fold")
    for row in rows[:_MAX_ROWS]:
        table.add_row(*(escape(cell) for cell in row))
    console.print(table)
    if len(rows) > _MAX_ROWS:
        console.print(f"... and {len(rows) - _MAX_ROWS} more rows: --json FILE has all of them", highlight=False)


def _trace_rows(observations: Sequence[Observation]) -> list[tuple[str, ...]]:
    traces = sorted((seen for seen in observations if seen.kind == "trace"), key=lambda seen: -seen.duration_seconds)
    return [
        (
            seen.threads[0],
            seen.name,
            seen.where[-1] if seen.where else "",
            str(seen.count),
            f"{seen.duration_seconds:.3f}",
            "yes" if seen.fields["inside_dynamo"] else "no",
        )
        for seen in traces
    ]


def _compile_rows(observations: Sequence[Observation]) -> list[tuple[str, ...]]:
    functions: dict[tuple[str, tuple[str, ...]], list[Observation]] = {}
    for seen in observations:
        if seen.kind == "compile":
            functions.setdefault((seen.name, seen.where), []).append(seen)
    rows: list[tuple[str, ...]] = []
    for (name, where), group in functions.items():
        unknown = any(seen.fields["recompile"] is None for seen in group)
        recompiles = sum(seen.count for seen in group if seen.fields["recompile"])
        breaks = sum(seen.count * len(seen.fields["graph_breaks"]) for seen in group)
        rows.append(
            (
                f"{name} ({where[-1].rpartition(' ')[0]})",
                ", ".join(dict.fromkeys(thread for seen in group for thread in seen.threads)),
                str(sum(seen.count for seen in group)),
                "unknown" if unknown else str(recompiles),
                f"{sum(seen.duration_seconds for seen in group):.3f}",
                str(breaks),
                ", ".join(dict.fromkeys(seen.fields["outcome"] for seen in group)),
            )
        )
    return rows


def _print_findings(console: Console, findings: Sequence[Finding]) -> None:
    if not findings:
        console.print("Findings: none", highlight=False)
    for finding in findings:
        colour = _COLOURS[finding.severity]
        times = f" ({finding.count} times)" if finding.count > 1 else ""
        console.print(f"[bold {colour}]{finding.severity} {finding.id}[/] {escape(finding.what)}{times}", highlight=False)
        for label, text in (
            ("threads", ", ".join(finding.who)),
            ("where", " <- ".join(reversed(finding.where))),
            ("why", finding.why),
            ("what to do", finding.what_to_do),
        ):
            if text:
                console.print(f"    {label}: {escape(text)}", highlight=False)
