"""The rows of the report, for the terminal and for the page: what traced, what was compiled, who held the compile lock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diagnostics.journal import ProcessRecord
from diagnostics.records import Observation


@dataclass(frozen=True)
class Table:
    """A title, headers and rows of text."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(processes: Sequence[ProcessRecord]) -> tuple[Table, ...]:
    """All tables; with several processes, the first column says which."""
    return tuple(
        _joined(processes, title, headers, make)
        for title, headers, make in (
            ("Traces", ("thread", "tracer", "from", "count", "seconds", "inside Dynamo"), _traces),
            (
                "Compiles",
                ("function", "threads", "compiles", "recompiles", "seconds", "graph breaks", "caches", "outcome"),
                _compiles,
            ),
            ("Recompiles", ("function", "guard that failed"), _recompiles),
            ("Graphs of AOTAutograd", ("thread", "graph", "from", "count", "when"), _graphs),
            ("Compile lock", ("thread", "what", "times", "seconds"), _lock),
        )
    )


def _joined(processes: Sequence[ProcessRecord], title: str, headers: tuple[str, ...], make: object) -> Table:
    assert callable(make)
    several = len(processes) > 1
    rows = [(record.label, *row) if several else row for record in processes for row in make(record.observations)]
    return Table(title, ("process", *headers) if several else headers, tuple(rows))


def _traces(observations: Sequence[Observation]) -> list[tuple[str, ...]]:
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


def _compiles(observations: Sequence[Observation]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for (name, where), group in _by_function(observations).items():
        unknown = any(seen.fields["recompile"] is None for seen in group)
        recompiles = sum(seen.count for seen in group if seen.fields["recompile"])
        breaks = sum(seen.count * len(seen.fields["graph_breaks"]) for seen in group)
        rows.append(
            (
                f"{name} ({where.rpartition(' ')[0]})",
                ", ".join(dict.fromkeys(thread for seen in group for thread in seen.threads)),
                str(sum(seen.count for seen in group)),
                "unknown" if unknown else str(recompiles),
                f"{sum(seen.duration_seconds for seen in group):.3f}",
                str(breaks),
                _cache_text(group),
                ", ".join(dict.fromkeys(seen.fields["outcome"] for seen in group)),
            )
        )
    return rows


def _recompiles(observations: Sequence[Observation]) -> list[tuple[str, ...]]:
    reasons: dict[tuple[str, ...], None] = {}
    for (name, _), group in _by_function(observations).items():
        for seen in group:
            if seen.fields["recompile"]:
                reasons[name, seen.fields["reason"] or "not told by this torch"] = None
    return list(reasons)


def _graphs(observations: Sequence[Observation]) -> list[tuple[str, ...]]:
    return [
        (
            seen.threads[0],
            seen.name,
            seen.where[-1] if seen.where else "",
            str(seen.count),
            "lazily, at the first backward" if seen.fields["lazy"] else "in the compile",
        )
        for seen in observations
        if seen.kind == "graph"
    ]


def _lock(observations: Sequence[Observation]) -> list[tuple[str, ...]]:
    totals: dict[tuple[str, str], list[float]] = {}
    for seen in observations:
        if seen.kind == "lock":
            what = "held it" if seen.fields["role"] == "held" else f"waited for {seen.threads[0]}"
            total = totals.setdefault((seen.threads[-1], what), [0.0, 0.0])
            total[0] += seen.count
            total[1] += seen.duration_seconds
    return [(thread, what, f"{count:.0f}", f"{seconds:.3f}") for (thread, what), (count, seconds) in totals.items()]


def _by_function(observations: Sequence[Observation]) -> dict[tuple[str, str], list[Observation]]:
    functions: dict[tuple[str, str], list[Observation]] = {}
    for seen in observations:
        if seen.kind == "compile":
            functions.setdefault((seen.name, seen.where[-1]), []).append(seen)
    return functions


def _cache_text(group: Sequence[Observation]) -> str:
    totals: dict[str, int] = {}
    for seen in group:
        for name, count in seen.fields["caches"].items():
            totals[name] = totals.get(name, 0) + count * seen.count
    return ", ".join(f"{name.replace('_cache_', ' ')} {count}" for name, count in totals.items())
