"""The front of `pytest regression/ --gpus N`: options, one measurement a session, and what counts as what.

A law that cannot be judged is INSUFFICIENT DATA: it fails its item in its own colour, and the exit code is 3 when nothing else
failed. Nothing here skips.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from dflash.config import ConfigError
from diagnostics import environment
from regression import baseline
from regression.acceptance import Acceptance
from regression.child import ChildFailed, Place, run_to_success
from regression.history import acceptances
from regression.laws import Outcome, problems
from regression.measurement import ATTEMPTS, Measurement, measure_until_valid
from regression.measurement import measure as run_and_measure
from regression.spec import SEGMENTS, RunSpec, workload
from regression.store import Store

RUN_TIMEOUT_SECONDS = 1500.0
FAILED, INSUFFICIENT = 1, 3
_reports = pytest.StashKey[list[pytest.TestReport]]()
_verdicts = pytest.StashKey[list[str]]()
_accepted = pytest.StashKey[list[Acceptance]]()


class InsufficientData(AssertionError):
    """The law can be neither confirmed nor refuted."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options beside --gpus."""
    group = parser.getgroup("regression")
    group.addoption("--segments", type=int, default=SEGMENTS, metavar="N", help=f"segments of a measurement (default {SEGMENTS})")
    group.addoption("--segment-seconds", type=float, metavar="S", help="length of a segment (default 60 on GPUs, 5 on a CPU)")
    group.addoption("--attempts", type=int, default=ATTEMPTS, metavar="R", help=f"of an invalid measurement (default {ATTEMPTS})")
    group.addoption("--burn-share", type=float, default=0.0, metavar="X", help="plant a slowdown, to see that it fails")
    group.addoption("--store", type=Path, metavar="DIR", help="history to read, and to add the measurements to")
    group.addoption(
        "--baselines", type=Path, default=baseline.DIRECTORY, metavar="DIR", help="baselines (default: the committed)"
    )
    group.addoption("--record-baseline", action="store_true", help="write the baseline of this machine, ready to commit")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse what would make the numbers worthless."""
    config.stash[_reports], config.stash[_verdicts], config.stash[_accepted] = [], [], []
    if config.getoption("numprocesses", default=None) or hasattr(config, "workerinput"):
        raise pytest.UsageError("regression/ measures throughput: run it without -n, runs side by side slow each other down")
    if config.getoption("--attempts") < 1:
        raise pytest.UsageError(f"--attempts {config.getoption('--attempts')}: use at least 1")
    try:
        chosen_workload(config)
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.fixture(scope="session")
def spec(request: pytest.FixtureRequest) -> RunSpec:
    """The workload for `--gpus N`."""
    return chosen_workload(request.config)


def chosen_workload(config: pytest.Config) -> RunSpec:
    """What the options ask for. Raises ConfigError."""
    burned = config.getoption("--burn-share")
    return workload(
        config.getoption("--gpus"),
        segments=config.getoption("--segments"),
        segment_seconds=config.getoption("--segment-seconds"),
        planted=("--measure.burn-share", str(burned)) if burned else (),
        environment=os.environ,
    )


@pytest.fixture(scope="session")
def history(request: pytest.FixtureRequest, spec: RunSpec) -> list[Measurement]:
    """The baseline of this workload on this machine, and what the store has of it."""
    series = f"{spec.name} [{environment.series_key(environment.fingerprint())}]"
    found = baseline.load(series, request.config.getoption("--baselines"))
    directory = request.config.getoption("--store")
    if directory is not None:
        records, unread = Store(directory).read(series)
        request.config.stash[_verdicts] += [f"history: {problem}" for problem in unread]
        found += [Measurement.from_record(record) for record in records if record["kind"] == "measurement"]
        request.config.stash[_accepted] += acceptances(records)
    return found


@pytest.fixture(scope="session")
def accepted(request: pytest.FixtureRequest, history: list[Measurement]) -> list[Acceptance]:  # noqa: ARG001 - it fills the stash
    """The changes of level that the store says were accepted."""
    return request.config.stash[_accepted]


@pytest.fixture(scope="session")
def measured(
    request: pytest.FixtureRequest, spec: RunSpec, history: list[Measurement], tmp_path_factory: pytest.TempPathFactory
) -> Measurement:
    """The workload, measured in a fresh process: the first time that counts, or the last attempt."""
    directory = tmp_path_factory.mktemp("regression")
    told = request.config.stash[_verdicts]

    def one(attempt: int) -> Measurement:
        return run_and_measure(
            spec,
            directory / f"attempt-{attempt}",
            timeout_seconds=RUN_TIMEOUT_SECONDS,
            baseline_clock_mhz=baseline.clock_mhz(history),
        )

    tried = measure_until_valid(one, attempts=request.config.getoption("--attempts"), tell=told.append)
    store = request.config.getoption("--store")
    if store is not None:
        for measurement in tried:
            Store(store).add({**measurement.to_record(), "problems": problems(measurement)})
    return tried[-1]


@pytest.fixture(scope="session")
def probed(spec: RunSpec, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of fxprobe on a short run of the same workload."""
    directory = tmp_path_factory.mktemp("probed")
    report, log = directory / "report.json", directory / "stderr.log"
    command = spec.probed_command(directory / "run", report)
    try:
        run_to_success(command, log=log, timeout_seconds=RUN_TIMEOUT_SECONDS, place=Place(variables=spec.variables))
    except ChildFailed:
        if not report.exists():
            raise
    content: dict[str, Any] = json.loads(report.read_text())
    return content


@pytest.fixture(scope="session")
def record_command(request: pytest.FixtureRequest) -> str:
    """How to record a baseline of this workload."""
    option = request.config.getoption
    words = ["pytest", "regression/", "--gpus", str(option("--gpus"))]
    if option("--segments") != SEGMENTS:
        words += ["--segments", str(option("--segments"))]
    if option("--segment-seconds") is not None:
        words += ["--segment-seconds", f"{option('--segment-seconds'):g}"]
    if option("--baselines") != baseline.DIRECTORY:
        words += ["--baselines", str(option("--baselines"))]
    return shlex.join([*words, "--record-baseline"])


@pytest.fixture
def hold(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Callable[[Outcome], None]:
    """Turn an outcome into that of the test; its sentence goes to JUnit and to the terminal."""

    def check(outcome: Outcome) -> None:
        record_property("verdict", f"{outcome.kind}: {outcome.sentence}")
        request.config.stash[_verdicts].append(f"{request.node.name}: {outcome.kind}: {outcome.sentence}")
        if outcome.kind == "INSUFFICIENT":
            raise InsufficientData(f"INSUFFICIENT DATA: {outcome.sentence}")
        if outcome.kind == "FAIL":
            pytest.fail(outcome.sentence, pytrace=False)

    return check


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Mark insufficient data, and show its sentence instead of a traceback."""
    report = yield
    if call.excinfo is not None and call.excinfo.errisinstance(InsufficientData):
        report.longrepr = str(call.excinfo.value)
        report.user_properties.append(("insufficient data", "yes"))
    item.config.stash[_reports].append(report)
    return report


def pytest_report_teststatus(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, Any] | None:
    """Insufficient data has its own word, letter and colour."""
    if isinstance(report, pytest.TestReport) and is_insufficient(report):
        return "insufficient data", "I", ("INSUFFICIENT DATA", {"purple": True})
    return None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Every verdict, whatever the verbosity."""
    told = terminalreporter.config.stash[_verdicts]
    if told:
        terminalreporter.section("regression")
        for line in told:
            terminalreporter.write_line(line, purple="INSUFFICIENT" in line or "INVALID" in line, red=": FAIL" in line)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Exit code 3 when data was insufficient and nothing else failed."""
    failed = [report for report in session.config.stash[_reports] if report.failed]
    if session.exitstatus == FAILED and failed and all(is_insufficient(report) for report in failed):
        session.exitstatus = INSUFFICIENT


def is_insufficient(report: pytest.TestReport) -> bool:
    """Whether a report was marked as such."""
    return ("insufficient data", "yes") in report.user_properties
