"""Laws of the probes on whole programs: what they explain, and what they know to be innocent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers_fxprobe import Run

SETTINGS_ARE_PER_THREAD = hasattr(torch._dynamo.config, "_hash_dirty_var")
IS_COMPILING_IS_SHARED = hasattr(torch.compiler, "_compile_session_context")  # of Dynamo's compiles, not of exports only


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    return Run(tmp_path, capfd)


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


@pytest.mark.parametrize("ends", [False, True])
def test_a_wait_for_the_lock_is_a_deadlock_unless_it_ends(run: Run, ends: bool) -> None:
    """The seams of F8 with stand-ins: a thread that Python did not start waits for the lock of one inside autograd."""
    code = run(
        """
        import ctypes, os, signal, sys, threading, time, torch, torch._dynamo.convert_frame as convert_frame
        ends, held = ENDS, threading.Event()

        def _engine_run_backward():
            held.set()
            while not any(is_acquiring(frame) for frame in sys._current_frames().values()):
                time.sleep(0.01)

        def is_acquiring(frame):  # the watched lock has told the probes and waits for the real one
            return frame.f_code.co_filename.endswith("patch.py") and frame.f_code.co_name == "<lambda>"

        def compiles():
            with convert_frame.compile_lock:
                _engine_run_backward()
                if not ends:
                    os.kill(os.getpid(), signal.SIGKILL)

        @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        def device_thread(_argument):
            held.wait(60)
            with convert_frame.compile_lock:
                pass

        threading.Thread(target=compiles, name="compiling").start()
        native = ctypes.c_ulong()
        ctypes.CDLL(None).pthread_create(ctypes.byref(native), None, device_thread, None)
        ctypes.CDLL(None).pthread_join(native, None)
        """.replace("ENDS", str(ends))
    )
    assert code == (0 if ends else 137)
    found = [finding for finding in run.report["findings"] if finding["id"] == "F8"]
    assert [(finding["severity"], finding["who"][0]) for finding in found] == ([] if ends else [("error", "compiling")])
    assert all(finding["who"][1].startswith("native thread") for finding in found)


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
