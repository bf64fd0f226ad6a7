"""Spans and scalars, sent to whoever listens; nearly free when nobody does.

A span is a named stretch of time in one thread, a scalar a named number, a record a dictionary. Subscribers are called in
the thread that emits, in the order of subscription, so each of them guards its own state. A subscriber that raises stops
the emitting thread: telemetry that fails is a failure, not a gap in the data.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened. `time_seconds` is the wall clock, `duration_seconds` None unless it is a span."""

    kind: str  # "span", "scalar" or "record"
    name: str
    thread: str
    time_seconds: float
    value: float | None = None
    duration_seconds: float | None = None
    fields: dict[str, Any] = field(default_factory=dict)


Subscriber = Callable[[Event], None]
_subscribers: tuple[Subscriber, ...] = ()
_subscribers_lock = threading.Lock()


@contextlib.contextmanager
def subscribed(subscriber: Subscriber) -> Iterator[None]:
    """Call `subscriber` for every event inside the block. Subscriptions may end in any order."""
    global _subscribers
    with _subscribers_lock:
        _subscribers = (*_subscribers, subscriber)
    try:
        yield
    finally:
        with _subscribers_lock:
            index = _subscribers.index(subscriber)
            _subscribers = _subscribers[:index] + _subscribers[index + 1 :]


@contextlib.contextmanager
def span(name: str, **fields: Any) -> Iterator[None]:
    """Time the block and emit it, also when it raises."""
    if not _subscribers:
        yield
        return
    started = time.perf_counter()
    wall = time.time()
    try:
        yield
    finally:
        seconds = time.perf_counter() - started
        _emit("span", name, wall, duration_seconds=seconds, fields=fields)


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: such a number, anywhere in `value`, becomes None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def scalar(name: str, value: float, **fields: Any) -> None:
    """Emit one number."""
    if _subscribers:
        _emit("scalar", name, time.time(), value=float(value), fields=fields)


def record(name: str, **fields: Any) -> None:
    """Emit a dictionary of JSON values."""
    if _subscribers:
        _emit("record", name, time.time(), fields=fields)


def _emit(kind: str, name: str, wall: float, **rest: Any) -> None:
    event = Event(kind=kind, name=name, thread=threading.current_thread().name, time_seconds=wall, **rest)
    for subscriber in _subscribers:
        subscriber(event)
