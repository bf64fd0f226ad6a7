"""Laws of the history: what a store's records mean as nights, and what the decision makes of them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers_regression import SERIES, failed, measurement, result
from hypothesis import given
from hypothesis import strategies as st

from regression import acceptance, confirm
from regression.decision import decide, judge, outcomes
from regression.history import History, alert_record, by_workload, night_of, nights, open_store, read
from regression.measurement import Measurement
from regression.secondary import missing_nights
from regression.store import Store
from regression.verdict import Kind

ROOT = Path(__file__).parent.parent


def at(day: int, per_device: float = 100.0, **changes: Any) -> Measurement:
    return measurement(per_device=per_device, time=f"2026-01-{day:02}T02:00:00+00:00", **changes)


def gate(day: int, kind: str) -> dict[str, Any]:
    return {"kind": "night", "series": SERIES, "time": at(day).time, "gate": {"kind": kind}}


def kept(store: Store, *records: Any) -> History:
    for record in records:
        store.add(record.to_record() if isinstance(record, Measurement) else record)
    return read(store)


def test_the_gate_s_verdict_joins_its_night_and_no_night_is_there_twice(tmp_path: Path) -> None:
    without = kept(Store(tmp_path), at(1), at(2, 90.0))
    assert judge(at(2, 90.0), without).kind is Kind.SUSPECT
    history = kept(Store(tmp_path), gate(2, "FAIL"))
    assert [night.gate for night in nights(history, SERIES)] == [None, Kind.FAIL]
    assert nights(history, SERIES, tonight=at(2, 90.0)) == nights(history, SERIES)
    assert judge(at(2, 90.0), history).kind is Kind.FAIL


def test_a_decisive_gate_counts_whatever_the_order_of_notes() -> None:
    for notes in ([gate(2, "FAIL"), gate(2, "UNKNOWN"), {**gate(2, ""), "gate": None}], [gate(2, "UNKNOWN"), gate(2, "FAIL")]):
        history = History(measurements=[at(1), at(2, 90.0)], notes=notes)
        assert judge(at(2, 90.0), history).kind is Kind.FAIL


def test_a_run_with_problems_is_judged_in_its_night_and_no_reference_later() -> None:
    faulty = at(2, 200.0, result=result(fallbacks=1))
    assert judge(faulty, History(measurements=[at(1)])).kind is Kind.PASS
    assert night_of(faulty).invalid == ("1 fallbacks to uncompiled code",)
    later = judge(at(3), History(measurements=[at(1), faulty]))
    assert (later.kind, later.nights) == (Kind.PASS, 1)


@given(
    values=st.lists(st.floats(80, 120), min_size=1, max_size=14),
    now=st.floats(80, 120),
    gain=st.floats(0, 20),
    data=st.data(),
)
def test_order_and_duplicates_do_not_matter_and_faster_never_fails(
    values: Sequence[float], now: float, gain: float, data: Any
) -> None:
    history = [at(day, value) for day, value in enumerate(values, 1)]
    tonight = at(20, now)
    shuffled = data.draw(st.permutations([*history, *history[:3], tonight]))
    expected = decide(tonight, History(measurements=history))
    assert decide(tonight, History(measurements=shuffled)) == expected
    if expected.kind == "PASS":
        assert decide(at(20, now + gain), History(measurements=history)).kind == "PASS"


def test_a_run_that_broke_a_law_or_has_no_throughput_is_an_invalid_night() -> None:
    assert night_of(measurement()).invalid == ()
    assert night_of(measurement(invalid=("busy",))).invalid == ("busy",)
    assert night_of(measurement(result=result(fx_errors=1))).invalid == ("1 FX errors",)
    assert night_of(failed("WorkerFailed", "why")).invalid == ("the run failed, WorkerFailed",)
    assert night_of(failed("WorkerFailed", "why")).value is None


def test_later_nights_do_not_change_an_earlier_verdict() -> None:
    history = [at(1), at(2), at(3, 90.0)]
    assert judge(at(2), History(measurements=history)) == judge(at(2), History(measurements=history[:1]))


def test_an_acceptance_by_the_command_turns_the_next_night_green(tmp_path: Path) -> None:
    history = kept(Store(tmp_path), *(at(day) for day in (1, 2, 3)), at(4, 90.0), at(5, 90.0))
    assert judge(at(6, 90.0), history).kind is Kind.FAIL
    command = (
        sys.executable,
        "-m",
        "regression.watch",
        "accept",
        SERIES,
        "--reason",
        "exact attention",
        "--store",
        str(tmp_path),
    )
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "a new level since 2026-01-04T02:00:00+00:00 (exact attention)" in done.stdout
    accepted = read(Store(tmp_path))
    assert judge(at(6, 90.0), accepted).kind is Kind.PASS
    assert [night.accepted for night in nights(accepted, SERIES)] == ["", "", "", "exact attention", ""]


def test_what_cannot_be_accepted_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for directory, message in ((tmp_path, "no night of the series"), (tmp_path / "nothing", "there is no directory")):
        assert acceptance.main(["accept", "x", "--reason", "y", "--store", str(directory)], open_store) == 2
        assert message in capsys.readouterr().err


def test_a_record_in_another_format_is_skipped_and_told(tmp_path: Path) -> None:
    history = kept(
        Store(tmp_path), at(1), {"kind": "measurement", "series": SERIES, "time": at(2).time}, {**gate(1, "x"), "gate": {}}
    )
    assert (len(history.measurements), len(history.notes), len(history.unread)) == (1, 0, 2)


def test_a_changed_fingerprint_is_no_missing_night_and_a_told_alert_is_not_told_again(tmp_path: Path) -> None:
    history = kept(Store(tmp_path), at(1), at(9, series="tiny-cpu on CPU, 2 x 1 s [another]"))
    now = night_of(at(10)).time
    assert missing_nights(by_workload(history), now=now) == []
    now = night_of(at(20)).time
    (alert,) = missing_nights(by_workload(history), now=now)
    told = kept(Store(tmp_path), alert_record(alert, now))
    assert told.alerts == [alert]
    assert missing_nights(by_workload(told), now=now, sent=told.alerts) == []


def test_a_night_without_a_probed_run_is_not_observed() -> None:
    history = History(measurements=[at(1)])
    assert outcomes(at(2), history)["fxprobe"].kind == "INSUFFICIENT"
    note = {"kind": "night", "series": SERIES, "time": at(2).time, "probed": {"failure": "crashed"}}
    failed = outcomes(at(2), dataclasses.replace(history, notes=[note]))["fxprobe"]
    assert (failed.kind, failed.sentence) == ("INSUFFICIENT", "not observed: crashed")


def commit_of(fingerprints: Sequence[tuple[float, dict[str, Any] | None]], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(confirm, "_is_here", lambda commit: commit != "gone")
    history = [at(day, value, fingerprint={"git": git}) for day, (value, git) in enumerate(fingerprints, 1)]
    return confirm.baseline_commit(at(20, 90.0), History(measurements=history))


def test_the_baseline_is_the_clean_commit_of_the_newest_night_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, gone = ({"commit": name, "dirty": False} for name in ("a", "b", "gone"))
    dirty = {"commit": "c", "dirty": True}
    assert commit_of([(100, a), (100, b), (100, dirty), (100, None), (90, gone)], monkeypatch) == ("b", "")
    assert commit_of([(100, a)], monkeypatch) == ("a", "")
    assert commit_of([(100, a), (100, gone)], monkeypatch) == (
        None,
        "gone, the commit of the newest night that passed, is not in this repository",
    )
    assert commit_of([(100, dirty)], monkeypatch)[0] is None
