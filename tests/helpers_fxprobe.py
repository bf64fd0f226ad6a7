"""Programs under fxprobe: the command runs in the test's process, the program in processes of its own."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from diagnostics import fxprobe

ROOT = Path(__file__).parent.parent
TRACE = "torch.fx.symbolic_trace(torch.nn.Identity())"


class Run:
    """A program's text in; exit code, output and report out."""

    def __init__(self, directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self._directory, self._capfd = directory, capfd
        self.stdout = self.stderr = ""

    def __call__(self, text: str, *, before: tuple[str, ...] = (), options: tuple[str, ...] = ()) -> int:
        program, self._report = self._directory / "program.py", self._directory / "report.json"
        program.write_text(textwrap.dedent(text))
        self._capfd.readouterr()
        code = fxprobe.main(["--progress", "0", "--json", str(self._report), *options, "--", *before, str(program)])
        self.stdout, self.stderr = self._capfd.readouterr()
        return code

    @property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self._report.read_text())
        return report

    @property
    def found(self) -> list[tuple[str, str]]:
        return [(finding["severity"], finding["id"]) for finding in self.report["findings"]]

    def traced(self) -> list[int]:
        """Traces in each process that imported torch."""
        return [
            sum(seen["count"] for seen in process["observations"] if seen["kind"] == "trace")
            for process in self.report["processes"]
        ]
