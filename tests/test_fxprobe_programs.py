"""Laws of the probes on whole programs: what they explain, what they leave alone, and how a program may end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from diagnostics import fxprobe, journal, session

ROOT = Path(__file__).parent.parent
SETTINGS_ARE_PER_THREAD = hasattr(torch._dynamo.config, "_hash_dirty_var")
IS_COMPILING_IS_SHARED = hasattr(torch.compiler, "_compile_session_context")  # of Dynamo's compiles, not of exports only
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


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    return Run(tmp_path, capfd)


def test_every_kind_of_child_is_observed_and_nothing_is_told_twice(run: Run) -> None:
    code = run(
        f"""
        import multiprocessing, os, subprocess, sys, torch
        def child(queue):
            {TRACE}
            queue.put(1)
        if __name__ == "__main__":
            {TRACE}
            for method in ("fork", "spawn"):
                context = multiprocessing.get_context(method)
                queue = context.Queue()
                process = context.Process(target=child, args=(queue,))
                process.start()
                queue.get()
                process.join()
            if os.fork() == 0:
                {TRACE}
                os._exit(0)
            os.wait()
            subprocess.run([sys.executable, "-c", "import torch; {TRACE}"], check=True)
        """
    )
    assert (code, run.found, run.traced()) == (0, [], [1] * 5)
    assert sum("ended without its exit handlers" in note for note in run.report["notes"]) == 1  # os._exit


def test_torchrun_workers_are_told_apart_by_rank(run: Run) -> None:
    code = run(
        f"""
        import os, threading, torch
        {TRACE}
        if os.environ["RANK"] == "1":
            class Parks(torch.nn.Module):
                def forward(self, x):
                    thread = threading.Thread(target=lambda: torch.nn.Linear(1, 1)(torch.ones(1)), name="innocent")
                    thread.start()
                    thread.join()
                    return x
            torch.fx.experimental.proxy_tensor.make_fx(Parks())(torch.ones(1))
        """,
        before=("torchrun", "--nproc-per-node", "2", "--master-port", "0"),
    )
    assert (code, run.found) == (3, [("hazard", "F4")])
    assert run.report["findings"][0]["process"].startswith("rank 1 ")
    assert {process["rank"] for process in run.report["processes"]} == {None, "0", "1"}  # None: torchrun itself


def test_pytest_of_a_compiled_model_in_one_thread_is_clean(run: Run) -> None:
    code = run(
        """
        import torch
        def test_model():
            model = torch.compile(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), backend="aot_eager")
            for rows in (2, 3, 4):
                model(torch.ones(rows, 4)).sum().backward()
        """,
        before=("pytest", "-q", "-p", "no:cacheprovider"),
    )
    assert (code, run.found, run.report["not_observed"]) == (0, [], [])
    assert "1 passed" in run.stdout


@pytest.mark.parametrize(("ending", "code"), [("os._exit(5)", 5), ("os.kill(os.getpid(), signal.SIGKILL)", 137)])
def test_a_sudden_end_keeps_what_was_seen(run: Run, ending: str, code: int) -> None:
    ended = run(
        f"""
        import os, signal, threading, torch
        class Calls(torch.nn.Module):
            def forward(self, x):
                thread = threading.Thread(target=call, name="innocent")
                thread.start()
                thread.join()
                return x
        def call():
            try:
                torch.nn.Linear(1, 1)(torch.ones(1))
            except NameError:
                pass
        torch.fx.symbolic_trace(Calls())
        {ending}
        """
    )
    assert (ended, run.found) == (code, [("error", "F3")])


def test_a_program_without_torch_was_not_observed(run: Run) -> None:
    assert run("print('hello')") == 3
    assert run.stdout == "hello\n"
    assert "no process of the program imported torch" in run.stderr


def test_a_child_that_cannot_be_watched_is_said(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, look = tmp_path / "seen", session._Watcher.look
    os.mkfifo(seen)

    def looks(watcher: session._Watcher, pid: int) -> None:
        look(watcher, pid)
        if seen.exists() and any(command.startswith("-E") for command in watcher._python.values()):
            seen.write_text("")  # opens the program's read
            seen.unlink()

    monkeypatch.setattr(session._Watcher, "look", looks)
    monkeypatch.setattr(session, "_UNSEEN_AFTER_SECONDS", 0.0)
    code = run(
        f"""
        import subprocess, sys, torch
        child = subprocess.Popen([sys.executable, "-E", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        open({str(seen)!r}).read()
        child.communicate()
        """
    )
    assert code == 3
    assert "a Python process without our environment: -E -c" in run.stderr


def test_a_journal_that_cannot_be_written_is_said_once_and_the_program_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_file: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal, "_write", full)
    lost = journal.Journal(str(tmp_path))
    lost.torch("2.13.0")
    lost.end()
    assert capfd.readouterr().err.count("is lost from here: [Errno 28] No space left on device") == 1


def test_the_environments_own_sitecustomize_runs_and_its_absence_is_no_error(run: Run, tmp_path: Path) -> None:
    assert run("import sys; print('inject' in str(sys.path), 'sitecustomize' in sys.modules)") == 3
    assert (run.stdout, "sitecustomize" in run.stderr) == ("False False\n", False)
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('own')\n")
    monkeypatched = os.environ | {"PYTHONPATH": str(own)}
    command = (sys.executable, "-m", "diagnostics.fxprobe", "--", str(tmp_path / "program.py"))
    shown = subprocess.run(command, cwd=ROOT, env=monkeypatched, capture_output=True, text=True, timeout=200, check=False).stdout
    assert shown == "own\nown\nFalse True\n"  # once in the command, once in the program


def test_a_directory_that_cannot_be_written_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(f"import torch; {TRACE}")
    command = (sys.executable, "-m", "diagnostics.fxprobe", "--", str(tmp_path / "program.py"))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd="/proc", env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


def test_a_program_that_observes_itself_is_observed_as_well(run: Run) -> None:
    code = run(
        f"""
        import torch
        from diagnostics.observe import observed
        with observed() as log:
            {TRACE}
        print([seen.count for seen in log.observations()])
        {TRACE}
        """
    )
    assert (code, run.stdout, run.traced()) == (0, "[1]\n", [2])


def test_a_limit_set_in_main_that_the_trainer_thread_does_not_see(run: Run) -> None:
    code = run(
        """
        import threading, torch
        torch._dynamo.config.recompile_limit = 64
        @torch.compile(backend="eager", dynamic=False)
        def step(x):
            return x + 1
        def train():
            for size in range(1, 12):
                step(torch.ones(size))
        thread = threading.Thread(target=train, name="trainer")
        thread.start()
        thread.join()
        """
    )
    if SETTINGS_ARE_PER_THREAD:
        assert (code, run.found) == (1, [("error", "F7"), ("hazard", "F9")])
        finding = run.report["findings"][1]
        assert "recompile_limit is 8 in trainer, which compiles; MainThread set it to 64" in finding["what"]
    else:
        assert (code, run.found) == (0, [])


def test_patches_that_end_out_of_order_leave_a_setting_changed_where_it_is_shared(run: Run) -> None:
    run(
        """
        import threading, torch, torch._dynamo
        first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
        def first():
            with torch._dynamo.config.patch(recompile_limit=20):
                first_in.set()
                second_in.wait(60)
            first_out.set()
        def second():
            first_in.wait(60)
            with torch._dynamo.config.patch(recompile_limit=30):
                second_in.set()
                first_out.wait(60)
        threads = [threading.Thread(target=act) for act in (first, second)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        """
    )
    assert run.found == ([] if SETTINGS_ARE_PER_THREAD else [("error", "F10")])


def test_a_lazy_backward_compile_is_told_with_its_thread(run: Run) -> None:
    code = run(
        """
        import threading, torch
        compiled = torch.compile(lambda x: x * 2, backend="aot_eager")
        loss = compiled(torch.ones(2, requires_grad=True)).sum()
        thread = threading.Thread(target=loss.backward, name="worker")
        thread.start()
        thread.join()
        """
    )
    graphs = [seen for seen in run.report["processes"][0]["observations"] if seen["kind"] == "graph" and seen["fields"]["lazy"]]
    assert (code, [(seen["name"], seen["threads"]) for seen in graphs]) == (0, [("backward", ["worker"])])


def test_a_model_shared_by_a_thread_pool_compiles_more_than_once(run: Run) -> None:
    run(
        """
        import threading, torch
        from concurrent.futures import ThreadPoolExecutor
        model = torch.compile(torch.nn.Linear(4, 4), dynamic=True, backend="eager")
        barrier = threading.Barrier(2)
        def serve(rows):
            barrier.wait()
            model(torch.ones(rows, 4, requires_grad=rows > 2))
        with ThreadPoolExecutor(2, "pool") as pool:
            list(pool.map(serve, (2, 3)))
        """
    )
    (finding,) = [finding for finding in run.report["findings"] if finding["id"] == "F12"]
    assert finding["who"] == ["pool_0", "pool_1"]


def test_export_beside_inference_is_a_hazard_of_the_two_threads(run: Run) -> None:
    code = run(
        """
        import threading, torch
        class Exported(torch.nn.Module):
            def forward(self, x):
                thread = threading.Thread(target=lambda: served(torch.ones(1, 1)), name="inference")
                thread.start()
                thread.join()
                return x + 1
        served = torch.nn.Linear(1, 1)
        export = threading.Thread(target=lambda: torch.export.export(Exported(), (torch.ones(1),), strict=False), name="export")
        export.start()
        export.join()
        """
    )
    assert code == 3
    assert ["export", "inference"] in [finding["who"] for finding in run.report["findings"] if finding["id"] == "F4"]


def test_a_choice_by_is_compiling_beside_another_thread_s_compile(run: Run) -> None:
    code = run(
        """
        import threading, torch
        answers = []
        def choose():
            answers.append(torch.compiler.is_compiling())
        def backend(graph, inputs):
            thread = threading.Thread(target=choose, name="innocent")
            thread.start()
            thread.join()
            return graph
        torch.compile(torch.sin, backend=backend)(torch.ones(1))
        print(answers)
        """
    )
    compiling_is_shared = run.stdout == "[True]\n"
    assert compiling_is_shared == IS_COMPILING_IS_SHARED
    assert (code, run.found) == ((3, [("hazard", "F11")]) if compiling_is_shared else (0, []))


def test_compiled_functions_told_to_run_uncompiled_are_a_hazard(run: Run) -> None:
    code = run(
        """
        import threading, torch
        compiled = torch.compile(torch.sin, backend="eager")
        compiled(torch.ones(1))
        thread = threading.Thread(target=compiled, args=(torch.ones(1, dtype=torch.int32),))
        thread.start()
        thread.join()
        with torch.compiler.set_stance("force_eager"):
            compiled(torch.ones(1))
        """
    )
    assert (code, ("hazard", "stance") in run.found) == (3, True)


def test_waiting_for_the_compile_lock_is_told_with_its_holder(run: Run) -> None:
    run(
        """
        import threading, torch, torch._dynamo.convert_frame as convert_frame
        held, go = threading.Event(), threading.Event()
        def holder():
            with convert_frame.compile_lock:
                held.set()
                go.wait(60)
        thread = threading.Thread(target=holder, name="holder")
        thread.start()
        held.wait(60)
        threading.Timer(0.05, go.set).start()
        with convert_frame.compile_lock:
            pass
        """
    )
    locks = [seen for seen in run.report["processes"][0]["observations"] if seen["kind"] == "lock"]
    waits = [(seen["threads"], seen["duration_seconds"] > 0.01) for seen in locks if seen["fields"]["role"] == "waited"]
    assert waits == [(["holder", "MainThread"], True)]
    assert "waited for holder" in run.stderr


def test_the_page_says_what_the_terminal_says_and_escapes_the_program(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    run(
        """
        import torch
        torch.compiler.set_stance("force_eager")
        exec(compile("torch.fx.symbolic_trace(torch.nn.Identity())", "<b>here</b>", "exec"))
        """,
        options=("--html", str(page)),
    )
    text = page.read_text()
    assert "info stance" in text.replace("</b>", "").replace("<b>", "")
    assert "&lt;b&gt;here&lt;/b&gt;" in text
    assert "<script" not in text


def test_a_deadlock_is_named_while_the_program_hangs_and_when_it_was_killed(run: Run) -> None:
    """The seams of F8 with stand-ins: a thread that Python did not start waits for the lock of one inside autograd."""
    code = run(
        """
        import ctypes, os, signal, threading, torch, torch._dynamo.convert_frame as convert_frame
        held, waiting = threading.Event(), threading.Event()

        def _engine_run_backward():
            held.set()
            waiting.wait(2)

        def compiles():
            with convert_frame.compile_lock:
                _engine_run_backward()
            os.kill(os.getpid(), signal.SIGKILL)

        @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        def device_thread(_argument):
            held.wait(60)
            with convert_frame.compile_lock:
                pass

        threading.Thread(target=compiles, name="compiling").start()
        native = ctypes.c_ulong()
        ctypes.CDLL(None).pthread_create(ctypes.byref(native), None, device_thread, None)
        threading.Event().wait(60)
        """
    )
    assert code == 137
    (finding,) = [finding for finding in run.report["findings"] if finding["id"] == "F8"]
    assert finding["severity"] == "error"
    assert finding["who"][0] == "compiling"
    assert finding["who"][1].startswith("native thread")


def test_a_module_that_one_thread_cannot_trace_is_its_own_affair(run: Run) -> None:
    code = run(
        """
        import torch
        other = torch.nn.Linear(2, 2)
        class Uses(torch.nn.Module):
            def forward(self, x):
                return other(x)
        try:
            torch.fx.symbolic_trace(Uses())
        except NameError:
            print("cannot")
        """
    )
    assert (code, run.found, run.stdout) == (0, [], "cannot\n")


def test_a_compiled_module_of_torch_is_told_by_its_class_and_the_program_s_line(run: Run) -> None:
    run(
        """
        import torch
        torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
        """
    )
    (seen,) = [seen for seen in run.report["processes"][0]["observations"] if seen["kind"] == "compile"]
    assert seen["name"] == "Linear"
    assert "program.py:3" in seen["where"][0]


def test_a_closed_standard_error_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(f"import torch; {TRACE}; print('done')")
    command = f"{sys.executable} -m diagnostics.fxprobe --progress 0.2 --json {tmp_path}/r.json -- {tmp_path}/program.py 2>&-"
    done = subprocess.run(command, shell=True, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert json.loads((tmp_path / "r.json").read_text())["program_exit_code"] == 0


@pytest.mark.parametrize("to_group", [True, False])
def test_a_signal_reaches_the_program_once(tmp_path: Path, to_group: bool) -> None:
    (tmp_path / "program.py").write_text(
        "import signal, sys\n"
        "for number in (signal.SIGUSR1, signal.SIGUSR2):\n"
        "    signal.signal(number, lambda number, _: print(signal.Signals(number).name, flush=True))\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = (sys.executable, "-m", "diagnostics.fxprobe", "--progress", "0", "--", str(tmp_path / "program.py"))
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as probe:
        assert probe.stdin is not None
        assert probe.stdout is not None
        assert probe.stdout.readline() == "ready\n"
        (os.killpg if to_group else os.kill)(probe.pid, signal.SIGUSR1)
        assert probe.stdout.readline() == "SIGUSR1\n"
        os.kill(probe.pid, signal.SIGUSR2)  # passed on after everything that came before it
        assert probe.stdout.readline() == "SIGUSR2\n"
        rest, _ = probe.communicate()
    assert (rest, probe.returncode) == ("", 3)


def test_a_program_with_a_module_of_our_name_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "diagnostics.py").touch()
    assert run("import diagnostics") == 2
    assert "a module of its own named diagnostics" in run.stderr


@pytest.mark.parametrize("options", [("--stall", "nan"), ("--progress", "-1"), ("--json", "/"), ("--html", "/no/such/place")])
def test_an_option_that_cannot_work_is_refused_at_the_start(run: Run, options: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as stop:
        run("print('must not run')", options=options)
    assert stop.value.code == 2


def test_a_stall_that_ended_is_no_error(run: Run) -> None:
    code = run(
        """
        import threading, time, torch
        lock = threading.Lock()
        def hold():
            with lock:
                time.sleep(5)
        def want():
            with lock:
                pass
        threads = [threading.Thread(target=act) for act in (hold, want)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        """,
        options=("--stall", "2"),
    )
    assert code == 0
    assert [severity for severity, _ in run.found] == ["info"]
