"""Run a program under the probes: `python -m diagnostics.fxprobe [--json FILE] [--fail-on error|hazard] -- script.py args`.

The program runs in this process, with `-- -m module args` for a module; its output and a failing exit code stay its own.
The report goes to standard error when the process ends, after the program's threads and exit handlers. Exit codes: the
program's own if it is not 0, else 0 clean, 1 errors found (or hazards with --fail-on hazard), 2 bad usage, 3 hazards only or
something not observed.

Limits: this process only, and a program that ends by `os._exit` or a signal leaves no report.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_at_exit: list[Callable[[], None]] = []


def _run_at_exit() -> None:
    for function in _at_exit:
        function()


# Before torch and the program register theirs: handlers run in reverse, so that this one is the last.
atexit.register(_run_at_exit)

import torch  # noqa: E402 - see above
from rich.console import Console  # noqa: E402 - see above

from diagnostics.findings import conclude  # noqa: E402 - see above
from diagnostics.observe import observed  # noqa: E402 - see above
from diagnostics.probes.exceptions import note_unhandled  # noqa: E402 - see above
from diagnostics.program import UsageError, run_program  # noqa: E402 - see above
from diagnostics.records import Finding, Log, Observation  # noqa: E402 - see above
from diagnostics.report import COVERAGE, print_report  # noqa: E402 - see above


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; the report follows when the process ends. Returns the program's exit code."""
    options = _options(arguments)
    probes = contextlib.ExitStack()
    log = probes.enter_context(observed())
    session = _Session(options, log, probes)
    try:
        session.program_code = run_program(
            options.program, on_exception=lambda error: note_unhandled(log, error, threading.current_thread().name)
        )
    except UsageError as error:
        probes.close()
        print(f"fxprobe: {error}", file=sys.stderr)  # noqa: T201 - a message of the command
        return 2
    _at_exit.append(session.close)
    return session.program_code


class _Session:
    """What is known until the process ends."""

    def __init__(self, options: argparse.Namespace, log: Log, probes: contextlib.ExitStack) -> None:
        self._options, self._log, self._probes = options, log, probes
        self._process = os.getpid()
        self.program_code = 0

    def close(self) -> None:
        """Take the probes off, report, and leave with the probe's exit code where the program's was 0."""
        if os.getpid() != self._process:  # a forked child has its parent's handlers
            return
        self._probes.close()
        observations = self._log.observations()
        findings = conclude(observations)
        print_report(Console(stderr=True, width=None if sys.stderr.isatty() else 140), observations, findings)
        code = self.program_code or exit_code(observations, findings, fail_on=self._options.fail_on)
        if self._options.json is not None:
            try:
                _write_json(self._options.json, self._options.program, self.program_code, observations, findings)
            except OSError as error:
                print(f"fxprobe: cannot write {self._options.json}: {error}", file=sys.stderr)  # noqa: T201 - a message
                code = code or 2
        if code != self.program_code:
            # Python has decided on its exit code already; all its exit handlers but this one have run.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def exit_code(observations: Sequence[Observation], findings: Sequence[Finding], *, fail_on: str) -> int:
    """0 clean, 1 found what fails, 3 hazards only or something not observed."""
    severities = {finding.severity for finding in findings}
    if "error" in severities or (fail_on == "hazard" and "hazard" in severities):
        return 1
    return 3 if "hazard" in severities or any(seen.kind == "not_observed" for seen in observations) else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m diagnostics.fxprobe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write observations and findings")
    parser.add_argument(
        "--fail-on", choices=("error", "hazard"), default="error", help="the least severity that gives exit code 1"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- script.py args | -- -m module args")
    options = parser.parse_args(arguments)
    if options.program[:1] == ["--"]:
        options.program = options.program[1:]
    if not options.program:
        parser.error("no program given: end the command with -- script.py args, or -- -m module args")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no directory {options.json.absolute().parent}")
    return options


def _write_json(
    path: Path, program: list[str], program_code: int, observations: Sequence[Observation], findings: Sequence[Finding]
) -> None:
    content: dict[str, Any] = {
        "version": 1,
        "program": program,
        "program_exit_code": program_code,
        "torch": torch.__version__,
        "coverage": COVERAGE,
        "findings": [finding.to_dict() for finding in findings],
        "observations": [seen.to_dict() for seen in observations],
    }
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(content, indent=1) + "\n")
    aside.replace(path)


if __name__ == "__main__":
    sys.exit(main())
