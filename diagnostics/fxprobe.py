"""What races in a program that traces and compiles in threads? `python -m diagnostics.fxprobe [options] -- program args`.

The program is `script.py args`, `-m module args`, or any command such as `torchrun ...` or `pytest ...`. It runs as it would
alone, with its own output, and every Python process below it that imports torch is watched. The report follows on standard
error. Exit codes: the program's own if it is not 0 (128 + N if signal N ended it), else 0 clean, 1 errors found (or hazards
with --fail-on hazard), 2 bad usage, 3 hazards only or something not observed.

    python -m diagnostics.fxprobe --self-test        which failures happen on this torch, and what cures them
    python -m diagnostics.fxprobe --scan TARGET      which code of TARGET reaches a trace
    python -m diagnostics.fxprobe --attach PID       why a running program is stuck
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Callable, Sequence

from diagnostics.findings import conclude_all
from diagnostics.output import ignoring_closed_stderr, output_file, say, write_text
from diagnostics.page import write_page
from diagnostics.records import Finding
from diagnostics.report import print_report
from diagnostics.session import Outcome, UsageError, observe_program
from diagnostics.terminal import StderrConsole

_SECONDS_BETWEEN_PROGRESS = 10.0
_STALL_SECONDS = 60.0
_OTHER_COMMANDS = {"--self-test": "diagnostics.selftest", "--scan": "diagnostics.scan", "--attach": "diagnostics.hang"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] and arguments[0] in _OTHER_COMMANDS:
        other: Callable[[Sequence[str]], int] = importlib.import_module(_OTHER_COMMANDS[arguments[0]]).main
        return other(arguments[1:])
    parser = _parser()
    options = parser.parse_args(arguments)
    command = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not command:
        parser.error("no program given: end the command with -- script.py args, -- -m module args, or -- torchrun ...")
    try:
        outcome = observe_program(command, seconds_between_progress=options.progress, stall_seconds=options.stall)
    except UsageError as error:
        say(f"fxprobe: {error}")
        return 2
    return _report(options, command, outcome)


def exit_code(outcome: Outcome, findings: Sequence[Finding], *, fail_on: str) -> int:
    """0 clean, 1 found what fails, 3 hazards only or something not observed."""
    severities = {finding.severity for finding in findings}
    if "error" in severities or (fail_on == "hazard" and "hazard" in severities):
        return 1
    return 3 if "hazard" in severities or outcome.not_observed else 0


def _report(options: argparse.Namespace, command: list[str], outcome: Outcome) -> int:
    findings = conclude_all(outcome.processes)
    known = {finding.id for finding in findings}
    findings = (*(hang for hang in outcome.hangs if hang.id not in known | _explained_by(known)), *findings)
    code = outcome.exit_code or exit_code(outcome, findings, fail_on=options.fail_on)
    for path, make in ((options.json, _as_json), (options.html, write_page)):
        if path is not None:
            try:
                write_text(path, make(command, outcome, findings))
            except OSError as error:
                say(f"fxprobe: cannot write {path}: {error.strerror}")
                code = code or 2
    with ignoring_closed_stderr():
        print_report(StderrConsole(), outcome, findings)
    return code


def _as_json(command: list[str], outcome: Outcome, findings: Sequence[Finding]) -> str:
    content = {
        "version": 2,
        "program": command,
        "program_exit_code": outcome.exit_code,
        "not_observed": list(outcome.not_observed),
        "notes": list(outcome.notes),
        "findings": [finding.to_dict() for finding in findings],
        "processes": [process.to_dict() for process in outcome.processes],
    }
    return json.dumps(content, indent=1) + "\n"


def _explained_by(known: set[str]) -> set[str]:
    """A process that stands still in a deadlock is told by the deadlock."""
    return {"stall"} if "F8" in known else set()


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds: use 0 or more")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m diagnostics.fxprobe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write observations and findings")
    parser.add_argument("--html", type=output_file, metavar="FILE", help="write the report as one page")
    parser.add_argument(
        "--fail-on", choices=("error", "hazard"), default="error", help="the least severity that gives exit code 1"
    )
    parser.add_argument(
        "--progress",
        type=_seconds,
        default=_SECONDS_BETWEEN_PROGRESS,
        metavar="SECONDS",
        help="time between progress lines on standard error, 0 for none (default: %(default)s)",
    )
    parser.add_argument(
        "--stall",
        type=_seconds,
        default=_STALL_SECONDS,
        metavar="SECONDS",
        help="look at the stacks of a process that did nothing for so long, 0 for never (default: %(default)s)",
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- program args")
    return parser


if __name__ == "__main__":
    sys.exit(main())
