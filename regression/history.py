"""The store as the watch sees it: nights and acceptances. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from regression.acceptance import Acceptance, mark
from regression.laws import problems
from regression.measurement import Measurement
from regression.store import Store
from regression.watch import Night


class History:
    """The store in a directory, for `acceptance.main`."""

    def __init__(self, directory: Path) -> None:
        self._store = Store(directory)

    def nights(self, series: str) -> list[Night]:
        """All nights of a series, earlier acceptances marked."""
        records, _ = self._store.read(series)
        measured = [Measurement.from_record(record) for record in records if record["kind"] == "measurement"]
        return mark([night_of(one) for one in measured], acceptances(records))

    def append(self, record: Acceptance) -> str:
        """Keep an acceptance; returns its id."""
        return self._store.accept(
            record.series,
            record.reason,
            time=record.time.isoformat(timespec="seconds"),
            since=record.since.isoformat(timespec="seconds"),
            author=record.author,
        )


def night_of(measured: Measurement) -> Night:
    """A measurement as the watch judges it: one that failed a law, or has no throughput, does not count."""
    reasons = measured.invalid or tuple(problems(measured))
    if not reasons and measured.per_device is None:
        reasons = ("the run reports no throughput",)
    return Night(series=measured.series, time=datetime.fromisoformat(measured.time), value=measured.per_device, invalid=reasons)


def acceptances(records: Iterable[dict[str, Any]]) -> list[Acceptance]:
    """Those among records of the store."""
    return [
        Acceptance(
            series=record["series"],
            since=datetime.fromisoformat(record.get("since") or record["time"]),
            time=datetime.fromisoformat(record["time"]),
            reason=record["reason"],
            author=record.get("author") or "",
        )
        for record in records
        if record["kind"] == "acceptance"
    ]
