"""Tables and labelled sentences on a terminal of any width. A table that would be folded to splinters becomes a list."""

from __future__ import annotations

import io
import sys
from typing import Any

from rich import table as rich_table
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from diagnostics.output import printable, width
from diagnostics.tables import Table

_LEAST_COLUMN = 13  # characters, borders included
_INDENT = 4


class ReportConsole(Console):
    """Standard output for a report: what it cannot spell is escaped."""

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        super().__init__(width=width(sys.stdout))

    def render_str(self, text: str, **options: Any) -> Text:
        """As rich, without controls that a log, a file name or a commit may hold."""
        return super().render_str(printable(text), **options)


class StderrConsole(Console):
    """Standard error for a report: the caller hears that its reader has gone; rich would end the process, and stdout with it."""

    def __init__(self) -> None:
        super().__init__(stderr=True, width=width(sys.stderr))

    def on_broken_pipe(self) -> None:
        """See rich."""
        raise BrokenPipeError


def print_table(console: Console, table: Table, *, max_rows: int | None = None, lines_between_rows: bool = False) -> None:
    """Print `table`, or nothing where it has no rows; of more than `max_rows` the first ones, and how many are left."""
    if not table.rows:
        return
    rows = table.rows[:max_rows]
    if console.width < _LEAST_COLUMN * len(table.headers):
        _print_list(console, table, rows)
    else:
        printed = rich_table.Table(title=table.title, title_justify="left", show_lines=lines_between_rows)
        for header in table.headers:
            printed.add_column(header, overflow="fold")
        for row in rows:
            printed.add_row(*(escape(cell) for cell in row))
        console.print(printed)
    if len(table.rows) > len(rows):
        console.print(f"... and {len(table.rows) - len(rows)} more rows: --json FILE has all of them", highlight=False)


def print_detail(console: Console, label: str, text: str) -> None:
    """`label: text`, with all its lines set in."""
    console.print(
        Padding(Text(printable(f"{label}: {text}" if label else text)), (0, 0, 0, _INDENT), expand=False), highlight=False
    )


def _print_list(console: Console, table: Table, rows: tuple[tuple[str, ...], ...]) -> None:
    console.print(Text(table.title, style="italic"))
    for row in rows:
        console.print(Padding(Text(printable(row[0]), style="bold"), (0, 0, 0, _INDENT // 2), expand=False), highlight=False)
        cells = (
            f"{header}: {', '.join(cell.splitlines())}" for header, cell in zip(table.headers[1:], row[1:], strict=True) if cell
        )
        print_detail(console, "", "; ".join(cells))
