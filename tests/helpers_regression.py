"""A measurement in the shape of a real one: the preset tiny-cpu on a CPU, with two segments, shortened to what is read."""

from __future__ import annotations

import dataclasses
from typing import Any

from regression.measurement import Measurement

SERIES = "tiny-cpu on CPU, 2 x 1 s [0123456789ab]"


def segment(number: int, **changes: Any) -> dict[str, Any]:
    workers = ("target-0", "drafter-0", "drafter-1")
    return {
        "began": 1000.0 + number, "ended": 1001.0 + number, "seconds": 1.0, "steps": 10, "tokens": 300, "padding_tokens": 0,
        "tokens_per_second": 300.0, "tokens_per_second_per_device": 100.0, "queue_occupancy": 0.8, "compiles": 0,
        "workers": [{"worker": worker, "device": "cpu", "items": 10} for worker in workers],
        "stages": [{"stage": "target.forward", "calls": 10, "seconds": 0.5}], **changes,
    }  # fmt: skip


def result(**changes: Any) -> dict[str, Any]:
    measure = {
        "method": 1, "incomplete": None, "segment_seconds": 1.0, "tokens_per_second": 300.0, "num_devices": 3,
        "tokens_per_second_per_device": 100.0, "segments": [segment(0), segment(1)],
    }  # fmt: skip
    return {
        "preset": "tiny-cpu", "engine": "threads", "topology": "1t+2d", "steps": 25, "tokens": 750, "tokens_per_second": 250.0,
        "tokens_per_second_per_device": 83.3, "loss": 2.969, "recompiles_after_warmup": 0, "fallbacks": 0, "fx_errors": 0,
        "fx_error_messages": [], "checkpoint": None, "measure": measure, **changes,
    }  # fmt: skip


def steps(host_bytes: list[float] | None = None) -> dict[str, list[float]]:
    return {
        "end_seconds": [0.1 * number for number in range(1, 26)],
        "tokens": [30] * 25,
        "padding_tokens": [0] * 25,
        "segment": [-1] * 5 + [0] * 10 + [1] * 10,
        "host_bytes": host_bytes or [600.0 * 2**20] * 25,
    }


def measurement(*, per_device: float | None = None, **changes: Any) -> Measurement:
    one = Measurement(
        name="tiny-cpu on CPU, 2 x 1 s", series=SERIES, time="2026-01-01T00:00:00+00:00", seconds=60.0, returncode=0,
        result=result(), fingerprint={"git": None}, invalid=(), steps=steps(),
    )  # fmt: skip
    if per_device is not None:
        one.result["measure"] |= {"tokens_per_second_per_device": per_device, "tokens_per_second": 3 * per_device}
    return dataclasses.replace(one, **changes)


def failed(kind: str, message: str) -> Measurement:
    return measurement(result={}, returncode=1, failure={"type": kind, "message": message}, steps={})
