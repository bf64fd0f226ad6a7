"""The same training under `diagnostics.fxprobe`, for a few steps, beside the run that is measured: findings, not numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from regression.child import ChildFailed, Place, run_to_success
from regression.spec import RunSpec

_KEPT_FINDINGS = 50


def probe(spec: RunSpec, directory: Path, *, timeout_seconds: float) -> dict[str, Any]:
    """The report of fxprobe, with files in the new directory `directory`. Raises ChildFailed when there is none."""
    directory.mkdir(parents=True)
    report, log = directory / "report.json", directory / "stderr.log"
    command = spec.probed_command(directory / "run", report)
    try:
        run_to_success(command, log=log, timeout_seconds=timeout_seconds, place=Place(variables=spec.variables))
    except ChildFailed:
        if not report.exists():
            raise
    content: dict[str, Any] = json.loads(report.read_text())
    return content


def worth_keeping(report: dict[str, Any]) -> dict[str, Any]:
    """What `laws.probed` and the nightly report read; at most 50 findings, errors first, and how many there were."""
    order = ("error", "hazard", "info")
    findings = sorted(report["findings"], key=lambda finding: order.index(finding["severity"]))
    return {
        "findings": findings[:_KEPT_FINDINGS],
        "num_findings": len(findings),
        "program_exit_code": report["program_exit_code"],
        "not_observed": report["not_observed"],
    }
