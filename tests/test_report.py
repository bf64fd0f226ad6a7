"""Laws of the report on a terminal: readable at any width, and each thread's place under its own name."""

from __future__ import annotations

import dataclasses

import pytest
from rich.console import Console

from diagnostics.findings import conclude
from diagnostics.records import Finding, Observation
from diagnostics.report import details
from diagnostics.tables import Table
from diagnostics.terminal import print_detail, print_table

HEADERS = ("function", "threads", "compiles", "recompiles", "seconds", "graph breaks", "caches", "outcome")
ROW = ("model.<locals>.forward (/somewhere/program.py:6)", "MainThread", "2", "1", "0.198", "0", "", "compiled")
TABLE = Table("Compiles", HEADERS, (ROW, ROW))


def printed(width: int, table: Table = TABLE, *, max_rows: int | None = None) -> list[str]:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        print_table(console, table, max_rows=max_rows)
    return [line.rstrip() for line in capture.get().splitlines()]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 160])
def test_words_are_not_folded_whatever_the_width(width: int) -> None:
    lines = printed(width)
    assert all(len(line) <= width for line in lines)
    for word in ("MainThread", "recompiles", "outcome", "compiled"):
        assert any(word in line for line in lines), (word, lines)


def test_a_list_leaves_out_what_is_empty_and_says_how_many_rows_are_left() -> None:
    lines = printed(60, max_rows=1)
    assert not any("caches" in line for line in lines)
    assert lines[-1].startswith("... and 1 more rows")


def test_all_lines_of_a_detail_are_set_in() -> None:
    console = Console(width=30, force_terminal=False)
    with console.capture() as capture:
        print_detail(console, "what to do", "Let one thread do every first compile, [b]before[/b] the others start.")
    lines = capture.get().splitlines()
    assert len(lines) > 2
    assert all(line.startswith("    ") for line in lines)
    assert "[b]before[/b]" in " ".join(line.strip() for line in lines)


def test_each_thread_s_place_has_its_name_in_front() -> None:
    overlap = Observation(
        kind="overlap", name="x", threads=("a", "b"), where=("b.py:1 outer", "b.py:2 inner"), fields={"where_first": ["a.py:3 f"]}
    )
    leak = Observation(kind="leak", name="patched (F5). Restart", threads=("a", "b"), where=("a.py:3 f", "b.py:2 inner"))
    for seen, expected in (
        (overlap, ["b: b.py:2 inner <- b.py:1 outer", "a: a.py:3 f"]),
        (leak, ["a: a.py:3 f", "b: b.py:2 inner"]),
    ):
        (finding,) = conclude([seen])
        assert [text for label, text in details(finding) if label == "where"] == expected


def test_the_places_of_one_thread_are_a_chain_without_its_name() -> None:
    finding = Finding(id="F7", severity="error", what="w", who=("a",), where=("p.py:1 f", "p.py:2 g"), why="y", what_to_do="d")
    assert ("where", "p.py:2 g <- p.py:1 f") in details(finding)
    assert Finding.from_dict(dataclasses.asdict(dataclasses.replace(finding, others=("b: q.py:1",)))).others == ("b: q.py:1",)
