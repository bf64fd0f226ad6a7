"""Laws of the flag probe: it listens to compiled calls when one of them could meet a flag, and costs nothing at other times."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch.fx
from torch import nn
from torch.fx import _symbolic_trace as symbolic_trace

import dflash.fx
from diagnostics.patch import CALLS_BETWEEN_SAMPLES, FLAG_CHECK
from diagnostics.probes.flag import FlagProbe
from diagnostics.records import Log

CHECK: Any = symbolic_trace.is_fx_symbolic_tracing
TORCHS_CODE = CHECK.__code__


@pytest.fixture
def log() -> Iterator[Log]:
    log = Log()
    with FlagProbe(log).attached():
        yield log
    assert CHECK.__code__ is TORCHS_CODE


def listens() -> bool:
    return CHECK.__code__ is not TORCHS_CODE


def trace(inside: Any = lambda: None) -> None:
    class Traced(nn.Module):
        def forward(self, x: Any) -> Any:
            inside()
            return x

    torch.fx.symbolic_trace(Traced())


def ask() -> bool:
    answer: bool = CHECK()
    return answer


@pytest.mark.usefixtures("log")
def test_it_listens_while_a_trace_is_in_progress_and_torchs_own_code_answers_afterwards() -> None:
    during: list[bool] = []
    trace(lambda: during.append(listens()))
    assert (during, listens()) == ([True], False)
    trace(lambda: (trace(), during.append(listens())))  # the inner one ends while the outer is in progress
    assert (during, listens()) == ([True, True], False)


def test_the_end_of_one_thread_s_trace_leaves_the_other_s_listened_to(log: Log) -> None:
    began, may_end = threading.Event(), threading.Event()
    other = threading.Thread(target=trace, args=(lambda: (began.set(), may_end.wait(60)),))
    with contextlib.ExitStack() as stack:
        stack.callback(other.join)
        stack.callback(may_end.set)
        other.start()
        assert began.wait(60)
        trace()
        assert listens()
    assert not listens()
    assert log.observations() == ()  # what the other still needs is no leak


@pytest.mark.usefixtures("log")
def test_a_new_probe_does_not_listen() -> None:
    assert not listens()


def test_a_probe_attached_during_a_trace_listens_until_a_sample_finds_nothing_left_of_it() -> None:
    with contextlib.ExitStack() as stack:
        trace(lambda: stack.enter_context(FlagProbe(Log()).attached()))
        answers = {ask() for _ in range(CALLS_BETWEEN_SAMPLES - 1)}
        assert (answers, listens()) == ({False}, True)
        ask()
        assert not listens()


def test_a_flag_left_set_is_listened_to_until_it_is_cleared(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, flag = getattr(symbolic_trace, "_is_fx_tracing_tls", symbolic_trace), "_is_fx_tracing_flag"
    flag = flag if holder is symbolic_trace else "flag"  # of the thread
    monkeypatch.setattr(holder, flag, True, raising=False)
    trace()
    assert listens()
    monkeypatch.setattr(holder, flag, False)
    trace()
    assert not listens()
    assert [seen.kind for seen in log.observations()] == ["leak"]


def test_a_trace_that_ends_after_the_probe_came_off_changes_nothing() -> None:
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        first.enter_context(FlagProbe(Log()).attached())
        trace(lambda: (second.enter_context(FlagProbe(Log()).attached()), first.close()))
        assert listens()  # the second does not know that it ended
    assert not listens()


@pytest.mark.parametrize("traced_inside", [True, False])
def test_isolation_comes_and_goes_while_the_probe_does_not_listen(log: Log, *, traced_inside: bool) -> None:
    with dflash.fx.isolated():
        if traced_inside:
            trace()
        assert CHECK.__code__ is FLAG_CHECK._copy.__code__  # type: ignore[union-attr]  # attached
    assert not listens()
    assert log.observations() == ()


def test_isolation_comes_and_goes_while_the_probe_listens() -> None:
    log = Log()
    with contextlib.ExitStack() as stack:
        trace(lambda: stack.enter_context(FlagProbe(log).attached()))
        with dflash.fx.isolated():
            assert listens()
            assert not ask()
        assert listens()
        stack.close()
    assert CHECK.__code__ is TORCHS_CODE
    assert not any("replaced" in seen.name for seen in log.observations())
