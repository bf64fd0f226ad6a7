"""Accepting a change of level: kept as data, never as an edited history.

An acceptance names the first night of the new level. From that night on the watch has a new reference; everything older
stays in the store and in the report. `main` is the command `accept SERIES --reason ...`; it knows no file format, so whoever
keeps the history calls it with a way to open that. Exit codes: 0 recorded, 2 bad usage or nothing to accept.
"""

from __future__ import annotations

import argparse
import getpass
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from regression.verdict import Kind
from regression.watch import Night, chronological, replay


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Somebody accepted that the level of a series changed. Times have a time zone."""

    series: str
    since: datetime  # the first night of the new level
    time: datetime  # of the acceptance
    reason: str
    author: str


class Store(Protocol):
    """What the command needs of a history."""

    def nights(self, series: str) -> Sequence[Night]:
        """All nights of a series, earlier acceptances marked (`mark`)."""

    def append(self, record: Acceptance) -> object:
        """Keep a record."""


def accept(nights: Iterable[Night], *, reason: str, author: str, time: datetime, since: datetime | None = None) -> Acceptance:
    """The record that accepts the present level of one series.

    Without `since` the new level begins with the first of the latest red nights (SUSPECT, FAIL or HARDWARE), or with the latest
    valid night when that is not red. Raises ValueError without a reason, without a valid night, or with a `since` after the last.
    """
    if not reason.strip():
        raise ValueError("an acceptance needs a reason: say why the new level is right")
    valid = [verdict for verdict in replay(nights) if verdict.kind is not Kind.INVALID]
    if not valid:
        raise ValueError("the series has no valid night: nothing to accept")
    last = valid[-1].night
    first = last
    for verdict in reversed(valid):
        if verdict.kind not in {Kind.SUSPECT, Kind.FAIL, Kind.HARDWARE}:
            break
        first = verdict.night
    if since is not None and since > last.time:
        raise ValueError(
            f"the new level would begin at {since}, after the last valid night ({last.time}): use that or an earlier one"
        )
    return Acceptance(series=last.series, since=since or first.time, time=time, reason=reason.strip(), author=author)


def mark(nights: Iterable[Night], acceptances: Iterable[Acceptance]) -> list[Night]:
    """Nights in their order, `accepted` filled in on the first valid night at or after each acceptance's `since`.

    An acceptance without such a night (yet) waits. Of several for one night, the latest gives the reason.
    """
    marked = sorted(set(nights), key=chronological)
    for acceptance in sorted(set(acceptances), key=lambda record: (record.time, record.reason)):
        for index, night in enumerate(marked):
            if night.series == acceptance.series and night.time >= acceptance.since and not night.invalid:
                marked[index] = replace(night, accepted=acceptance.reason)
                break
    return marked


def main(arguments: Sequence[str] | None, open_store: Callable[[Path], Store]) -> int:
    """The command; `open_store` opens the history in a directory."""
    parser = argparse.ArgumentParser(prog="python -m regression.watch", description=__doc__)
    command = parser.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "accept", help="accept the present level of a series"
    )
    command.add_argument("series", metavar="SERIES")
    command.add_argument("--reason", required=True, help="why the new level is right")
    command.add_argument("--since", type=_time, metavar="TIME", help="first night of the new level (ISO 8601, UTC where unsaid)")
    command.add_argument("--store", type=Path, required=True, metavar="DIR", help="the history")
    options = parser.parse_args(arguments)
    try:
        store = open_store(options.store)
        nights = store.nights(options.series)
        if not nights:
            raise ValueError(f"{options.store} has no night of the series {options.series!r}")  # noqa: TRY301 - one way out
        record = accept(nights, reason=options.reason, author=getpass.getuser(), time=datetime.now(UTC), since=options.since)
        store.append(record)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"accepted for {record.series}: a new level since {record.since.isoformat()} ({record.reason})\n")
    return 0


def _time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)
