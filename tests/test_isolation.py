"""Laws of thread-isolated tracing. Threads stop at park points; `isolated` replaced by nothing makes each of these fail."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.fx._symbolic_trace as symbolic_trace
from helpers_isolation import Parked, Parks, X, made, same, snapshot, targets, traced
from torch import Tensor, nn
from torch._dynamo import convert_frame
from torch.fx.experimental.proxy_tensor import make_fx

import dflash.fx
from dflash.fx import per_thread, seams
from dflash.fx.isolation import IsolationError, is_isolated
from dflash.fx.repair import repair
from diagnostics import patch

STATES = [(module, name) for module, names in per_thread.STATE.items() for name in names]


@pytest.fixture
def isolation() -> Iterator[None]:
    with dflash.fx.isolated():
        yield


@pytest.mark.usefixtures("isolation")
@pytest.mark.parametrize("trace", [traced, made])
def test_a_compiled_call_beside_a_trace_runs_compiled(trace: Callable[..., object]) -> None:
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        return lambda *arguments: (graphs.append(1), graph.forward(*arguments))[1]

    with Parked(trace):
        compiled = torch.compile(lambda x: x * 3, backend=backend)
        assert compiled(X).tolist() == [3, 3]
    assert graphs == [1]


@pytest.mark.skipif(seams.tracing_state().flag_scope == "thread", reason="this torch has a flag for each thread")
def test_compiled_functions_made_before_follow() -> None:
    compiled = torch.compile(lambda x: x * 5, backend="eager")
    compiled(X)
    with dflash.fx.isolated(), Parked(made):
        assert compiled(X).tolist() == [5, 5]


@pytest.mark.usefixtures("isolation")
def test_a_module_call_beside_a_trace_is_not_traced() -> None:
    shared = nn.Linear(2, 2)
    with Parked(lambda park: traced(park, shared)) as tracing:
        assert type(shared(X)) is Tensor
        assert type(nn.Linear(2, 2)(X)) is Tensor
        assert type(shared.weight) is nn.Parameter
    expected = torch.fx.Tracer().trace(Parks(lambda: None, shared))
    assert targets(tracing.result) == targets(expected)
    assert "get_attr weight" in targets(expected)


@pytest.mark.usefixtures("isolation")
def test_a_wrapper_that_somebody_put_on_module_calls_is_kept_beside_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    original, seen = nn.Module.__call__, []

    def counting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(type(module).__name__)
        return original(module, *args, **kwargs)

    with monkeypatch.context() as patching:
        patching.setattr(nn.Module, "__call__", counting)
        with Parked(traced):
            assert nn.ReLU()(X).tolist() == [1, 1]
        assert nn.Module.__call__ is counting
    assert seen == ["ReLU"]


@pytest.mark.usefixtures("isolation")
def test_what_stands_for_module_calls_beside_a_trace_looks_like_the_original_in_a_traceback() -> None:
    original = nn.Module.__call__
    with Parked(traced):
        standing = nn.Module.__call__
    assert standing is not original
    kept = ("co_filename", "co_name", "co_qualname", "co_firstlineno")
    assert [getattr(standing.__code__, name) for name in kept] == [getattr(original.__code__, name) for name in kept]
    lines = [{line for *_, line in code.co_lines()} for code in (original.__code__, standing.__code__)]
    assert lines[0] == lines[1]


@pytest.mark.usefixtures("isolation")
def test_traces_of_two_threads_record_what_they_would_alone() -> None:
    inner = nn.Linear(2, 2)
    alone = targets(traced(lambda: None, inner))
    with Parked(lambda park: traced(park, inner)) as first, Parked(lambda park: traced(park, inner)) as second:
        assert "add" in make_fx(lambda x: x + 1)(X).code
        first.finish()
    assert targets(first.result) == targets(second.result) == alone


@pytest.mark.usefixtures("isolation")
@pytest.mark.parametrize("trace", [traced, made])
def test_traces_that_end_in_the_order_in_which_they_began_leave_nothing(trace: Callable[..., object]) -> None:
    with Parked(trace) as first, Parked(trace):
        first.finish()
        assert nn.Module.__call__ is not symbolic_trace._orig_module_call  # one still traces
    assert seams.leaks(seams.tracing_state()) == []
    assert nn.Module.__call__ is symbolic_trace._orig_module_call


@pytest.mark.usefixtures("isolation")
def test_a_module_compiled_beside_a_trace_stays_compiled() -> None:
    runs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        return lambda *arguments: (runs.append(1), graph.forward(*arguments))[1]

    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with Parked(traced):
        compiled = torch.compile(module, backend=backend)
        compiled(X)
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(X)
    assert runs == [1, 1]


@pytest.mark.usefixtures("isolation")
@pytest.mark.parametrize(("module_name", "name"), STATES)
def test_what_a_thread_sets_no_other_sees(module_name: str, name: str) -> None:
    module = __import__(module_name, fromlist=["_"])
    if not isinstance(vars(type(module)).get(name), property):
        pytest.skip(f"this torch has no {name} for the process")
    before, mark = getattr(module, name), object()

    def change(park: Callable[[], None]) -> object:
        setattr(module, name, mark)
        park()
        return getattr(module, name)

    with Parked(change) as changing:
        assert getattr(module, name) is before
    assert changing.result is mark


@pytest.mark.usefixtures("isolation")
def test_compiled_code_may_import_what_is_isolated() -> None:
    def imports(x: Tensor) -> Tensor:
        from torch.compiler import is_compiling  # noqa: PLC0415 - as torch.vmap does

        return x + 1 if is_compiling() else x

    assert torch.compile(imports, backend="eager", fullgraph=True)(X).tolist() == [2, 2]


@pytest.mark.skipif(per_thread.left_alone("torch.compiler"), reason="only exports set the flag on this torch")
@pytest.mark.usefixtures("isolation")
def test_only_the_thread_that_compiles_is_compiling() -> None:
    def compiles(park: Callable[[], None]) -> bool:
        torch.compiler._is_compiling_flag = True
        park()
        return torch.compiler.is_compiling()

    with Parked(compiles) as compiling:
        assert not torch.compiler.is_compiling()
    assert compiling.result


@pytest.mark.usefixtures("isolation")
def test_annotations_stay_in_their_thread() -> None:
    def annotates(park: Callable[[], None]) -> None:
        with torch.fx.traceback.annotate({"mine": 1}):
            park()

    with Parked(annotates):
        assert "custom" not in torch.fx.traceback.get_current_meta()


@pytest.mark.usefixtures("isolation")
def test_a_tracer_made_beside_a_trace_knows_wrapped_functions() -> None:
    with Parked(traced):
        assert seams.is_wrapped(math.sqrt)
        assert math.sqrt(4) == 2
        tracer = torch.fx.Tracer()
    assert not seams.is_wrapped(math.sqrt)
    graph = tracer.trace(lambda x: math.sqrt(x))  # noqa: PLW0108 - a builtin cannot be traced
    (node,) = [node for node in graph.nodes if node.op == "call_function"]
    assert node.target is math.sqrt


@pytest.mark.usefixtures("isolation")
def test_a_wrapper_that_another_trace_takes_away_is_still_known_by_its_original() -> None:
    with Parked(traced):
        wrapper = math.sqrt
    assert wrapper is not math.sqrt
    tracer, patcher = torch.fx.Tracer(), symbolic_trace._Patcher()
    scope = {"sqrt": wrapper}  # a copy of another module's globals, made before
    symbolic_trace._autowrap_check(patcher, scope, tracer._autowrap_function_ids)
    assert len(patcher.patches_made) == 1
    patcher.revert_all_patches()


@pytest.mark.usefixtures("isolation")
def test_functions_stay_wrapped_until_the_last_trace_ends() -> None:
    original = math.sqrt

    def root(park: Callable[[], None]) -> torch.fx.Graph:
        def function(x: Any) -> Any:
            park()
            return math.sqrt(x)

        return torch.fx.Tracer().trace(function)

    with Parked(root) as first, Parked(root) as second:
        first.finish()
    for graph in (first.result, second.result):
        assert [node.target for node in graph.nodes if node.op == "call_function"] == [original]
    assert math.sqrt is original


@pytest.mark.usefixtures("isolation")
def test_a_function_bound_anew_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patching:
        with Parked(traced):
            patching.setattr(math, "sqrt", len)
        assert math.sqrt is len
        patching.undo()
        vars(math)["sqrt"] = vars(math)["sqrt"].__wrapped__
    assert not seams.is_wrapped(math.sqrt)


class Looks(torch.autograd.Function):
    """Says in its backward whether autograd may use threads."""

    seen: list[bool] = []  # noqa: RUF012 - read by one test

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        del ctx
        Looks.seen.append(torch._C._is_multithreading_enabled())
        return gradient


@pytest.mark.usefixtures("isolation")
def test_backward_under_the_compile_lock_or_in_a_trace_stays_in_its_thread() -> None:
    def backward() -> None:
        x = torch.ones(2, requires_grad=True)
        Looks.apply(x).sum().backward()

    Looks.seen.clear()
    backward()
    with convert_frame.compile_lock:
        backward()
    torch.fx.Tracer().trace(Parks(backward))
    backward()
    assert Looks.seen == [True, False, False, True]


def test_a_block_leaves_everything_as_it_was() -> None:
    dflash.fx.isolated  # noqa: B018 - imports what it needs
    with dflash.fx.isolated():
        pass
    before = snapshot()
    with dflash.fx.isolated():
        torch.fx.symbolic_trace(Parks(lambda: None))
        during = snapshot()
    assert any(before[key] is not during.get(key) for key in before)
    assert same(before, snapshot())


def test_blocks_nest() -> None:
    with dflash.fx.isolated():
        with dflash.fx.isolated():
            assert is_isolated()
        assert is_isolated()
    assert not is_isolated()


def refuses(why: str) -> None:
    before = snapshot()
    with pytest.raises(IsolationError, match=why), dflash.fx.isolated():
        pass
    assert not is_isolated()
    assert same(before, snapshot())


def test_it_is_refused_while_a_thread_traces() -> None:
    with Parked(traced):
        refuses("thread parked traces: isolate before")


def test_it_is_refused_while_a_thread_compiles() -> None:
    def compiles(park: Callable[[], None]) -> None:
        with convert_frame.compile_lock:
            park()

    with Parked(compiles):
        refuses("a thread compiles")


def test_it_is_refused_where_a_trace_has_leaked_until_that_is_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbolic_trace, "CURRENT_PATCHER", symbolic_trace._Patcher())
    refuses("repair")
    repair()
    with dflash.fx.isolated():
        assert is_isolated()


@pytest.mark.parametrize("name", ["_Patcher", "_PatchedFnSetItem", "CURRENT_PATCHER"])
def test_it_is_refused_on_unknown_internals(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = is_isolated()
    with monkeypatch.context() as patching:
        patching.delattr(symbolic_trace, name)
        with pytest.raises(IsolationError), dflash.fx.isolated():
            pass
        assert is_isolated() is before is False


def test_an_error_in_the_middle_rolls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_self: object) -> None:
        raise ValueError("in the middle")

    before = snapshot()
    monkeypatch.setattr("dflash.fx.backward.Backward.install", fails)
    with pytest.raises(ValueError, match="in the middle"), dflash.fx.isolated():
        pass
    assert not is_isolated()
    assert same(before, snapshot())


def test_a_block_that_ends_beside_a_trace_says_so_and_stays_on() -> None:
    with contextlib.ExitStack() as stack:
        with pytest.raises(IsolationError, match="the isolation stays on"), dflash.fx.isolated():
            stack.enter_context(Parked(traced))
        assert is_isolated()
    with dflash.fx.isolated():
        pass
    assert not is_isolated()


@pytest.mark.usefixtures("isolation")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_is_rid_of_what_others_patched() -> None:
    with Parked(traced), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside threads
        child = os.fork()
        if child == 0:
            clean = nn.Module.__call__ is symbolic_trace._orig_module_call and not seams.is_wrapped(math.sqrt)
            torch.fx.symbolic_trace(Parks(lambda: None))
            os._exit(0 if clean and not seams.leaks(seams.tracing_state()) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.usefixtures("isolation")
def test_a_graph_module_survives_pickling_beside_a_trace() -> None:
    graph_module = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    with Parked(traced):
        assert pickle.loads(pickle.dumps(graph_module))(X).tolist() == [1, 1]


@pytest.mark.parametrize("probe_first", [True, False])
@pytest.mark.parametrize("probe_ends_first", [True, False])
def test_probes_and_isolation_come_and_go_in_any_order(*, probe_first: bool, probe_ends_first: bool) -> None:
    torch.compile(torch.sin, backend="eager")(X)  # torch wraps Tracer.trace at its first compile
    before = snapshot()
    calls: list[str] = []
    probes, isolation = contextlib.ExitStack(), contextlib.ExitStack()

    def attach() -> None:
        for point in (patch.TRACE, patch.FLAG_CHECK):
            probes.enter_context(point.subscribed(lambda _a, _k, name=str(point): calls.append(name), calls.append))

    def works() -> None:
        with Parked(made):
            assert torch.compile(lambda x: x * 3, backend="eager")(X).tolist() == [3, 3]
            assert type(nn.Linear(2, 2)(X)) is Tensor
        made(lambda: own.append(symbolic_trace.is_fx_symbolic_tracing()))
        assert own.pop()  # a thread still knows that it traces itself

    own: list[bool] = []
    begin = [attach, lambda: isolation.enter_context(dflash.fx.isolated())]
    for start in begin if probe_first else reversed(begin):
        start()
    works()
    assert any("Tracer.trace" in call for call in calls)
    if probe_ends_first:
        probes.close()
        works()
        isolation.close()
    else:
        isolation.close()
        calls.clear()
        torch.fx.symbolic_trace(nn.ReLU())
        assert any("Tracer.trace" in call for call in calls)
        probes.close()
    assert same(before, snapshot())


@pytest.mark.usefixtures("isolation")
def test_repair_finds_nothing_to_do_under_isolation() -> None:
    with Parked(made) as first, Parked(made):
        first.finish()
    assert repair() == []


def test_the_self_check_sees_every_race_without_isolation_and_its_cure_with_it() -> None:
    without = dflash.fx.self_check()
    assert seams.leaks(seams.tracing_state()) == []
    assert set(without.values()) <= {"not cured", "not needed"}
    assert without["F3, F4: module calls beside a trace"] == "not cured"
    alone = (
        {race for race in without if "torch.compiler" in race or "F11" in race}
        if per_thread.left_alone("torch.compiler")
        else set()
    )
    with dflash.fx.isolated():
        found = dflash.fx.self_check()
    assert {race for race, state in found.items() if state == "not cured"} == {
        race for race in alone if without[race] == "not cured"
    }
    assert {race for race, state in found.items() if state == "not needed"} == {
        r for r, state in without.items() if state == "not needed"
    }


def test_the_self_check_is_refused_beside_a_trace() -> None:
    with Parked(traced), pytest.raises(IsolationError, match="thread parked traces"):
        dflash.fx.self_check()
