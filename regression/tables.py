"""The tables of the nightly report. Pure: from measurements to rows of words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from regression.history import night_of
from regression.measurement import Measurement
from regression.secondary import discoveries, p_of_change
from regression.watch import WINDOW, NightVerdict

_FEWEST = 3  # earlier values for a secondary metric
NONE = "-"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table, or the sentence that says why it is empty."""

    title: str
    headers: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    empty: str = "Nothing."


def of_tonight(measured: Measurement, earlier: Sequence[Measurement]) -> list[Table]:
    """Per GPU, worker, stage and segment, and what moved. `earlier`: valid measurements of the series, the oldest first."""
    return [
        _gpus(measured),
        _workers(measured),
        _stages(measured, earlier[-1] if earlier else None),
        _segments(measured),
        _moved(measured, earlier),
    ]


def last_nights(verdicts: Sequence[NightVerdict], count: int) -> Table:
    """The newest first, for readers without a mouse."""
    rows = [
        (f"{one.night.time:%Y-%m-%d %H:%M}", number(one.night.value, ",.1f"), one.sentence)
        for one in reversed(verdicts[-count:] if count else [])
    ]
    return Table(title=f"The last {len(rows)} nights", headers=("time (UTC)", "tok/s per device", "verdict"), rows=rows)


def secondary_metrics(measured: Measurement) -> dict[str, float]:
    """What is watched beside the throughput, by name with its unit."""
    found: dict[str, Any] = {f"{name}, ms a call": one for name, one in _stage_milliseconds(measured).items()}
    segments = _segments_of(measured)
    if segments:
        found["queue occupancy"] = sum(one.get("queue_occupancy", 0.0) for one in segments) / len(segments)
    found["warm-up, s"] = measured.result.get("measure", {}).get("warmup_seconds")
    found |= {f"{name.removesuffix('_bytes')} memory, MiB": median(values) / 2**20
              for name, values in measured.steps.items() if name.endswith("_bytes") and values}  # fmt: skip
    found |= {f"control {name}": value for name, value in measured.controls.items()}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def number(value: float | None, form: str, unit: str = "") -> str:
    """A number in words, a dash for None."""
    return NONE if value is None else f"{value:{form}}{unit}"


def _gpus(measured: Measurement) -> Table:
    rows = [
        (
            str(gpu["index"]), gpu["name"], number(gpu["sm_clock_mhz"], ".0f"), number(gpu["utilization_percent"], ".0f"),
            number(gpu["power_watts"], ".0f"), number(gpu["temperature_celsius"], ".0f"), f"{gpu['power_cap_share']:.0%}",
            f"{gpu['slowdown_share']:.1%}",
        )
        for gpu in measured.state.get("gpus") or ()
    ]  # fmt: skip
    headers = ("GPU", "name", "SM MHz", "busy %", "W", "max °C", "power cap", "slowed down")
    return Table(title="GPUs", headers=headers, rows=rows, empty="No GPU was in this run.")


def _workers(measured: Measurement) -> Table:
    seconds = sum(one["seconds"] for one in _segments_of(measured))
    rows = []
    for name, row in _sums(measured, "workers", "worker").items():
        shares = [_share(row.get(f"{key}_seconds"), seconds) for key in ("busy", "wait", "sync", "device", "host_stall")]
        rate = number(row["tokens"] / seconds, ",.0f") if seconds and "tokens" in row else NONE
        rows.append((name, str(row.get("device", NONE)), f"{row['items']:,.0f}", rate, *shares))
    headers = ("worker", "device", "items", "tok/s", "busy", "queue wait", "sync", "on GPU", "host stall")
    return Table(title="Workers", headers=headers, rows=rows, empty="The run reports no workers.")


def _stages(measured: Measurement, before: Measurement | None) -> Table:
    earlier = _stage_milliseconds(before) if before else {}
    calls = {name: row["calls"] for name, row in _sums(measured, "stages", "stage").items()}
    rows = []
    for name, milliseconds in sorted(_stage_milliseconds(measured).items(), key=lambda item: -item[1] * calls[item[0]]):
        change = f"{milliseconds / earlier[name] - 1:+.1%}" if earlier.get(name) else NONE
        rows.append((name, f"{calls[name]:,.0f}", f"{milliseconds:,.2f}", change))
    headers = ("stage", "calls", "ms a call", "change")
    return Table(
        title="Stages, and their change to the last valid night", headers=headers, rows=rows, empty="The run reports no stages."
    )


def _segments(measured: Measurement) -> Table:
    rows = [
        (
            str(place), number(one["seconds"], ".1f"), str(one["steps"]), number(one["tokens_per_second_per_device"], ",.1f"),
            number(one.get("queue_occupancy"), ".2f"), str(one["compiles"]), f"{one['padding_tokens']:,}",
        )
        for place, one in enumerate(_segments_of(measured), start=1)
    ]  # fmt: skip
    headers = ("segment", "s", "steps", "tok/s per device", "queue occupancy", "compiles", "padding tokens")
    return Table(title="Segments", headers=headers, rows=rows, empty="Nothing was measured.")


def _moved(measured: Measurement, earlier: Sequence[Measurement]) -> Table:
    """Secondary metrics that moved, with the false discovery rate over all of them at 5 %; they fail nothing."""
    tonight = secondary_metrics(measured)
    history: dict[str, list[float]] = defaultdict(list)
    for one in earlier[-WINDOW:]:
        for name, value in secondary_metrics(one).items():
            history[name].append(value)
    known = {name: history[name] for name in tonight if len(history[name]) >= _FEWEST}
    found = discoveries({name: p_of_change(tonight[name], values) for name, values in known.items()})
    rows = [
        (one.metric, f"{tonight[one.metric]:,.4g}", f"{median(known[one.metric]):,.4g}", f"{one.adjusted_p:.2g}") for one in found
    ]
    empty = f"None of {len(known)} metrics moved." if known else f"Needs {_FEWEST} earlier valid nights."
    headers = ("metric", "tonight", "median before", "adjusted p")
    return Table(title="Secondary metrics that moved (they fail nothing)", headers=headers, rows=rows, empty=empty)


def valid(history: Sequence[Measurement], before: str) -> list[Measurement]:
    """The measurements that count and are older than the time `before`, the oldest first."""
    return sorted((one for one in history if one.time < before and not night_of(one).invalid), key=lambda one: one.time)


def _segments_of(measured: Measurement) -> list[dict[str, Any]]:
    segments: list[dict[str, Any]] = measured.result.get("measure", {}).get("segments") or []
    return segments


def _sums(measured: Measurement, key: str, name: str) -> dict[str, dict[str, Any]]:
    """Rows of all segments, numbers added up, by their name."""
    found: dict[str, dict[str, Any]] = {}
    for segment in _segments_of(measured):
        for row in segment.get(key, ()):
            mine = found.setdefault(row[name], {})
            for field, value in row.items():
                mine[field] = mine.get(field, 0) + value if isinstance(value, int | float) else value
    return found


def _stage_milliseconds(measured: Measurement) -> dict[str, float]:
    rows: Mapping[str, dict[str, Any]] = _sums(measured, "stages", "stage")
    return {name: 1000 * row["seconds"] / row["calls"] for name, row in rows.items() if row["calls"] > 0}


def _share(seconds: float | None, of: float) -> str:
    return NONE if seconds is None or not of else f"{seconds / of:.0%}"
