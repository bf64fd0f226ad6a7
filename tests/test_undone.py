"""Laws of what a compile undoes beside it (F16): what another thread drew or set is told, what nobody else did is not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from helpers_isolation import Parked, X

from dflash.fx.gpu_guard import without_gpu_guard
from diagnostics.findings import conclude
from diagnostics.probes.undone import UndoneProbe
from diagnostics.records import Finding, Log


@pytest.fixture
def log() -> Iterator[Log]:
    torch._dynamo.reset()
    log = Log()
    with without_gpu_guard(), UndoneProbe(log).attached():
        yield log
    assert torch.get_default_dtype() is torch.float32


def compiled(during: Callable[[], object]) -> torch.Tensor:
    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        during()
        return graph.forward

    found: torch.Tensor = torch.compile(lambda x: x + 1, backend=backend)(X)
    return found


def set_float64() -> None:
    torch.set_default_dtype(torch.float64)


def found(log: Log) -> list[Finding]:
    return [finding for finding in conclude(log.observations()) if finding.id == "F16"]


def test_numbers_that_a_thread_drew_beside_a_compile_are_a_hazard(log: Log) -> None:
    with Parked(compiled):
        first = torch.rand(4)
    assert torch.equal(torch.rand(4), first)  # the failure itself
    (finding,) = found(log)
    assert (finding.severity, finding.who, finding.count) == ("hazard", ("parked",), 1)
    assert "drawn again" in finding.what
    assert any("compiled" in line for line in finding.where)


def test_a_default_that_a_thread_set_beside_a_compile_is_an_error_of_both(log: Log) -> None:
    with Parked(compiled):
        set_float64()
    (finding,) = found(log)
    assert (finding.severity, finding.who) == ("error", ("MainThread", "parked"))
    assert any("compiled" in line for line in finding.where)
    assert finding.others[0].startswith("MainThread: ")
    assert "set_float64" in finding.others[0]


def test_what_was_drawn_or_set_before_the_compile_is_kept_and_not_told(log: Log) -> None:
    set_float64()
    try:
        torch.rand(4)
        with Parked(compiled):
            torch.get_default_dtype()
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert log.observations() == ()


def test_a_state_that_the_program_puts_back_is_its_own_affair(log: Log) -> None:
    with Parked(compiled):
        state = torch.get_rng_state()
        torch.rand(4)
        torch.set_rng_state(state)
    assert log.observations() == ()


def test_a_default_that_the_compiling_thread_set_itself_is_not_told(log: Log) -> None:
    with Parked(lambda park: (park(), compiled(set_float64))):
        pass
    assert log.observations() == ()


def test_a_program_of_one_thread_harms_nobody(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # a runner of tests may have threads of its own
    compiled(lambda: torch.rand(4))
    assert log.observations() == ()
