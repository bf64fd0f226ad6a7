"""Laws of the probes on whole programs: what they find and explain, and what they know to be innocent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers_fxprobe import Run, Seen, pipe_that_opens_after, run_together

from dflash.fx import seams

FLAG_IS_SHARED = seams.tracing_state().flag_scope == "process"
SETTINGS_ARE_PER_THREAD = hasattr(torch._dynamo.config, "_hash_dirty_var")
IS_COMPILING_IS_SHARED = hasattr(torch.compiler, "_compile_session_context")  # of Dynamo's compiles, not of exports only


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    return Run(tmp_path, capfd)


@pytest.fixture(scope="module")
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """By test, what was seen of the program that stands above it."""
    mine = [item for item in request.session.items if item.path == request.path]
    marks = {item.name: mark for item in mine if (mark := item.get_closest_marker("program")) is not None}
    return run_together(tmp_path_factory.mktemp("programs"), {name: mark.args[0] for name, mark in marks.items()})


@pytest.fixture
def seen(request: pytest.FixtureRequest, together: dict[str, Seen]) -> Seen:
    return together[request.node.name]


def recipe(name: str, *expected: object) -> object:
    """A case whose program makes one failure of the catalogue happen."""
    text = f"from diagnostics.stress import scenarios; scenarios.main([{name!r}])"
    return pytest.param(name, *expected, marks=pytest.mark.program(text), id=name)


@pytest.mark.parametrize(
    ("name", "failure", "severity", "code"),
    [
        recipe("F3", "F3", "error", 1),
        recipe("F3-shared", "F3", "error", 1),
        recipe("F4", "F4", "hazard", 3),
        recipe("F5", "F5", "error", 1),
    ],
)
def test_what_every_torch_does_wrong_is_found_with_its_threads(
    seen: Seen, name: str, failure: str, severity: str, code: int
) -> None:
    assert f"{name} happened" in seen.stdout
    (finding,) = [finding for finding in seen.findings if finding.id == failure]
    assert (seen.code, finding.severity, finding.who) == (code, severity, ("tracing", "innocent"))
    assert any("scenarios.py" in line for line in (*finding.where, *finding.others))
    assert "threads: tracing, innocent" in seen.report


@pytest.mark.parametrize("name", [recipe("F1"), recipe("F2"), recipe("F6")])
def test_a_shared_flag_is_found_where_torch_shares_it_and_not_elsewhere(seen: Seen, name: str) -> None:
    found = [finding for finding in seen.findings if finding.id == name and {"tracing", "innocent"} == set(finding.who)]
    assert [finding.severity for finding in found] == (["error"] if FLAG_IS_SHARED else [])
    assert seen.code == (1 if FLAG_IS_SHARED or name == "F6" else 0)  # overlapping traces leak a patch on every torch


@pytest.mark.parametrize("name", [recipe("clean")])
def test_a_program_that_does_nothing_wrong_is_clean(seen: Seen, name: str) -> None:
    assert f"{name} did not happen" in seen.stdout
    assert (seen.code, seen.found) == (0, [])


@pytest.mark.program(
    """
    import threading, torch
    from torch.fx.experimental.proxy_tensor import make_fx

    @torch.compile(backend="eager")
    def f(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    def work():
        f(torch.ones(2))
        f(torch.ones(2, dtype=torch.int32))
        for _ in range(3):
            make_fx(torch.sin)(torch.ones(1))

    thread = threading.Thread(target=work, name="worker")
    thread.start()
    thread.join()
    """
)
def test_traces_and_compiles_are_counted_by_thread(seen: Seen) -> None:
    assert seen.code == 0
    compiles = [one for one in seen.of_kind("compile") if one.name == "f"]
    assert sum(one.count for one in compiles) == 2
    assert [one.fields["recompile"] for one in compiles] == [False, True]
    assert all(len(one.fields["graph_breaks"]) == 1 for one in compiles)
    (traces,) = [trace for trace in seen.of_kind("trace") if "work" in trace.where[-1]]
    assert (traces.count, traces.fields) == (3, {"inside_dynamo": False})
    assert {each.threads for each in (*compiles, traces)} == {("worker",)}


@pytest.mark.program(
    """
    import torch
    torch._dynamo.config.recompile_limit = 2

    @torch.compile(backend="eager", dynamic=False)
    def f(x):
        return x + 1

    for size in range(2, 6):
        f(torch.ones(size))
    """
)
def test_the_recompile_limit_is_a_fallback(seen: Seen) -> None:
    (finding,) = seen.findings
    assert (seen.code, finding.id, finding.severity) == (1, "F7", "error")
    assert "f reached the recompile limit" in finding.what


@pytest.mark.program(
    """
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx
    f = torch.compile(torch.sin, backend="eager")
    f(torch.ones(1))
    try:
        make_fx(lambda x: f(x))(torch.ones(1))
    except RuntimeError:
        pass
    """
)
def test_a_trace_of_a_compiled_function_in_one_thread_is_no_race(seen: Seen) -> None:
    assert (seen.code, [(finding.id, finding.who) for finding in seen.findings]) == (1, [("F1-own", ("MainThread",))])


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


@pytest.mark.program(
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
def test_a_limit_set_in_main_that_the_trainer_thread_does_not_see(seen: Seen) -> None:
    if SETTINGS_ARE_PER_THREAD:
        assert (seen.code, seen.found) == (1, [("error", "F7"), ("hazard", "F9")])
        assert "recompile_limit is 8 in trainer, which compiles; MainThread set it to 64" in seen.findings[1].what
    else:
        assert (seen.code, seen.found) == (0, [])


@pytest.mark.program(
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
def test_patches_that_end_out_of_order_leave_a_setting_changed_where_it_is_shared(seen: Seen) -> None:
    assert seen.found == ([] if SETTINGS_ARE_PER_THREAD else [("error", "F10")])


@pytest.mark.program(
    """
    import threading, torch
    compiled = torch.compile(lambda x: x * 2, backend="aot_eager")
    loss = compiled(torch.ones(2, requires_grad=True)).sum()
    thread = threading.Thread(target=loss.backward, name="worker")
    thread.start()
    thread.join()
    """
)
def test_a_lazy_backward_compile_is_told_with_its_thread(seen: Seen) -> None:
    graphs = [(graph.name, graph.threads) for graph in seen.of_kind("graph") if graph.fields["lazy"]]
    assert (seen.code, graphs) == (0, [("backward", ("worker",))])


@pytest.mark.program(
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
def test_a_model_shared_by_a_thread_pool_compiles_more_than_once(seen: Seen) -> None:
    (finding,) = [finding for finding in seen.findings if finding.id == "F12"]
    assert finding.who == ("pool_0", "pool_1")


@pytest.mark.program(
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
def test_export_beside_inference_is_a_hazard_of_the_two_threads(seen: Seen) -> None:
    assert seen.code == 3
    assert ("export", "inference") in [finding.who for finding in seen.findings if finding.id == "F4"]


@pytest.mark.program(
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
def test_a_choice_by_is_compiling_beside_another_thread_s_compile(seen: Seen) -> None:
    compiling_is_shared = seen.stdout == "[True]\n"
    assert compiling_is_shared == IS_COMPILING_IS_SHARED
    assert (seen.code, seen.found) == ((3, [("hazard", "F11")]) if compiling_is_shared else (0, []))


@pytest.mark.program(
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
def test_compiled_functions_told_to_run_uncompiled_are_a_hazard(seen: Seen) -> None:
    assert (seen.code, ("hazard", "stance") in seen.found) == (3, True)


# The watched lock has told the probes, and waits for the real one. The limit is for probes that are not there.
UNTIL_ACQUIRING = """
    def until_acquiring():
        end = time.monotonic() + 60
        while not any(map(is_in_acquire, sys._current_frames().values())) and time.monotonic() < end:
            time.sleep(0.001)

    def is_in_acquire(frame):
        return frame.f_code.co_filename.endswith("patch.py") and frame.f_code.co_name == "<lambda>"
"""


@pytest.mark.program(
    f"""
    import sys, threading, time, torch, torch._dynamo.convert_frame as convert_frame
    held = threading.Event()
    {UNTIL_ACQUIRING.strip()}
    def holder():
        with convert_frame.compile_lock:
            held.set()
            until_acquiring()
            time.sleep(0.02)  # what the other waits at least
    threading.Thread(target=holder, name="holder").start()
    held.wait(60)
    with convert_frame.compile_lock:
        pass
    """
)
def test_waiting_for_the_compile_lock_is_told_with_its_holder(seen: Seen) -> None:
    waits = [lock for lock in seen.of_kind("lock") if lock.fields["role"] == "waited"]
    assert [(wait.threads, wait.duration_seconds > 0.01) for wait in waits] == [(("holder", "MainThread"), True)]
    assert "waited for holder" in seen.report


DEADLOCK = f"""
    import ctypes, os, signal, sys, threading, time, torch, torch._dynamo.convert_frame as convert_frame
    held = threading.Event()
    {UNTIL_ACQUIRING.strip()}
    def _engine_run_backward():
        held.set()
        until_acquiring()

    def compiles():
        with convert_frame.compile_lock:
            _engine_run_backward()
            if not ENDS:
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
"""


@pytest.mark.parametrize(
    "ends", [pytest.param(ends, marks=pytest.mark.program(DEADLOCK.replace("ENDS", str(ends)))) for ends in (False, True)]
)
def test_a_wait_for_the_lock_is_a_deadlock_unless_it_ends(seen: Seen, ends: bool) -> None:
    """The seams of F8 with stand-ins: a thread that Python did not start waits for the lock of one inside autograd."""
    assert seen.code == (0 if ends else 137)
    found = [finding for finding in seen.findings if finding.id == "F8"]
    assert [(finding.severity, finding.who[0]) for finding in found] == ([] if ends else [("error", "compiling")])
    assert all(finding.who[1].startswith("native thread") for finding in found)


@pytest.mark.program(
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
def test_a_module_that_one_thread_cannot_trace_is_its_own_affair(seen: Seen) -> None:
    assert (seen.code, seen.found, seen.stdout) == (0, [], "cannot\n")


@pytest.mark.program(
    """
    import torch
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    """
)
def test_a_compiled_module_of_torch_is_told_by_its_class_and_the_program_s_line(seen: Seen) -> None:
    (compiled,) = seen.of_kind("compile")
    assert compiled.name == "Linear"
    assert compiled.where[0].endswith(".py:2 <module>")


def test_a_stall_that_ended_is_no_error(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = pipe_that_opens_after("_check_hang", lambda watcher: bool(watcher._hangs), tmp_path, monkeypatch)
    code = run(
        f"""
        import threading, torch
        lock, held = threading.Lock(), threading.Event()
        def hold():
            with lock:
                held.set()
                open({str(go_on)!r}).read()
        def want():
            held.wait()
            with lock:
                pass
        threads = [threading.Thread(target=act) for act in (hold, want)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        """,
        options=("--stall", "1"),
    )
    assert code == 0
    assert [severity for severity, _ in run.found] == ["info"]
