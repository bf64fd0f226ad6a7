"""What is compiled: every attempt of Dynamo, in every thread, with its time, its graph breaks and what became of it.

The seam is `torch._dynamo.convert_frame._compile`, looked up anew for each frame under Dynamo's compile lock. Dynamo's own
callbacks report only the first and the last of overlapping compiles, its metrics keep 64 entries without a thread.
AOTAutograd announces each graph that it compiles, among them the backward that is compiled lazily, at the first backward, in
the thread that runs it: on a GPU that is autograd's device thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from types import CellType, CodeType
from typing import Any

from dflash.fx import seams
from diagnostics import patch
from diagnostics.probes.probe import Probe
from diagnostics.records import Log, Observation
from diagnostics.who import inside_dynamo, program_lines, thread_name

_LIMIT_MESSAGE = "recompile limit exceeded"
_CACHES = (("aot_autograd", "autograd_cache_"), ("inductor", "fxgraph_cache_"))


class CompilesProbe(Probe):
    """Writes down compiles, the refusal to compile more versions, and flex_attention running unfused."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self._depth = threading.local()

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        before = set(seams.fallback_warnings())
        report = self._log.not_observed
        with contextlib.ExitStack() as stack:
            stack.enter_context(patch.COMPILE.subscribed(self._start, report))
            stack.enter_context(patch.GRAPH.subscribed(self._graph, report))
            yield
        for sentence in seams.fallback_warnings():
            if sentence not in before:
                self._log.add(Observation(kind="fallback", name=sentence, threads=(), time_seconds=time.time()))

    def _start(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> patch.Finish:
        code: CodeType = arguments[0] if arguments else keywords["code"]
        compile_id = keywords.get("compile_id")
        recompile = getattr(compile_id, "frame_compile_id", None)
        thread, caller, started, clock = thread_name(), program_lines(), time.time(), time.perf_counter()
        name, place = function_and_place(arguments, keywords, caller)
        depth = self._depth.value = getattr(self._depth, "value", 0) + 1
        breaks_before, caches_before = _counted("graph_break"), _caches()

        def finish(result: Any, error: BaseException | None) -> None:
            self._depth.value -= 1
            # A compile inside a compile is part of the outer one's breaks.
            breaks = sorted(_counted("graph_break") - breaks_before) if depth == 1 else []
            seen = Observation(
                kind="compile",
                name=name,
                threads=(thread,),
                where=(place,),
                time_seconds=started,
                duration_seconds=time.perf_counter() - clock,
                fields={
                    "recompile": None if recompile is None else recompile > 0,
                    "outcome": _outcome(result, error),
                    "graph_breaks": [reason.splitlines()[0] for reason in breaks if reason],
                    "reason": _reason(code) if recompile else "",
                    "caches": dict(_caches() - caches_before) if depth == 1 else {},
                },
            )
            self._log.add(seen)
            if type(error).__name__ == "FailOnRecompileLimitHit":  # the program gets it
                sentence, fields = f"{name} reached the recompile limit", {"why": "raised", "function": name}
                self._log.add(dataclasses.replace(seen, kind="fallback", name=sentence, duration_seconds=0.0, fields=fields))

        return finish

    def _graph(self, arguments: tuple[Any, ...], _keywords: dict[str, Any]) -> None:
        name, inside = str(arguments[1]), inside_dynamo()
        self._log.add(
            Observation(
                kind="graph",
                name=name,
                threads=(thread_name(),),
                where=program_lines(),
                time_seconds=time.time(),
                fields={"lazy": name == "backward" and not inside},
            )
        )


def function_and_place(arguments: tuple[Any, ...], keywords: dict[str, Any], caller: tuple[str, ...]) -> tuple[str, str]:
    """What `_compile` compiles, and where: of a module of torch, which Dynamo wraps in its own, class and caller."""
    code: CodeType = arguments[0] if arguments else keywords["code"]
    if code.co_filename.endswith("/_dynamo/external_utils.py") and caller:
        cells = next((cells for cells in arguments if isinstance(cells, tuple) and cells and isinstance(cells[0], CellType)), ())
        wrapped = next((cell.cell_contents for cell in cells if callable(cell.cell_contents)), None)
        if wrapped is not None:
            owner = getattr(wrapped, "__self__", wrapped)
            return type(owner).__qualname__ if owner is not wrapped else getattr(
                wrapped, "__qualname__", type(wrapped).__qualname__
            ), caller[-1]
    return code.co_qualname, f"{code.co_filename}:{code.co_firstlineno} {code.co_name}"


def _counted(group: str) -> Counter[str]:
    return Counter(sys.modules["torch._dynamo.utils"].counters[group])


def _caches() -> Counter[str]:
    """Hits and misses of the compile caches of this process so far."""
    return Counter(
        {name: count for group, prefix in _CACHES for name, count in _counted(group).items() if name.startswith(prefix)}
    )


def _reason(code: CodeType) -> str:
    """The guard that failed, as Dynamo tells it."""
    failures = getattr(sys.modules["torch._dynamo.utils"], "guard_failures", {}).get(code)
    return str(failures[-1]).splitlines()[0][:300] if failures else ""


def _outcome(result: Any, error: BaseException | None) -> str:
    if error is not None:
        return f"failed: {type(error).__name__}"
    return "compiled" if getattr(result, "guarded_code", result) is not None else "not compiled"


def hit_the_limit(error: BaseException) -> bool:
    """Dynamo refuses to compile one more version."""
    return type(error).__name__ == "FailOnRecompileLimitHit" or _LIMIT_MESSAGE in str(error)
