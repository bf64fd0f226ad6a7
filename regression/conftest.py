"""The front of `pytest regression/ --gpus N`: options, one measurement a session, and what counts as what.

A law that cannot be judged is INSUFFICIENT DATA: it fails its item in its own colour, and the exit code is 3 when nothing else
failed. Nothing here skips.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from dflash.config import ConfigError
from diagnostics import environment
from regression import baseline, gate, pairing
from regression.decision import judge
from regression.faults import FAULTS
from regression.history import History, read
from regression.laws import Outcome, problems
from regression.measurement import ATTEMPTS, Measurement, measure_until_valid
from regression.measurement import measure as run_and_measure
from regression.probing import probe
from regression.sides import SideError
from regression.spec import SEGMENTS, RunSpec, planted, workload
from regression.store import Store
from regression.verdict import Kind

RUN_TIMEOUT_SECONDS = 1500.0
FAILED, INSUFFICIENT = 1, 3
_reports = pytest.StashKey[list[pytest.TestReport]]()
_verdicts = pytest.StashKey[list[str]]()


class InsufficientData(AssertionError):
    """The law can be neither confirmed nor refuted."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options beside --gpus."""
    group = parser.getgroup("regression")
    group.addoption("--segments", type=int, default=SEGMENTS, metavar="N", help=f"segments of a measurement (default {SEGMENTS})")
    group.addoption("--segment-seconds", type=float, metavar="S", help="length of a segment (default 60 on GPUs, 5 on a CPU)")
    group.addoption("--engine", choices=("threads", "processes"), default="threads", help="of the runs (default threads)")
    group.addoption("--attempts", type=int, default=ATTEMPTS, metavar="R", help=f"of an invalid measurement (default {ATTEMPTS})")
    group.addoption("--burn-share", type=float, default=0.0, metavar="X", help="plant a slowdown, to see that it fails")
    group.addoption("--plant", choices=sorted(FAULTS), help="plant a fault in the runs, to see that it fails")
    group.addoption("--store", type=Path, metavar="DIR", help="history to read, and to add the measurements to")
    group.addoption(
        "--baselines", type=Path, default=baseline.DIRECTORY, metavar="DIR", help="baselines (default: the committed)"
    )
    group.addoption("--record-baseline", action="store_true", help="write the baseline of this machine, ready to commit")
    group.addoption(
        "--baseline-measurements", type=int, default=baseline.MEASUREMENTS, metavar="N",
        help=f"of a new baseline (default {baseline.MEASUREMENTS}; fewer make a wider limit, under 3 nothing fails by it)",
    )  # fmt: skip
    pairing.add_options(group)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse what would make the numbers worthless."""
    config.stash[_reports], config.stash[_verdicts] = [], []
    if config.getoption("numprocesses", default=None) or hasattr(config, "workerinput"):
        raise pytest.UsageError("regression/ measures throughput: run it without -n, runs side by side slow each other down")
    if config.getoption("--attempts") < 1:
        raise pytest.UsageError(f"--attempts {config.getoption('--attempts')}: use at least 1")
    if config.getoption("--baseline-measurements") < 1:
        raise pytest.UsageError(f"--baseline-measurements {config.getoption('--baseline-measurements')}: use at least 1")
    if config.getoption("--plant") and (config.getoption("--record-baseline") or config.getoption("--baseline-commit")):
        raise pytest.UsageError("--plant: a run with a fault is no baseline and is compared with none")
    try:
        chosen_workload(config)
        pairing.check_options(config)
    except (ConfigError, SideError, ValueError) as error:
        raise pytest.UsageError(str(error)) from error


@pytest.fixture(scope="session")
def spec(request: pytest.FixtureRequest) -> RunSpec:
    """The workload for `--gpus N`."""
    return chosen_workload(request.config)


def chosen_workload(config: pytest.Config) -> RunSpec:
    """What the options ask for. Raises ConfigError."""
    return workload(
        config.getoption("--gpus"),
        segments=config.getoption("--segments"),
        segment_seconds=config.getoption("--segment-seconds"),
        planted=planted(config.getoption("--burn-share")),
        fault=config.getoption("--plant"),
        environment=os.environ,
        engine=config.getoption("--engine"),
    )


@pytest.fixture(scope="session")
def history(request: pytest.FixtureRequest, spec: RunSpec) -> History:
    """The baseline of this workload on this machine, and what the store has of it."""
    series = f"{spec.name} [{environment.series_key(environment.fingerprint())}]"
    directory = request.config.getoption("--store")
    found = History() if directory is None else read(Store(directory), series)
    request.config.stash[_verdicts] += [f"history: {problem}" for problem in found.unread]
    baselines = request.config.getoption("--baselines")
    request.config.stash[_verdicts] += [f"baseline: {sentence}" for sentence in baseline.earlier_formats(baselines)]
    return found.with_baseline(baseline.load(series, baselines))


@pytest.fixture(scope="session")
def measure_anew(
    request: pytest.FixtureRequest, spec: RunSpec, history: History, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Measurement]:
    """Measures the workload in a fresh process: the first time that counts, or the last attempt. Takes a directory's name."""
    told = request.config.stash[_verdicts]
    in_pairs = request.config.getoption("--baseline-commit") is not None

    def measure(name: str) -> Measurement:
        directory = tmp_path_factory.mktemp(name)

        def one(attempt: int) -> Measurement:
            return run_and_measure(
                spec,
                directory / f"attempt-{attempt}",
                timeout_seconds=RUN_TIMEOUT_SECONDS,
                baseline_clock_mhz=baseline.clock_mhz(list(history.measurements)),
            )

        attempts = 1 if in_pairs and name == "measured" else request.config.getoption("--attempts")  # the pairs judge
        tried = measure_until_valid(one, attempts=attempts, tell=told.append)
        store = request.config.getoption("--store")
        if store is not None:
            for measurement in tried:
                Store(store).add({**measurement.to_record(), "problems": problems(measurement)})
        return tried[-1]

    return measure


@pytest.fixture(scope="session")
def measured(measure_anew: Callable[[str], Measurement]) -> Measurement:
    """The measurement of this session."""
    return measure_anew("measured")


@pytest.fixture(scope="session")
def confirmed(
    request: pytest.FixtureRequest, measured: Measurement, history: History, measure_anew: Callable[[str], Measurement]
) -> tuple[Measurement, History]:
    """What the throughput is judged by. A measurement that is suspect, or on a changed machine, is made again after it."""
    tried, most = [measured], max(2, request.config.getoption("--attempts"))
    while len(tried) < most:
        verdict = judge(tried[-1], history.with_measurements(tried[:-1]))
        if verdict.kind not in {Kind.SUSPECT, Kind.HARDWARE}:
            break
        request.config.stash[_verdicts].append(
            f"measurement {len(tried)} of at most {most}, {tried[-1].per_device:,.1f} tok/s per device, measured again: "
            f"{verdict.sentence}"
        )
        tried.append(measure_anew(f"again-{len(tried)}"))
    return tried[-1], history.with_measurements(tried[:-1])


@pytest.fixture(scope="session")
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> gate.Verdict:
    """The gate's verdict on the working tree against `--baseline-commit`, in pairs."""
    directory = tmp_path_factory.mktemp("pairs")
    return pairing.compare(
        request.config, directory, timeout_seconds=RUN_TIMEOUT_SECONDS, tell=request.config.stash[_verdicts].append
    )


@pytest.fixture(scope="session")
def record_new_baseline(
    request: pytest.FixtureRequest, measured: Measurement, measure_anew: Callable[[str], Measurement]
) -> Callable[[], Path]:
    """Measures as often as a baseline asks for and writes it. Raises BaselineError."""

    def record() -> Path:
        numbers = range(2, request.config.getoption("--baseline-measurements") + 1)
        found = [measured, *(measure_anew(f"baseline-{number}") for number in numbers)]
        return baseline.record(found, request.config.getoption("--baselines"))

    return record


@pytest.fixture(scope="session")
def probed(spec: RunSpec, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of fxprobe on a short run of the same workload."""
    return probe(spec, tmp_path_factory.mktemp("probed") / "run", timeout_seconds=RUN_TIMEOUT_SECONDS)


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
