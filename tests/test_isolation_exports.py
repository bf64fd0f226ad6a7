"""Laws of exports that overlap: what they switch off for the process is on again when the last one has ended."""

from __future__ import annotations

import builtins
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from helpers_isolation import Parked, X, traced
from torch import Tensor, nn
from torch.export import _trace as export_trace
from torch.fx.passes.infra.pass_base import PassResult

import dflash.fx
from dflash.fx.gpu_guard import without_gpu_guard
from dflash.fx.isolation import IsolationError, refuse_unless_quiet

ignore_backends: Callable[[], AbstractContextManager[None]] = export_trace._ignore_backend_decomps  # taken before isolation


class ParksInExport(nn.Module):
    """An export runs a module several times: this one parks the first time."""

    def __init__(self, park: Callable[[], None]) -> None:
        super().__init__()
        self.park: Callable[[], None] | None = park
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.park is not None and torch.compiler.is_exporting():
            park, self.park = self.park, None
            park()
        return self.linear(x)  # type: ignore[no-any-return]


def exported(park: Callable[[], None]) -> torch.export.ExportedProgram:
    return torch.export.export(ParksInExport(park), (X,), strict=False)


def backends() -> tuple[bool, ...]:
    return (torch._C._get_cudnn_enabled(), torch._C._get_mkldnn_enabled(), torch._C._get_nnpack_enabled())


def flags() -> tuple[bool, bool]:
    return torch.compiler.is_compiling(), torch.compiler.is_exporting()


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """A test that fails leaves the other tests alone."""
    before, functions = backends(), (builtins.max, builtins.min, math.pow)
    with without_gpu_guard(), dflash.fx.isolated():
        yield
    after = backends()
    torch._C._set_cudnn_enabled(before[0])
    torch._C._set_mkldnn_enabled(before[1])
    torch._C._set_nnpack_enabled(before[2])
    builtins.max, builtins.min, math.pow = functions
    assert after == before


def test_exports_that_end_in_the_order_in_which_they_began_leave_backends_and_flags_as_they_were() -> None:
    before = backends()
    assert any(before)
    with Parked(exported) as first, Parked(exported) as second:
        assert not any(backends())
        first.finish()
        assert not any(backends())  # the second still needs them off
    assert backends() == before
    assert flags() == (False, False)
    for export in (first, second):
        assert [node.op for node in export.result.graph.nodes].count("call_function") == 1


def test_functions_that_exports_replace_are_the_originals_again() -> None:
    originals = (builtins.max, builtins.min, math.pow)
    with Parked(exported) as first, Parked(exported):
        assert builtins.max is not originals[0]
        first.finish()
    assert (builtins.max, builtins.min, math.pow) == originals


def test_a_trace_that_ends_inside_an_export_leaves_its_wrapper_nowhere() -> None:
    original = math.pow
    with Parked(traced) as tracing, Parked(exported):
        tracing.finish()
    assert math.pow is original


def test_a_backend_that_was_off_stays_off() -> None:
    cudnn, *others = backends()
    with torch.backends.cudnn.flags(enabled=False):
        with Parked(exported) as first, Parked(exported):
            first.finish()
        assert backends() == (False, *others)
    assert backends() == (cudnn, *others)


def test_an_export_inside_another_of_the_same_thread_does_not_end_it() -> None:
    before = backends()
    with ignore_backends():
        with ignore_backends():
            pass
        assert not any(backends())
    assert backends() == before


def test_an_export_that_fails_gives_its_share_back() -> None:
    def fails(park: Callable[[], None]) -> None:
        def parks_and_fails() -> None:
            park()
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError), ignore_backends():
            parks_and_fails()

    before = backends()
    with Parked(fails) as failing, ignore_backends():
        failing.finish()
        assert not any(backends())
    assert backends() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_has_its_backends_on() -> None:
    before = backends()
    with Parked(exported), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside threads
        child = os.fork()
        if child == 0:
            os._exit(0 if backends() == before and flags() == (False, False) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_passes_over_an_exported_program_count_as_an_export() -> None:
    program = exported(lambda: None)

    def runs_passes(park: Callable[[], None]) -> None:
        def parks(graph: torch.fx.GraphModule) -> PassResult:
            park()
            return PassResult(graph, modified=False)

        program._transform_do_not_use(parks)

    before = backends()
    with Parked(runs_passes):
        assert not any(backends())
        with pytest.raises(IsolationError, match="thread parked exports"):
            refuse_unless_quiet()
    assert backends() == before
