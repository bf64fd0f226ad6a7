"""Baselines in the repository: `regression/baselines/NAME.json`, one file a series, written ready to commit.

A file holds several measurements without their steps: one alone says nothing about its noise (`regression.watch` has the rule).
They are the level that is judged by, whatever they look like beside earlier ones. Only the file of the present series is
opened, so files of other machines, or of an earlier format, do not disturb; `earlier_formats` names the latter.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regression.history import night_of
from regression.measurement import Measurement
from regression.watch import MIN_NIGHTS

MEASUREMENTS = 5  # of a new baseline: a limit of 4.1 standard deviations
DIRECTORY = Path(__file__).parent / "baselines"
SCHEMA_VERSION = 1
RESULT = "result"  # the "kind" of a file beside the baselines that keeps what a command printed


class BaselineError(ValueError):
    """A baseline file that cannot be used; the message says what to do."""


def path_of(series: str, directory: Path = DIRECTORY) -> Path:
    """Where the baseline of a series is."""
    return directory / f"{re.sub(r'[^a-z0-9.]+', '-', series.lower()).strip('-')}.json"


def load(series: str, directory: Path = DIRECTORY) -> list[Measurement]:
    """The measurements of the baseline, none where there is no file. Raises BaselineError on a file that is not one."""
    path = path_of(series, directory)
    if not path.exists():
        return []
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found = [Measurement.from_record(values) for values in content["measurements"]]
    except (ValueError, KeyError, TypeError) as error:
        raise BaselineError(f"{path} is no baseline ({type(error).__name__}: {error}): record it again") from error
    if content.get("schema_version") != SCHEMA_VERSION or any(one.series != series for one in found):
        raise BaselineError(f"{path} is of another version or series: record it again")
    return found


def record(measured: Sequence[Measurement], directory: Path = DIRECTORY) -> Path:
    """Write the baseline of a series anew from those of its measurements that count; returns the file.

    Raises BaselineError if fewer than three count (or fewer than were given, where that is less), or they are of several series.
    """
    why_not = {one.time: night_of(one).invalid for one in measured}
    counting = [one for one in measured if not why_not[one.time]]
    needed = max(1, min(len(measured), MIN_NIGHTS))
    if len(counting) < needed:
        reasons = sorted({reason for found in why_not.values() for reason in found})
        raise BaselineError(
            f"not recorded: {len(counting)} of {len(measured)} measurements count, {needed} are needed ({'; '.join(reasons)})"
        )
    if len({one.series for one in counting}) > 1:
        raise BaselineError(f"not recorded: the machine changed between the measurements: {sorted({m.series for m in counting})}")
    path = path_of(counting[0].series, directory)
    content = {
        "schema_version": SCHEMA_VERSION,
        "series": counting[0].series,
        "measurements": [dataclasses.replace(one, steps={}).to_record() for one in counting],
    }
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return path


def earlier_formats(directory: Path = DIRECTORY) -> list[str]:
    """A sentence for each file in the directory that no series finds, whatever the machine: it is no baseline of this version."""
    found = []
    for path in sorted(directory.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            found.append(f"{path.name}: no JSON, no series finds it")
            continue
        if isinstance(content, dict) and content.get("kind") == RESULT:
            continue
        if not isinstance(content, dict) or content.get("schema_version") != SCHEMA_VERSION:
            lacks = [key for key in ("series", "measurements") if not isinstance(content, dict) or key not in content]
            why = f"lacks {' and '.join(lacks)}" if lacks else "is of another version"
            found.append(f"{path.name}: in another format ({why}), no series finds it: record a baseline on that machine")
    return found


def clock_mhz(history: list[Measurement]) -> float | None:
    """The SM clock of the latest of them, None on a CPU."""
    clocks = [one.state.get("sm_clock_mhz") for one in sorted(history, key=lambda one: one.time)]
    known = [float(clock) for clock in clocks if clock is not None]
    return known[-1] if known else None
