"""Laws of counting calls that should have run compiled and did not: every one of them, and no other."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from torch.utils._python_dispatch import TorchDispatchMode

from diagnostics.findings import conclude
from diagnostics.observe import observed
from diagnostics.records import Log

Function = Callable[..., Any]
ONES = {size: torch.ones(size) for size in range(1, 9)}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counted(log: Log) -> dict[tuple[str, str], int]:
    """Uncompiled calls by function and thread."""
    calls: dict[tuple[str, str], int] = {}
    for seen in log.observations():
        if seen.kind == "fallback":
            key = seen.fields["function"].rpartition(".")[2], seen.threads[0]
            calls[key] = calls.get(key, 0) + seen.count
    return calls


def errors(log: Log) -> list[tuple[str, tuple[str, ...], int]]:
    return [(found.id, found.who, found.count) for found in conclude(log.observations()) if found.severity == "error"]


def in_thread(name: str, act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act, name=name)
    thread.start()
    thread.join()


def limited(sizes: tuple[int, ...], function: Function, *, limit: int = 1) -> None:
    with torch._dynamo.config.patch(recompile_limit=limit):
        compiled = torch.compile(function, backend="eager", dynamic=False)
        for size in sizes:
            compiled(ONES[size])


def test_calls_beyond_the_recompile_limit_are_counted_and_those_that_have_a_version_are_not() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with observed() as log:
        limited((2, 3, 2, 4, 3, 2), f)
        f(ONES[5])  # not compiled, and not meant to be
    assert counted(log) == {("f", "MainThread"): 3}
    assert errors(log) == [("F7", ("MainThread",), 3)]


def test_each_thread_has_a_count_of_its_own() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    compiled = torch.compile(f, backend="eager", dynamic=False)
    with observed() as log:
        limited((2, 3), f)
        in_thread("worker", lambda: [compiled(ONES[size]) for size in (4, 2, 4, 5)])
    assert counted(log) == {("f", "MainThread"): 1, ("f", "worker"): 3}


def test_what_follows_a_graph_break_is_counted_under_its_own_name() -> None:
    modes = {"mode": 0}

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y + modes["mode"]

    with observed() as log, torch._dynamo.config.patch(recompile_limit=1):
        compiled = torch.compile(f, backend="eager", dynamic=False)
        for modes["mode"] in (0, 1, 0, 2):
            compiled(ONES[2])
    ((name, _), calls), *others = counted(log).items()
    assert (name.startswith("torch_dynamo_resume_in_f"), calls, others) == (True, 2, [])


def test_functions_that_reached_the_limit_are_findings_of_their_own() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def g(x: torch.Tensor) -> torch.Tensor:
        return x + 2

    with observed() as log:
        limited((2, 3, 4), f)
        limited((2, 3), g)
    found = [
        (finding.what.rpartition("because ")[2].rpartition(".")[2], finding.count) for finding in conclude(log.observations())
    ]
    assert found == [("f reached the recompile limit", 2), ("g reached the recompile limit", 1)]


def test_a_function_whose_error_was_suppressed_is_counted_from_then_on() -> None:
    def backend(_graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Function:
        if inputs[0].dtype == torch.int32:
            raise ZeroDivisionError("of the backend")
        return lambda x: (x + 1,)

    @torch.compile(backend=backend)
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with observed() as log, torch._dynamo.config.patch(suppress_errors=True):
        for _ in range(2):
            f(ONES[2])
        for dtype in (torch.int32, torch.int32, torch.float32):  # the last had a version, which is given up as well
            f(ONES[2].to(dtype))
    assert errors(log) == [("skipped", ("MainThread",), 3)]
    assert "f failed to compile (ZeroDivisionError)" in conclude(log.observations())[0].what


def test_an_error_that_the_program_gets_is_no_uncompiled_call() -> None:
    def backend(_graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Function:
        raise ZeroDivisionError("of the backend")

    with observed() as log, pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        torch.compile(lambda x: x + 1, backend=backend)(ONES[2])
    assert counted(log) == {}


def test_a_stance_of_another_thread_is_an_error_of_it_and_one_s_own_is_not() -> None:
    @torch.compile(backend="eager")
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with observed() as log:
        f(ONES[2])
        with torch.compiler.set_stance("force_eager"):
            in_thread("victim", lambda: [f(ONES[2]) for _ in range(3)])
            f(ONES[2])
        f(ONES[2])
    assert counted(log) == {("f", "victim"): 3, ("f", "MainThread"): 1}
    assert errors(log) == [("stance", ("victim",), 3)]


def test_a_stance_that_was_set_before_is_seen() -> None:
    f = torch.compile(lambda x: x + 1, backend="eager")
    with torch.compiler.set_stance("force_eager"), observed() as log:
        f(ONES[2])
    assert list(counted(log).values()) == [1]


def test_eager_on_recompile_counts_the_calls_without_a_version() -> None:
    @torch.compile(backend="eager", dynamic=False)
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with observed() as log:
        f(ONES[2])
        with torch.compiler.set_stance("eager_on_recompile"):
            for size in (2, 3, 3, 2):
                f(ONES[size])
    assert counted(log) == {("f", "MainThread"): 2}


class Mode(TorchDispatchMode):
    """Operators pass through Python."""

    def __torch_dispatch__(
        self, operator: Function, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        del types
        return operator(*args, **(kwargs or {}))


class Compiled:
    """A compiled function, its calls and how many of them ran compiled."""

    def __init__(self) -> None:
        self.calls = self.ran_compiled = 0

        def backend(graph: torch.fx.GraphModule, _inputs: object) -> Function:
            def run(*inputs: object) -> object:
                self.ran_compiled += 1
                return graph.forward(*inputs)

            return run

        def f(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        self._function = torch.compile(f, backend=backend, dynamic=False)

    def __call__(self, size: int = 2) -> None:
        self.calls += 1
        self._function(ONES[size])


@pytest.mark.parametrize("compiled_before", [False, True])
def test_calls_that_a_dispatch_mode_keeps_from_running_compiled_are_counted_and_no_others(*, compiled_before: bool) -> None:
    f = Compiled()
    with observed() as log:
        if compiled_before:
            f()
        with Mode():
            f()
            f(3)
            f()
        for size in (2, 3, 2):
            f(size)
    uncompiled = f.calls - f.ran_compiled
    is_for_life = not f.ran_compiled - compiled_before
    assert uncompiled == (6 if is_for_life else 3)  # up to torch 2.13, from then on
    assert counted(log) == {("f", "MainThread"): uncompiled}
    (finding,) = [finding for finding in conclude(log.observations()) if finding.severity != "info"]
    assert (finding.id, finding.severity) == (("skipped", "error") if is_for_life else ("mode", "hazard"))
    assert (finding.count, "TorchDispatchMode" in finding.what) == (uncompiled, True)


def test_a_function_that_dynamo_leaves_alone_inside_a_dispatch_mode_is_no_uncompiled_call() -> None:
    """A mode's own code runs without it: what is compiled there runs compiled, and what has no tensors is not compiled anyway."""
    inner = Compiled()
    without_tensors = torch.compile(lambda: 1, backend="eager")

    class Calls(Mode):
        def __torch_dispatch__(self, *given: Any, **named: Any) -> object:
            inner()
            without_tensors()
            return super().__torch_dispatch__(*given, **named)

    with observed() as log, Calls():
        ONES[2] + 1
    assert (inner.calls, inner.ran_compiled) == (1, 1)
    assert counted(log) == {}


@torch.compiler.disable
def disabled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_graph_breaks_disabled_functions_and_plain_calls_are_innocent() -> None:
    counter = torch._dynamo.testing.CompileCounter()

    def f(x: torch.Tensor) -> torch.Tensor:
        y = disabled(x + 1)
        torch._dynamo.graph_break()
        return y * 3

    compiled = torch.compile(f, backend=counter)
    with observed() as log:
        for _ in range(3):
            compiled(ONES[2])
        f(ONES[2])
        torch.compile(torch.nn.Linear(2, 2), backend=counter)(ONES[2])
    assert counter.frame_count >= 3
    assert (counted(log), conclude(log.observations())) == ({}, ())


def test_a_function_that_breaks_in_a_loop_is_told_and_is_no_error() -> None:
    @torch.compile(backend="eager")
    def f(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + 1
            torch._dynamo.graph_break()
        return x

    with observed() as log:
        f(ONES[2])
    (finding,) = conclude(log.observations())
    assert (finding.id, finding.severity) == ("skipped", "info")


def test_nothing_of_the_counting_stays_in_python() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    asked_in_each_compiled_call = torch._dynamo.eval_frame._callback_from_stance
    torchs_code = asked_in_each_compiled_call.__code__
    with observed() as log:
        limited((2, 3), f)
        assert sys.getprofile() is None  # between compiled calls
    assert asked_in_each_compiled_call.__code__ is torchs_code
    limited((4, 5), f)
    assert sys.getprofile() is None
    assert counted(log) == {("f", "MainThread"): 1}
    if sys.version_info >= (3, 12):
        assert [sys.monitoring.get_tool(number) for number in (3, 4)] == [None, None]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="from Python 3.12 a profiler is no hindrance")
def test_a_profiler_of_the_program_keeps_its_place_and_what_is_not_counted_is_said() -> None:
    def profiler(_frame: object, _event: str, _argument: object) -> None:
        return

    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with observed() as log:
        sys.setprofile(profiler)
        try:
            limited((2, 3), f)
            assert sys.getprofile() is profiler
        finally:
            sys.setprofile(None)
    assert any("while a profiler of the program runs" in seen.name for seen in log.observations() if seen.kind == "not_observed")


def test_an_exception_of_an_uncompiled_call_is_the_program_s() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 4:
            raise ZeroDivisionError("of the program")
        return x + 1

    with observed() as log, pytest.raises(ZeroDivisionError, match="of the program"):
        limited((2, 3, 4), f)
    assert sys.getprofile() is None
    assert counted(log) == {("f", "MainThread"): 2}
