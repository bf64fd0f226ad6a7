"""Laws of dflash.fx.seams."""

from __future__ import annotations

import functools
import math
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.fx._symbolic_trace as symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from dflash.fx import seams


def seen_from_inside() -> seams.TracingState:
    """The state as a module reads it while it is traced."""
    seen: list[seams.TracingState] = []

    class Looks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(seams.tracing_state())
            return x

    torch.fx.symbolic_trace(Looks())
    (state,) = seen
    return state


def test_this_torch_shows_everything() -> None:
    assert seams.unknown(seams.tracing_state()) == []


def test_a_quiet_process_leaks_nothing() -> None:
    make_fx(torch.sin)(torch.ones(1))
    assert seams.leaks(seams.tracing_state()) == []


def test_a_running_trace_is_seen_from_inside() -> None:
    state = seen_from_inside()
    assert state.flag is True
    assert state.patched_methods == ("__call__", "__getattr__")
    assert state.patcher is True


@pytest.mark.parametrize("method", ["__call__", "__getattr__"])
def test_a_method_left_patched_is_a_leak_that_names_the_method_and_the_cure(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(torch.nn.Module, method, functools.partialmethod(getattr(torch.nn.Module, method)))
    (sentence,) = seams.leaks(seams.tracing_state())
    assert f"torch.nn.Module.{method} is still patched" in sentence
    assert "_orig_module_" in sentence


def test_a_patcher_left_behind_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbolic_trace, "CURRENT_PATCHER", object())
    (sentence,) = seams.leaks(seams.tracing_state())
    assert "CURRENT_PATCHER" in sentence


def test_a_compiling_flag_left_behind_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    (sentence,) = seams.leaks(seams.tracing_state())
    assert "_is_compiling_flag" in sentence


def test_a_process_wide_flag_left_behind_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(symbolic_trace, "_is_fx_tracing_tls", raising=False)
    monkeypatch.setattr(symbolic_trace, "_is_fx_tracing_flag", True, raising=False)
    state = seams.tracing_state()
    assert state.flag_scope == "process"
    assert ["flag is set" in sentence for sentence in seams.leaks(state)] == [True]


def test_a_thread_local_flag_is_read_in_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    local = threading.local()
    local.flag = True
    monkeypatch.setattr(symbolic_trace, "_is_fx_tracing_tls", local, raising=False)
    monkeypatch.setattr(symbolic_trace, "_get_is_fx_tracing", lambda: getattr(local, "flag", False), raising=False)
    readings: list[bool | None] = [seams.tracing_state().flag]
    other = threading.Thread(target=lambda: readings.append(seams.tracing_state().flag))
    other.start()
    other.join()
    assert readings == [True, False]
    assert seams.tracing_state().flag_scope == "thread"


def test_what_a_torch_does_not_show_is_unknown_and_not_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_is_fx_tracing_flag", "_is_fx_tracing_tls", "CURRENT_PATCHER", "_orig_module_call", "_wrapped_fns_to_patch"):
        monkeypatch.delattr(symbolic_trace, name, raising=False)
    monkeypatch.delattr(torch.compiler, "_is_compiling_flag")
    state = seams.tracing_state()
    assert state == seams.TracingState(
        flag=None, flag_scope=None, patched_methods=None, patcher=None, wrapped_functions=None, compiling=None
    )
    assert len(seams.unknown(state)) == 5


def test_the_unfused_flex_warning_is_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torch.nn.attention.flex_attention"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(_WARNINGS_SHOWN=set()))
    assert seams.fallback_warnings() == ()
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(_WARNINGS_SHOWN={"flex_attention_performance"}))
    assert len(seams.fallback_warnings()) == 1


def test_a_flex_module_without_its_warnings_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.nn.attention.flex_attention", SimpleNamespace())
    assert len(seams.unknown(seams.tracing_state())) == 1


def test_a_function_left_wrapped_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrapper(x: float) -> float:
        return x

    vars(wrapper)["_Patcher__fx_already_patched"] = True  # the mark of torch.fx
    monkeypatch.setattr(math, "sqrt", wrapper)
    (sentence,) = seams.leaks(seams.tracing_state())
    assert "math.sqrt are still wrapped although nothing traces (F14)" in sentence


def test_functions_are_wrapped_while_a_trace_runs_and_not_after() -> None:
    assert "math.sqrt" in (seen_from_inside().wrapped_functions or ())
    assert seams.tracing_state().wrapped_functions == ()
