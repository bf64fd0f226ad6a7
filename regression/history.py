"""The history as the decisions see it: from the records of a store to the nights of a series.

A measurement is one night, whatever else is known about it: what the nightly run finds beside it (the gate's verdict, FX
findings, the compile cache) is a record of its own, of kind "night" with the same series and time, and is joined here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

from regression.acceptance import Acceptance, mark
from regression.laws import problems
from regression.measurement import Measurement
from regression.secondary import MissingNight
from regression.store import Store
from regression.verdict import Kind
from regression.watch import Night

DECISIVE = (Kind.FAIL, Kind.PASS, Kind.WIN)


@dataclass(frozen=True, kw_only=True)
class History:
    """What is known, each in the order of time."""

    measurements: Sequence[Measurement] = ()
    acceptances: Sequence[Acceptance] = ()
    notes: Sequence[dict[str, Any]] = ()  # records of kind "night"
    alerts: Sequence[MissingNight] = ()  # that were told already
    recorded: Sequence[Measurement] = ()  # of a recorded baseline
    unread: Sequence[str] = field(default=(), compare=False)  # a sentence for each record that was skipped

    def of(self, series: str) -> list[Measurement]:
        """The measurements of one series."""
        return [one for one in self.measurements if one.series == series]

    def notes_of(self, measured: Measurement) -> dict[str, Any]:
        """What the nightly run found beside a measurement; empty where nothing was. Of several, one that has a gate's verdict."""
        found = [note for note in self.notes if (note["series"], note["time"]) == (measured.series, measured.time)]
        return max(found, key=lambda note: ((note.get("gate") or {}).get("kind", "") in DECISIVE, str(note)), default={})

    def with_measurements(self, more: Iterable[Measurement]) -> History:
        """This history and `more`, which may be in it already."""
        return replace(self, measurements=(*self.measurements, *more))

    def with_baseline(self, recorded: Iterable[Measurement]) -> History:
        """This history and a recorded baseline, whose measurements may be in it already."""
        found = tuple(recorded)
        return replace(self, measurements=(*self.measurements, *found), recorded=found)


def read(store: Store, series: str | None = None) -> History:
    """Everything in the store (of one series). What has another format is skipped and told."""
    records, unread = store.read(series)
    found: dict[str, list[Any]] = {"measurement": [], "acceptance": [], "night": [], "alert": []}
    for record in records:
        try:
            found[record["kind"]].append(_PARSERS[record["kind"]](record))
        except (KeyError, TypeError, ValueError) as error:
            unread.append(f"a {record['kind']} of {record['time']} in another format, skipped ({error})")
    return History(
        measurements=found["measurement"],
        acceptances=found["acceptance"],
        notes=found["night"],
        alerts=found["alert"],
        unread=unread,
    )


def night_of(measured: Measurement, *, gate: Kind | None = None, despite_problems: bool = False) -> Night:
    """One measurement as a night. A run with problems (`laws.problems`) is no reference for later ones."""
    reasons = list(measured.invalid)
    if measured.failure:
        reasons.append(f"the run failed, {measured.failure['type']}")
    elif measured.per_device is None:
        reasons.append("the run reports no throughput")
    elif not despite_problems:
        reasons += problems(measured)
    return Night(
        series=measured.series,
        time=datetime.fromisoformat(measured.time),
        value=measured.per_device,
        invalid=tuple(reasons),
        gate=gate,
        controls=tuple(sorted(measured.controls.items())),
    )


def nights(history: History, series: str, tonight: Measurement | None = None) -> list[Night]:
    """The nights of one series by time, accepted levels marked; `tonight` is judged even where its run had problems."""
    recorded = {(one.series, one.time) for one in history.recorded}
    found = [
        replace(
            night_of(one, gate=_gate(history, one), despite_problems=tonight is not None and _are_one(one, tonight)),
            recorded=(one.series, one.time) in recorded,
        )
        for one in (*history.of(series), *([tonight] if tonight else []))
    ]
    return mark(found, history.acceptances)


def by_workload(history: History) -> list[Night]:
    """All nights with the workload as their series, for the alert about missing ones: a new fingerprint is no missing night."""
    return [replace(night_of(one), series=one.name) for one in history.measurements]


def alert_record(alert: MissingNight, now: datetime) -> dict[str, Any]:
    """A record that says that the alert was told."""
    return {
        "kind": "alert",
        "series": alert.series,
        "time": now.isoformat(timespec="seconds"),
        "day": alert.day.isoformat(),
        "reason": alert.sentence,
    }


class AcceptingStore:
    """What `acceptance.main` needs of a history."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def nights(self, series: str) -> list[Night]:
        """All nights of a series, earlier acceptances marked."""
        return nights(read(self._store, series), series)

    def append(self, record: Acceptance) -> str:
        """Keep an acceptance."""
        return self._store.accept(
            record.series,
            record.reason,
            time=record.time.isoformat(timespec="seconds"),
            since=record.since.isoformat(),
            author=record.author,
        )


def open_store(directory: Path) -> AcceptingStore:
    """The history in `directory`. Raises ValueError if there is none."""
    if not directory.is_dir():
        raise ValueError(f"there is no directory {directory}: name the history, for instance DIR/store of the nightly's --output")
    return AcceptingStore(Store(directory))


def _gate(history: History, measured: Measurement) -> Kind | None:
    gate = history.notes_of(measured).get("gate")
    return Kind(gate["kind"]) if gate else None


def _are_one(one: Measurement, other: Measurement) -> bool:
    return (one.series, one.time, one.per_device) == (other.series, other.time, other.per_device)


def _acceptance(record: dict[str, Any]) -> Acceptance:
    return Acceptance(
        series=record["series"],
        since=datetime.fromisoformat(record.get("since") or record["time"]),
        time=datetime.fromisoformat(record["time"]),
        reason=record["reason"],
        author=record.get("author") or "unknown",
    )


def _note(record: dict[str, Any]) -> dict[str, Any]:
    gate = record.get("gate")
    if gate is not None:
        Kind(gate["kind"])
    return record


def _alert(record: dict[str, Any]) -> MissingNight:
    return MissingNight(series=record["series"], day=date.fromisoformat(record["day"]), sentence=record["reason"])


_PARSERS = {"measurement": Measurement.from_record, "acceptance": _acceptance, "night": _note, "alert": _alert}
