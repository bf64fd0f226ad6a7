"""Baselines in the repository: `regression/baselines/NAME.json`, one file a series, written ready to commit.

A file holds measurements without their steps. Only the file of the present series is opened, so files of other machines,
or of an earlier format, do not disturb.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from regression.measurement import Measurement

DIRECTORY = Path(__file__).parent / "baselines"
SCHEMA_VERSION = 1


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


def record(measured: Measurement, directory: Path = DIRECTORY) -> Path:
    """Write the baseline of the measurement's series anew; returns the file. Raises BaselineError if it does not count."""
    if measured.invalid or measured.failure or measured.per_device is None:
        reasons = "; ".join(measured.invalid) or str((measured.failure or {}).get("type", "no throughput"))
        raise BaselineError(f"not recorded: the measurement does not count ({reasons})")
    path = path_of(measured.series, directory)
    content = {
        "schema_version": SCHEMA_VERSION,
        "series": measured.series,
        "measurements": [dataclasses.replace(measured, steps={}).to_record()],
    }
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return path


def clock_mhz(history: list[Measurement]) -> float | None:
    """The SM clock of the latest of them, None on a CPU."""
    clocks = [one.state.get("sm_clock_mhz") for one in sorted(history, key=lambda one: one.time)]
    known = [float(clock) for clock in clocks if clock is not None]
    return known[-1] if known else None
