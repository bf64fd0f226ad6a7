"""Laws of the tracer probe: every trace is told with who made it, and an overlap is one of two threads."""

from __future__ import annotations

import threading
from typing import Any

import torch.fx
from helpers_isolation import Parked, traced
from torch import nn

from diagnostics.probes.tracer import TracerProbe
from diagnostics.records import Log


def told(log: Log) -> list[tuple[str, tuple[str, ...]]]:
    return [(seen.kind, seen.threads) for seen in log.observations() for _ in range(seen.count)]


def test_a_trace_inside_a_trace_of_one_thread_overlaps_nobody() -> None:
    class TracesInside(nn.Module):
        def forward(self, x: Any) -> Any:
            torch.fx.Tracer().trace(nn.Identity())
            return x

    log = Log()
    with TracerProbe(log).attached():
        torch.fx.Tracer().trace(TracesInside())
    assert told(log) == [("trace", (threading.current_thread().name,))] * 2


def test_a_trace_that_begins_beside_another_thread_s_is_an_overlap_of_the_two() -> None:
    log, me = Log(), threading.current_thread().name
    with TracerProbe(log).attached(), Parked(traced):
        torch.fx.Tracer().trace(nn.Identity())
    assert told(log) == [("overlap", ("parked", me)), ("trace", (me,)), ("trace", ("parked",))]
