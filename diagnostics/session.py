"""Run a program with the probes in all its Python processes, and collect what they saw. The program is not changed otherwise.

Two environment variables reach every child: PYTHONPATH leads to `diagnostics/inject`, and FXPROBE_JOURNALS names the directory
where each process writes its journal. The program keeps its terminal, its process group and its signals (`diagnostics.signals`);
this process waits for its end and reports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from diagnostics import apart, signals
from diagnostics.findings import conclude
from diagnostics.hang_watch import HangWatch
from diagnostics.journal import ProcessRecord, read_journals
from diagnostics.output import say
from diagnostics.records import Finding

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 10.0  # between asking the program to end and killing it
_UNSEEN_AFTER_SECONDS = 2.0  # a Python process of this age without a journal is not watched
_SECONDS_BETWEEN_HANG_CHECKS = 1.0
_COMPILE_WORKER = "/torch/_inductor/compile_worker/"  # torch starts these with a PYTHONPATH of its own
_INJECT = Path(__file__).parent / "inject"


class UsageError(ValueError):
    """The program cannot be started; the message says what was looked for."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of the program and what its processes saw."""

    exit_code: int  # the program's; 128 + N when signal N ended it
    seconds: float
    processes: tuple[ProcessRecord, ...]  # that imported torch
    others: int  # Python processes that did not
    not_observed: tuple[str, ...]  # such a run is never called clean
    notes: tuple[str, ...]
    hangs: tuple[Finding, ...] = ()  # seen from outside while it ran


def observe_program(command: Sequence[str], *, seconds_between_progress: float, stall_seconds: float) -> Outcome:
    """Run `command` to its end under the probes. Raises UsageError when it cannot be started.

    A process that does nothing for `stall_seconds` is looked at with py-spy (0: never); it is left as it is.
    """
    resolved = resolve(command)
    try:
        directory = Path(tempfile.mkdtemp(prefix="fxprobe-"))
    except OSError as error:
        raise UsageError(f"no directory for the journals: {error}; set TMPDIR to one that can be written") from error
    try:
        watcher = _Watcher(directory, seconds_between_progress, stall_seconds)
        return _run(resolved, watcher, _environment(directory, command))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def resolve(command: Sequence[str]) -> list[str]:
    """The full command line for what the user wrote. Raises UsageError when there is no such program."""
    first = command[0]
    if first == "-c":
        return [sys.executable, *command]
    if first == "-m":
        if len(command) < 2:
            raise UsageError("-m needs the name of a module")
        package = command[1].partition(".")[0]
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"no module named {package}")
        return [sys.executable, *command]
    if Path(first).is_file() and (first.endswith(".py") or not os.access(first, os.X_OK)):
        if not os.access(first, os.R_OK):
            raise UsageError(f"cannot read the program {first}: permission denied")
        return [sys.executable, *command]
    beside = Path(sys.executable).parent / first  # torchrun and pytest of this environment before any other
    found = str(beside) if os.sep not in first and os.access(beside, os.X_OK) else shutil.which(first)
    if found is None:
        raise UsageError(f"cannot find the program {first}: it is neither a file nor a command; for a module write -- -m NAME")
    return [found, *command[1:]]


def _run(command: list[str], watcher: _Watcher, environment: dict[str, str]) -> Outcome:
    started = time.monotonic()
    with signals.collected() as arrived:
        try:
            program = subprocess.Popen(command, env=environment)
        except OSError as error:
            raise UsageError(f"cannot start {command[0]}: {error.strerror}") from error
        try:
            code = _watched_to_its_end(program, watcher, arrived)
        except BaseException:  # nobody would watch the program, or wait for it, any more
            _end(program)
            raise
    return watcher.outcome(code, seconds=time.monotonic() - started)


def _watched_to_its_end(program: subprocess.Popen[bytes], watcher: _Watcher, arrived: Callable[[], list[int]]) -> int:
    while True:
        try:
            return program.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            watcher.look(program.pid)
            for number in arrived():
                program.send_signal(number)


def _end(program: subprocess.Popen[bytes]) -> None:
    """Ask, wait, kill."""
    program.terminate()
    try:
        program.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()


def _environment(directory: Path, command: Sequence[str]) -> dict[str, str]:
    paths = [str(_INJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {"PYTHONPATH": os.pathsep.join(paths), "FXPROBE_JOURNALS": str(directory)}
    places = (Path.cwd(), *(Path(word).parent for word in command if word.endswith(".py")))
    if any(apart.collision(place) for place in places):
        ours[apart.VARIABLE] = "1"
    return {**os.environ, **ours}


class _Watcher:
    """What can be seen of the program from outside while it runs."""

    def __init__(self, directory: Path, seconds_between_progress: float, stall_seconds: float) -> None:
        self.directory = directory
        self._between = seconds_between_progress
        self._started = self._shown = self._checked = time.monotonic()
        self._hang_watch = HangWatch(self._watched_pids, stall_seconds) if stall_seconds else None
        self._hangs: list[Finding] = []
        self._failed_looks: list[tuple[int, str]] = []  # pid, and why its stacks could not be read
        self._python: dict[int, str] = {}  # pid -> command of Python processes that should have a journal
        self._alive: set[int] = set()

    def look(self, pid: int) -> None:
        """Note the program's processes; print a progress line when it is time."""
        self._alive = set()
        with contextlib.suppress(psutil.Error):
            program = psutil.Process(pid)
            for process in (program, *program.children(recursive=True)):
                self._note(process)
        if self._between and time.monotonic() - self._shown >= self._between:
            self._shown = time.monotonic()
            self._progress()
        if self._hang_watch is not None and time.monotonic() - self._checked >= _SECONDS_BETWEEN_HANG_CHECKS:
            self._checked = time.monotonic()
            self._check_hang(self._hang_watch)

    def _note(self, process: psutil.Process) -> None:
        with contextlib.suppress(psutil.Error):
            self._alive.add(process.pid)
            old = time.time() - process.create_time() > _UNSEEN_AFTER_SECONDS
            if old and process.pid not in self._python and Path(process.exe()).name.startswith("python"):
                self._python[process.pid] = " ".join(process.cmdline()[1:4])

    def _watched_pids(self) -> list[int]:
        return [pid for pid in self._alive if any(self.directory.glob(f"{pid}-*"))]

    def _check_hang(self, watch: HangWatch) -> None:
        report = watch.check()
        if report is None:
            return
        self._failed_looks += [(report.pid, why) for why in report.not_observed]
        for finding in report.findings:
            self._hangs.append(dataclasses.replace(finding, process=f"pid {report.pid}"))
            say(f"fxprobe: process {report.pid} does nothing: {finding.what}. It is left as it is; kill {report.pid} ends it")

    def _progress(self) -> None:
        processes = [record for record in read_journals(self.directory) if record.torch is not None]
        counts = {"trace": 0, "compile": 0}
        for record in processes:
            for seen in record.observations:
                if seen.kind in counts:
                    counts[seen.kind] += seen.count
        findings = [finding for record in processes for finding in conclude(record.observations)]
        worst = {severity: sum(finding.severity == severity for finding in findings) for severity in ("error", "hazard")}
        say(
            f"fxprobe: {time.monotonic() - self._started:.0f} s, {len(processes)} with torch, "
            f"{counts['trace']} traces, {counts['compile']} compiles, {worst['error']} errors, {worst['hazard']} hazards"
        )

    def outcome(self, code: int, *, seconds: float) -> Outcome:
        """Everything, when the program has ended."""
        records = read_journals(self.directory)
        processes = tuple(record for record in records if record.torch is not None)
        journals = {record.pid for record in records}
        missing = {pid: command for pid, command in self._python.items() if pid not in journals}
        workers = {pid for pid, command in missing.items() if _COMPILE_WORKER in command}
        unseen = [
            f"a Python process without our environment: {command} (pid {pid})"
            for pid, command in missing.items()
            if pid not in workers
        ]
        ended = {record.pid for record in records if record.ended}
        unseen += [why for pid, why in self._failed_looks if pid not in ended]
        if not processes:
            unseen.append("no process of the program imported torch: there was nothing to observe")
        for record in processes:
            unseen += [_of(record, processes, seen.name) for seen in record.observations if seen.kind == "not_observed"]
        notes = [_of(record, processes, seen.name) for record in processes for seen in record.observations if seen.kind == "note"]
        notes += [_of(record, processes, sentence) for record in processes for sentence in self._end_notes(record)]
        notes += [
            f"process {pid} did nothing for a while and then went on: {why}" for pid, why in self._failed_looks if pid in ended
        ]
        if workers:
            notes.append(f"{len(workers)} compile workers of Inductor were not watched: they run nothing of the program")
        if code < 0:
            notes.append(f"the program was ended by {signal.Signals(-code).name}; what was seen until then is reported")
        return Outcome(
            exit_code=code if code >= 0 else 128 - code,
            seconds=seconds,
            processes=processes,
            others=len(records) - len(processes),
            not_observed=tuple(dict.fromkeys(unseen)),
            notes=tuple(dict.fromkeys(notes)),
            hangs=tuple(self._told(finding, records) for finding in self._hangs),
        )

    def _told(self, finding: Finding, records: Sequence[ProcessRecord]) -> Finding:
        """A process that stood still and then ended by itself was slow, not stuck."""
        ended = {f"pid {record.pid}" for record in records if record.ended}
        if finding.process not in ended:
            return finding
        return dataclasses.replace(finding, severity="info", what=f"it went on after a while in which {finding.what}")

    def _end_notes(self, record: ProcessRecord) -> list[str]:
        if record.ended:
            return []
        if psutil.pid_exists(record.pid) and record.pid in self._alive:
            return ["still runs: what it does from now on is not in this report"]
        return ["ended without its exit handlers (os._exit, exec or a signal): the last look at what is left behind is missing"]


def _of(record: ProcessRecord, processes: Sequence[ProcessRecord], sentence: str) -> str:
    return f"{record.label}: {sentence}" if len(processes) > 1 else sentence
