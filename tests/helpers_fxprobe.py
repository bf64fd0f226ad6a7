"""Programs under fxprobe: one alone, the command in the test's process, or several together, each in a fork of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from diagnostics import fxprobe
from diagnostics.findings import conclude
from diagnostics.journal import ProcessRecord
from diagnostics.records import Finding, Observation
from diagnostics.session import Outcome, _Watcher
from diagnostics.stress.replay import ONE_THREAD

ROOT = Path(__file__).parent.parent
TRACE = "torch.fx.symbolic_trace(torch.nn.Identity())"
HAZARD = """
    import threading, torch
    class Parks(torch.nn.Module):
        def forward(self, x):
            thread = threading.Thread(target=lambda: torch.nn.Linear(1, 1)(torch.ones(1)), name="innocent")
            thread.start()
            thread.join()
            return x
    torch.fx.experimental.proxy_tensor.make_fx(Parks())(torch.ones(1))
"""


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


def pipe_that_opens_after(
    method: str, when: Callable[[_Watcher], bool], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A pipe that a program can read from once `when` holds after a call of this method of fxprobe's watcher."""
    pipe, original = directory / "pipe", getattr(_Watcher, method)
    os.mkfifo(pipe)

    def observed(watcher: _Watcher, *arguments: Any) -> None:
        original(watcher, *arguments)
        if pipe.exists() and when(watcher):
            pipe.write_text("")  # opens the program's read
            pipe.unlink()

    monkeypatch.setattr(_Watcher, method, observed)
    return pipe


def lines_of(text: str) -> str:
    """A program's text as its file has it."""
    return textwrap.dedent(text).strip() + "\n"


# Imports what is dear once, and runs each program as a copy of itself; prints as JSON whose process ended how. A copy runs its
# exit handlers, but does not take down the interpreter: with all of torch in it that takes longer than a program.
_FORKS = """
import atexit, gc, json, os, runpy, sys, torch, torch._dynamo, torch._functorch.aot_autograd, torch._inductor.compile_fx
from diagnostics.stress import scenarios
ended = {}
gc.freeze()
for path in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        output = os.open(path + ".out", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.close(output)
        runpy.run_path(path, run_name="__main__")
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    ended[path] = [child, os.waitstatus_to_exitcode(status)]
print(json.dumps(ended))
"""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What fxprobe saw of one of several programs; `code` is what its exit code would be for this one alone."""

    code: int
    stdout: str
    record: ProcessRecord
    findings: tuple[Finding, ...]
    report: str  # on standard error, of all programs together

    @property
    def found(self) -> list[tuple[str, str]]:
        return [(finding.severity, finding.id) for finding in self.findings]

    def of_kind(self, kind: str) -> list[Observation]:
        return [seen for seen in self.record.observations if seen.kind == kind]


def run_together(directory: Path, programs: dict[str, str]) -> dict[str, Seen]:
    """Run programs in forks of one process under one fxprobe: starting torch takes longer than any of them."""
    paths = {str(directory / f"program_{number}.py"): name for number, name in enumerate(programs)}
    for path, name in paths.items():
        Path(path).write_text(lines_of(programs[name]))
    (directory / "forks.py").write_text(_FORKS)
    report = directory / "report.json"
    command = (sys.executable, "-m", "diagnostics.fxprobe", "--progress", "0", "--json", str(report), "--")
    one_thread = os.environ | dict.fromkeys(ONE_THREAD, "1")  # forks start from one thread
    done = subprocess.run(
        (*command, str(directory / "forks.py"), *paths), cwd=ROOT, env=one_thread, capture_output=True, text=True, check=False
    )
    ended = json.loads(done.stdout or "{}")
    assert set(ended) == set(paths), done.stderr
    records = {values["pid"]: _record(values) for values in json.loads(report.read_text())["processes"]}
    return {
        paths[path]: _seen(records[pid], code, Path(f"{path}.out").read_text(), done.stderr)
        for path, (pid, code) in ended.items()
    }


def _record(values: dict[str, Any]) -> ProcessRecord:
    return ProcessRecord(**values | {"observations": tuple(Observation.from_dict(seen) for seen in values["observations"])})


def _seen(record: ProcessRecord, code: int, stdout: str, report: str) -> Seen:
    findings = conclude(record.observations)
    not_observed = tuple(seen.name for seen in record.observations if seen.kind == "not_observed")
    outcome = Outcome(exit_code=code, seconds=0.0, processes=(record,), others=0, not_observed=not_observed, notes=())
    code = code if code >= 0 else 128 - code
    return Seen(
        code=code or fxprobe.exit_code(outcome, findings, fail_on="error"),
        stdout=stdout,
        record=record,
        findings=findings,
        report=report,
    )
