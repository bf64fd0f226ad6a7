"""What is compiled: every attempt of Dynamo, in every thread, with its time, its graph breaks and what became of it.

The seam is `torch._dynamo.convert_frame._compile`, looked up anew for each frame under Dynamo's compile lock. Dynamo's own
callbacks report only the first and the last of overlapping compiles, its metrics keep 64 entries without a thread.
Not seen here: a backward graph compiled at the first backward; its traces are seen by the tracer probe.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch._dynamo.utils

from dflash.fx import seams
from diagnostics import patch
from diagnostics.records import Log, Observation
from diagnostics.who import program_lines, thread_name

_LIMIT_MESSAGE = "recompile limit exceeded"


class CompilesProbe:
    """Writes down compiles, and the fallbacks: the recompile limit, and flex_attention running unfused."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._depth = threading.local()

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Observe inside the block. Raises NotObservable."""
        before = set(seams.fallback_warnings())
        with patch.COMPILE.subscribed(self._start, self._log.not_observed):
            yield
        for sentence in seams.fallback_warnings():
            if sentence not in before:
                self._log.add(Observation(kind="fallback", name=sentence, threads=(), time_seconds=time.time()))

    def _start(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> patch.Finish:
        code: CodeType = arguments[0] if arguments else keywords["code"]
        compile_id = keywords.get("compile_id")
        recompile = getattr(compile_id, "frame_compile_id", None)
        thread, caller, started, clock = thread_name(), program_lines(), time.time(), time.perf_counter()
        depth = self._depth.value = getattr(self._depth, "value", 0) + 1
        breaks_before = _graph_breaks()

        def finish(result: Any, error: BaseException | None) -> None:
            self._depth.value -= 1
            # A compile inside a compile is part of the outer one's breaks.
            breaks = sorted(_graph_breaks() - breaks_before) if depth == 1 else []
            seen = Observation(
                kind="compile",
                name=code.co_qualname,
                threads=(thread,),
                where=(f"{code.co_filename}:{code.co_firstlineno} {code.co_name}",),
                time_seconds=started,
                duration_seconds=time.perf_counter() - clock,
                fields={
                    "recompile": None if recompile is None else recompile > 0,
                    "outcome": _outcome(result, error),
                    "graph_breaks": [reason.splitlines()[0] for reason in breaks if reason],
                },
            )
            self._log.add(seen)
            if error is not None and _hit_the_limit(error):
                sentence, fields = f"{code.co_qualname} reached the recompile limit", {"caller": list(caller)}
                self._log.add(dataclasses.replace(seen, kind="fallback", name=sentence, duration_seconds=0.0, fields=fields))

        return finish


def _graph_breaks() -> Counter[str]:
    return Counter(torch._dynamo.utils.counters["graph_break"])


def _outcome(result: Any, error: BaseException | None) -> str:
    if error is not None:
        return f"failed: {type(error).__name__}"
    return "compiled" if getattr(result, "guarded_code", result) is not None else "not compiled"


def _hit_the_limit(error: BaseException) -> bool:
    return type(error).__name__ == "FailOnRecompileLimitHit" or _LIMIT_MESSAGE in str(error)
