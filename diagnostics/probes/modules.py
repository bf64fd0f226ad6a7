"""Who is hit: calls of `nn.Module` that go through another thread's trace.

While one thread traces, `nn.Module.__call__` of the whole process leads to that thread's tracer, which is asked through its
method `call_module`. Only the tracers in progress are watched, so that module calls cost nothing while nobody traces.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.fx

from diagnostics import patch
from diagnostics.probes.probe import Probe
from diagnostics.records import Observation
from diagnostics.who import program_lines, thread_name


class ModulesProbe(Probe):
    """Writes down every module call that another thread's tracer answered, and how it ended."""

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        with patch.TRACE.subscribed(self._start, self._log.not_observed):
            yield

    def _start(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> patch.Finish:
        tracer = arguments[0] if arguments else keywords["self"]
        owner, ident = thread_name(), threading.get_ident()

        def called(arguments: tuple[Any, ...], _keywords: dict[str, Any]) -> patch.Finish | None:
            return None if threading.get_ident() == ident else self._foreign(tracer, owner, arguments[0])

        stack = contextlib.ExitStack()
        stack.enter_context(patch.instance_observed(tracer, "call_module", called, self._log.not_observed))
        return lambda _result, _error: stack.close()

    def _foreign(self, tracer: Any, owner: str, module: Any) -> patch.Finish:
        victim, where, started = thread_name(), program_lines(), time.time()

        def finish(result: Any, error: BaseException | None) -> None:
            if error is not None:
                outcome = f"{type(error).__name__}: {str(error)[:300]}"
            else:
                outcome = "proxy" if _holds_proxy(result) else "passed"
            fields = {"outcome": outcome, "tracer": type(tracer).__qualname__}
            self._log.add(
                Observation(
                    kind="foreign_call",
                    name=type(module).__qualname__,
                    threads=(owner, victim),
                    where=where,
                    time_seconds=started,
                    fields=fields,
                )
            )

        return finish


def _holds_proxy(result: Any) -> bool:
    if isinstance(result, torch.fx.Proxy):
        return True
    if isinstance(result, dict):
        return any(map(_holds_proxy, result.values()))
    return isinstance(result, list | tuple) and any(map(_holds_proxy, result))
