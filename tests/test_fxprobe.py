"""Laws of the probes: what they find in child processes, and that they leave torch and the program as they were."""

from __future__ import annotations

import json
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.convert_frame
from helpers_fxprobe import HAZARD

from diagnostics import fxprobe
from diagnostics.observe import observed
from diagnostics.records import Finding, Observation


class Probe:
    """The command, run in this process; the program runs in processes of its own."""

    def __init__(self, directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd, self.directory = capfd, directory

    def __call__(self, *command: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        arguments = ["--progress", "0", "--json", str(self.directory / "report.json"), *options, "--", *command]
        self._capfd.readouterr()
        code = fxprobe.main(arguments)
        return subprocess.CompletedProcess(arguments, code, *self._capfd.readouterr())

    @property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.directory / "report.json").read_text())
        return report

    @property
    def findings(self) -> list[Finding]:
        return [Finding.from_dict(values) for values in self.report["findings"]]

    @property
    def observations(self) -> list[Observation]:
        return [Observation.from_dict(seen) for process in self.report["processes"] for seen in process["observations"]]


@pytest.fixture
def probe(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Probe:
    return Probe(tmp_path, capfd)


def script(directory: Path, text: str) -> str:
    path = directory / "program.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_output_arguments_and_a_failing_exit_code_stay_the_programs(probe: Probe) -> None:
    done = probe(script(probe.directory, "import sys; print(sys.argv[1:], __name__); sys.exit(7)"), "--json", "x")
    assert (done.stdout, done.returncode) == ("['--json', 'x'] __main__\n", 7)


def test_an_uncaught_exception_prints_the_programs_traceback_only(probe: Probe) -> None:
    done = probe(script(probe.directory, "import torch\ndef f():\n    raise ValueError('mine')\nf()\n"))
    shown, message, report = done.stderr.partition("ValueError: mine\n")
    assert (done.returncode, message, report[:1]) == (1, "ValueError: mine\n", "─")
    assert "program.py" in shown
    assert "diagnostics" not in shown


def test_a_traceback_through_observed_functions_shows_no_frame_of_the_probes(probe: Probe) -> None:
    text = """
        import torch
        class Inner(torch.nn.Module):
            def forward(self, x):
                raise ZeroDivisionError("mine")
        class Outer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = torch.nn.Sequential(Inner())
            def forward(self, x):
                return self.inner(x)
        def backend(graph, inputs):
            torch.fx.symbolic_trace(Outer())
        with torch._dynamo.config.patch(verbose=True):
            torch.compile(torch.sin, backend=backend)(torch.ones(1))
        """
    done = probe(script(probe.directory, text))
    assert "in trace" in done.stderr
    assert "in _compile" in done.stderr
    assert "ZeroDivisionError: mine" in done.stderr
    assert "diagnostics" not in done.stderr.partition("fxprobe \N{BOX DRAWINGS LIGHT HORIZONTAL}")[0]


def test_an_observed_call_keeps_the_context_of_its_exception() -> None:
    class Fails(torch.nn.Module):
        def forward(self, _x: object) -> None:
            try:
                int("first")
            except ValueError:
                raise KeyError("second")  # noqa: B904 - the context is the point

    with observed(), pytest.raises(KeyError, match="second") as caught:
        torch.fx.symbolic_trace(Fails())
    assert isinstance(caught.value.__context__, ValueError)


def test_threads_and_exit_handlers_of_the_program_are_observed_to_their_end(probe: Probe) -> None:
    program = script(
        probe.directory,
        """
        import atexit, concurrent.futures, torch
        trace = lambda: torch.fx.symbolic_trace(torch.nn.Identity())
        go = concurrent.futures.Future()
        pool = concurrent.futures.ThreadPoolExecutor(1, "pool")  # never shut down
        pool.submit(lambda: (go.result(60), trace()))
        atexit.register(lambda: print("handler"))
        atexit.register(trace)
        go.set_result(None)
        """,
    )
    done = probe(program)
    assert (done.returncode, done.stdout) == (0, "handler\n")
    assert sorted(seen.threads[0] for seen in probe.observations if seen.kind == "trace") == ["MainThread", "pool_0"]


def test_a_program_with_exception_hooks_of_its_own_is_observed_all_the_same(probe: Probe) -> None:
    program = script(
        probe.directory,
        """
        import sys, threading, torch
        def main_hook(kind, error, trace):
            print("main", error)
        def thread_hook(hook):
            print("thread", hook.exc_value)
        def fails():
            raise RuntimeError("in a thread")
        sys.excepthook, threading.excepthook = main_hook, thread_hook
        thread = threading.Thread(target=fails)
        thread.start()
        thread.join()
        raise RuntimeError("CURRENT_PATCHER is None in finally block")
        """,
    )
    done = probe(program)
    assert (done.stdout, done.returncode) == ("thread in a thread\nmain CURRENT_PATCHER is None in finally block\n", 1)
    assert [(finding.id, finding.who) for finding in probe.findings] == [("F5", ("MainThread",))]
    assert (len(probe.report["notes"]), probe.report["not_observed"]) == (1, [])


def test_a_hazard_fails_only_when_asked_to(probe: Probe) -> None:
    hazard = script(probe.directory, HAZARD)
    assert probe(hazard, options=("--fail-on", "hazard")).returncode == 1
    assert probe(hazard).returncode == 3
    assert [(finding.id, finding.severity) for finding in probe.findings] == [("F4", "hazard")]


@pytest.mark.parametrize("command", [("nowhere.py",), ("-m", "no_such_module"), ("-m",)])
def test_a_program_that_cannot_be_found_is_bad_usage(probe: Probe, command: tuple[str, ...]) -> None:
    done = probe(*command)
    assert done.returncode == 2
    assert done.stderr.startswith("fxprobe: ")


def test_no_program_is_bad_usage(probe: Probe) -> None:
    with pytest.raises(SystemExit) as stop:
        probe()
    assert stop.value.code == 2


def test_a_first_compile_under_the_probes_leaves_nothing_of_them_in_torch(probe: Probe) -> None:
    program = script(
        probe.directory,
        """
        import inspect, torch
        from diagnostics import fxprobe, patch
        before = inspect.unwrap(torch.fx.Tracer.trace)
        torch.compile(torch.sin, backend="eager")(torch.ones(1))  # torch wraps Tracer.trace at the first compile
        print(torch.fx.Tracer.trace is not before, inspect.unwrap(torch.fx.Tracer.trace) is before)
        """,
    )
    assert probe(program).stdout == "True True\n"
    assert probe.report["not_observed"] == []
