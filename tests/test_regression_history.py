"""Laws of the store as the watch sees it: an acceptance is kept, and read back where it belongs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from helpers_regression import SERIES, failed, measurement, result

from regression.history import History, night_of
from regression.store import Store

ROOT = Path(__file__).parent.parent


def test_accepting_by_the_command_is_a_record_that_marks_its_night(tmp_path: Path) -> None:
    for day, rate in enumerate((100.0, 100.0, 80.0), start=1):
        Store(tmp_path).add(measurement(per_device=rate, time=f"2026-01-0{day}T00:00:00+00:00").to_record())
    command = (sys.executable, "-m", "regression.watch", "accept", SERIES, "--reason", "a new loss", "--store", str(tmp_path))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [(night.value, night.accepted) for night in History(tmp_path).nights(SERIES)] == [
        (100.0, ""),
        (100.0, ""),
        (80.0, "a new loss"),
    ]
    assert Store(tmp_path).verify() == (4, [])


def test_a_run_that_broke_a_law_or_has_no_throughput_is_an_invalid_night() -> None:
    assert night_of(measurement()).invalid == ()
    assert night_of(measurement(invalid=("busy",))).invalid == ("busy",)
    assert night_of(measurement(result=result(fx_errors=1))).invalid == ("1 FX errors",)
    assert night_of(failed("WorkerFailed", "why")).value is None
    assert night_of(failed("WorkerFailed", "why")).invalid != ()
