"""Laws of attaching: probes come off in any order, leave torch as it was, and never harm what they watch."""

from __future__ import annotations

import contextlib
import inspect
import random
import threading
from typing import Any

import pytest
import torch
import torch._dynamo.convert_frame
from torch.fx.experimental.proxy_tensor import make_fx

from diagnostics import fxprobe, patch
from diagnostics.findings import conclude
from diagnostics.observe import PROBES, observed
from diagnostics.probes.probe import Probe as AnyProbe
from diagnostics.records import Log
from diagnostics.session import Outcome


def patched() -> dict[str, Any]:
    """Everything that the probes change, by identity."""
    tracer = inspect.unwrap(torch.fx._symbolic_trace.Tracer.trace)
    convert, check = torch._dynamo.convert_frame._compile, torch.fx._symbolic_trace.is_fx_symbolic_tracing
    functions = {"trace": tracer, "compile": convert, "check": check, "is_compiling": torch.compiler.is_compiling}
    functions |= {"set_rng_state": torch.set_rng_state, "set_default_dtype": torch.set_default_dtype}
    return {
        **functions,
        **{f"{name} code": function.__code__ for name, function in functions.items()},
        "check defaults": check.__defaults__,
        "lock": torch._dynamo.convert_frame.compile_lock,
        "Tracer": dict(vars(torch.fx.Tracer)),
        "call": torch.nn.Module.__call__,
        "getattr": torch.nn.Module.__getattr__,
        "threads": threading.excepthook,
    }


def same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return all(before[key] is after[key] or (key == "Tracer" and before[key] == after[key]) for key in before)


@pytest.mark.parametrize("order", [random.Random(seed).sample(range(len(PROBES)), len(PROBES)) for seed in range(36)])
def test_torch_is_as_it_was_after_the_probes_came_off_in_any_order(order: list[int]) -> None:
    torch.compile(torch.sin, backend="eager")  # torch wraps Tracer.trace at its first compile
    before = patched()
    contexts = [probe(Log()).attached() for probe in PROBES]
    for context in contexts:
        context.__enter__()
    assert not same(before, patched())
    for position in order:
        contexts[position].__exit__(None, None, None)
    assert same(before, patched())


@pytest.mark.parametrize("kind", PROBES)
def test_a_probe_is_attached_once_at_a_time(kind: type[AnyProbe]) -> None:
    probe = kind(Log())
    with probe.attached(), pytest.raises(RuntimeError, match="attached already"), probe.attached():
        pass
    with probe.attached():
        pass


def test_every_listener_hears_while_it_listens() -> None:
    heard: list[str] = []

    def listener(name: str) -> contextlib.AbstractContextManager[None]:
        return patch.TRACE.subscribed(lambda _arguments, _keywords: heard.append(name), heard.append)

    first, second = listener("first"), listener("second")
    first.__enter__()
    second.__enter__()
    make_fx(torch.sin)(torch.ones(1))
    first.__exit__(None, None, None)
    make_fx(torch.sin)(torch.ones(1))
    second.__exit__(None, None, None)
    make_fx(torch.sin)(torch.ones(1))
    assert heard == ["first", "second", "second"]


def test_a_probe_that_fails_is_reported_and_not_the_programs_problem() -> None:
    reports: list[str] = []

    def fails(_arguments: tuple[Any, ...], _keywords: dict[str, Any]) -> None:
        raise ZeroDivisionError("defect")

    with patch.TRACE.subscribed(fails, reports.append):
        graph = make_fx(torch.sin)(torch.ones(1))
    assert any(node.target is torch.ops.aten.sin.default for node in graph.graph.nodes)
    assert reports == ["a probe failed at the start of a call: ZeroDivisionError: defect"]


def test_a_function_replaced_by_the_program_is_reported_and_left_alone() -> None:
    original = inspect.unwrap(torch.fx.Tracer.trace).__code__
    reports: list[str] = []
    try:
        with patch.TRACE.subscribed(lambda _arguments, _keywords: None, reports.append):
            theirs = original.replace(co_name="theirs")
            inspect.unwrap(torch.fx.Tracer.trace).__code__ = theirs
        assert inspect.unwrap(torch.fx.Tracer.trace).__code__ is theirs
    finally:
        inspect.unwrap(torch.fx.Tracer.trace).__code__ = original
    assert reports == [
        "the program replaced torch.fx._symbolic_trace.Tracer.trace while it was observed: later calls were not observed"
    ]


def test_an_unknown_torch_is_not_observed_and_never_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(frame: object) -> None:
        del frame

    monkeypatch.setattr(torch._dynamo.convert_frame, "_compile", renamed)
    with observed() as log:
        pass
    unseen = [seen for seen in log.observations() if seen.kind == "not_observed"]
    assert len(unseen) == len(log.observations()) > 0
    assert all("_compile takes (frame) on this torch, expected (code)" in seen.name for seen in unseen)
    outcome = Outcome(exit_code=0, seconds=0, processes=(), others=0, not_observed=(unseen[0].name,), notes=())
    assert fxprobe.exit_code(outcome, conclude(log.observations()), fail_on="error") == 3


def frames_that_dynamo_looks_at() -> int:
    """Below a graph break, where Dynamo watches every frame unless told otherwise, of a trace and of a compiled call."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    inner = torch.compile(torch.cos, backend="eager")

    @torch.compiler.disable(recursive=False)
    def uncompiled(x: torch.Tensor) -> torch.Tensor:
        torch.fx.Tracer().trace(torch.nn.Linear(2, 2))
        return inner(x)

    def outer(x: torch.Tensor) -> torch.Tensor:
        return uncompiled(x + 1) * 2

    torch.compile(outer, backend="eager")(torch.ones(2))
    return torch._dynamo.utils.counters["frames"]["total"]


def test_dynamo_does_not_look_at_what_the_probes_do() -> None:
    alone = frames_that_dynamo_looks_at()
    with observed() as log:
        observed_frames = frames_that_dynamo_looks_at()
    assert alone >= 2
    assert observed_frames == alone
    assert not [seen for seen in log.observations() if seen.kind == "compile" and "diagnostics" in seen.where[0]]
