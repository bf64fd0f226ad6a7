"""What the diagnostics write down: an `Observation` is one fact, a `Finding` is what facts mean and what to do.

A program may trace thousands of times from one line, so equal facts are one observation with a count: a `Log` grows with
the number of places in the program, not with its running time, and has a limit that it reports when it is reached.
This module imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

Severity = Literal["error", "hazard", "info"]
Kind = Literal[
    "trace",  # calls of Tracer.trace; threads = (who traced,)
    "overlap",  # two traces at one time; threads = (who was tracing, who began to)
    "foreign_call",  # a module call that went through another thread's trace; threads = (who traced, who called)
    "foreign_flag",  # a compiled call that met a tracing flag; threads = (who traced, who called)
    "foreign_compiling",  # a thread was told that it compiles; threads = (who did, who asked)
    "compile",  # Dynamo compiling one frame; threads = (who compiled,)
    "graph",  # AOTAutograd compiling one graph, a lazy backward included; threads = (who compiled,)
    "lock",  # Dynamo's compile lock; threads = (who waited for it,) or (who held it,)
    "setting",  # a setting that one thread made and another, which compiles, does not see; threads = (who set, who compiled)
    "deadlock",  # threads = (who holds the compile lock inside autograd, who waits); it is one unless the second "went on"
    "stance",  # the program told compiled functions to run uncompiled; threads = (who,)
    "undone",  # a compile put back what was changed meanwhile; threads = (who changed it, who compiled)
    "leak",  # state left behind at a quiet moment; threads = the last traces that overlapped
    "fallback",  # compiled code bypassed
    "exception",  # an exception that nothing in the program handled; threads = (whose,)
    "not_observed",  # a probe that could not attach or had to give up
    "note",  # worth reading in the report, and no reason to distrust it
]
_MAX_PLACES = 10_000
Sink = Callable[[int, "Observation"], None]  # number of the place, the merged observation


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One fact, or `count` equal ones. `where` are lines of the program, the innermost last."""

    kind: Kind
    name: str
    threads: tuple[str, ...]
    where: tuple[str, ...] = ()
    time_seconds: float = 0.0  # wall clock of the first one
    duration_seconds: float = 0.0  # sum over `count`
    count: int = 1
    fields: dict[str, Any] = field(default_factory=dict)  # JSON values; equal facts have equal fields

    def to_dict(self) -> dict[str, Any]:
        """The observation as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read back what `to_dict` wrote. Raises ValueError on an unknown kind, TypeError on an unknown key."""
        if values.get("kind") not in get_args(Kind):
            raise ValueError(f"observation of kind {values.get('kind')!r}: known are {', '.join(get_args(Kind))}")
        return cls(**{**values, "threads": tuple(values["threads"]), "where": tuple(values.get("where", ()))})

    def key(self) -> str:
        """What makes two observations equal but for their count and times."""
        return json.dumps([self.kind, self.name, self.threads, self.where, self.fields], sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What observations mean: `id` is that of the failure catalogue (diagnostics/README.md)."""

    id: str
    severity: Severity
    what: str
    who: tuple[str, ...]
    where: tuple[str, ...]  # lines of the last of `who`, the innermost last
    why: str
    what_to_do: str
    count: int = 1
    others: tuple[str, ...] = ()  # where the other threads were: "name: innermost line <- its caller"
    process: str = ""  # labels of the processes, where there is more than one

    def to_dict(self) -> dict[str, Any]:
        """The finding as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read back what `to_dict` wrote. Raises ValueError on an unknown severity, TypeError on an unknown key."""
        if values.get("severity") not in get_args(Severity):
            raise ValueError(f"finding of severity {values.get('severity')!r}: known are {', '.join(get_args(Severity))}")
        return cls(**{**values, "who": tuple(values["who"]), "where": tuple(values["where"]),
                      "others": tuple(values.get("others", ()))})  # fmt: skip


class Log:
    """Observations from any thread; equal ones are merged."""

    def __init__(self, *, max_places: int = _MAX_PLACES, sink: Sink | None = None) -> None:
        """`sink` hears of a new place at once, and of its count at every power of two: what a crash leaves behind.

        Of waits that may be deadlocks it hears each: whether the last one ended is what counts.
        """
        self._max_places, self._sink = max_places, sink
        self.restart()

    def restart(self) -> None:
        """Forget everything; also the lock, which another thread may have held when this process was forked."""
        self._lock = threading.RLock()  # a signal handler may come while it is held
        self._entries: dict[str, Observation] = {}
        self._numbers: dict[str, int] = {}
        self._dropped = 0

    def add(self, observation: Observation) -> None:
        """Keep `observation`, or add it to an equal one."""
        key = observation.key()
        with self._lock:
            known = self._entries.get(key)
            if known is not None:
                observation = dataclasses.replace(
                    known,
                    count=known.count + observation.count,
                    duration_seconds=known.duration_seconds + observation.duration_seconds,
                )
            elif len(self._entries) >= self._max_places:
                self._dropped += observation.count
                return
            self._entries[key] = observation
            number = self._numbers.setdefault(key, len(self._numbers))
            if self._sink is not None and (observation.kind == "deadlock" or observation.count & (observation.count - 1) == 0):
                self._sink(number, observation)

    def not_observed(self, sentence: str) -> None:
        """Say that something could not be watched: such a run is never called clean."""
        self.add(Observation(kind="not_observed", name=sentence, threads=()))

    def note(self, sentence: str) -> None:
        """Say something that explains the report."""
        self.add(Observation(kind="note", name=sentence, threads=()))

    def flush(self) -> None:
        """Tell the sink the final counts."""
        if self._sink is not None:
            for number, observation in enumerate(self.observations()):
                self._sink(number, observation)

    def observations(self) -> tuple[Observation, ...]:
        """Everything so far, in the order in which each place was first seen."""
        with self._lock:
            entries, dropped = tuple(self._entries.values()), self._dropped
        if not dropped:
            return entries
        sentence = f"{dropped} observations from places beyond the first {self._max_places} were dropped"
        return (*entries, Observation(kind="not_observed", name=sentence, threads=()))
