"""The report as one HTML page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import jinja2

from diagnostics.records import Finding
from diagnostics.report import details, summary
from diagnostics.session import Outcome
from diagnostics.tables import tables


def write_page(command: Sequence[str], outcome: Outcome, findings: Sequence[Finding]) -> str:
    """The page's text. Everything that comes from the program is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template("fxprobe.html").render(
        command=shlex.join(command),
        outcome=outcome,
        findings=findings,
        summary=summary(outcome, findings),
        details=details,
        tables=tables(outcome.processes),
    )
