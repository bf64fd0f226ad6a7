"""Laws of the nightly command: what it decides, and what it leaves behind."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from helpers_regression import failed, measurement, result

from diagnostics import timeline
from regression import confirm, nightly, report
from regression.child import ChildFailed
from regression.decision import exit_code, outcomes
from regression.history import History, read
from regression.measurement import Measurement
from regression.nightly import main
from regression.sides import SideError
from regression.store import Store

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB"
CLEAN: dict[str, Any] = {"findings": [], "program_exit_code": 0, "not_observed": []}


def night(number: int, per_device: float = 100.0, **changes: Any) -> Measurement:
    changes = {"fingerprint": {"git": {"commit": f"{number:040x}", "dirty": False}}, **changes}
    return measurement(per_device=per_device, time=f"2026-01-{number:02}T00:00:00+00:00", **changes)


HISTORY = [night(1, 99.0), night(2, 100.0), night(3, 101.0)]


def judge(tonight: Measurement, history: list[Measurement]) -> int:
    note = {"kind": "night", "series": tonight.series, "time": tonight.time, "probed": CLEAN}
    return exit_code(outcomes(tonight, History(measurements=history, notes=[note])))


def test_a_night_like_the_others_is_fine() -> None:
    assert judge(night(4), HISTORY) == 0


@pytest.mark.parametrize("key", ["fx_errors", "recompiles_after_warmup", "fallbacks"])
def test_a_problem_fails_whatever_the_history(key: str) -> None:
    assert judge(night(4, result=result(**{key: 1}), invalid=("busy",)), HISTORY) == 1


def test_a_first_night_an_invalid_and_a_suspect_one_are_insufficient_not_failed() -> None:
    assert judge(night(4), []) == 3
    assert judge(night(4, invalid=("busy",)), HISTORY) == 3
    assert judge(night(4, 50.0), [night(1, invalid=("busy",))]) == 3
    assert judge(night(4, 90.0), HISTORY) == 3


def test_a_run_that_failed_fails() -> None:
    assert judge(failed("WorkerFailed", "why"), HISTORY) == 1


@dataclass
class Machine:
    """The command without training: takes these measurements, one an attempt, and these verdicts of the gate."""

    output: Path
    waiting: list[Measurement] = field(default_factory=list)
    gates: list[str] = field(default_factory=list)
    baselines: list[str] = field(default_factory=list)
    probed: dict[str, Any] | None = field(default_factory=lambda: CLEAN)
    here: bool = True
    log: str = ""  # what the measured run prints

    def __call__(self, *measured: Measurement, options: tuple[str, ...] = ()) -> int:
        self.waiting += measured
        return main(["--output", str(self.output), "--gpus", "0", "--wandb", "off", *options])

    def measure(self, _spec: Any, directory: Path, *, timeout_seconds: float, baseline_clock_mhz: float | None) -> Measurement:
        assert timeout_seconds > 0
        assert baseline_clock_mhz is None
        assert not directory.exists()
        if self.log:
            directory.mkdir(parents=True)
            (directory / "stderr.log").write_text(self.log)
        return self.waiting.pop(0)

    def probe(self, *_: Any, **__: Any) -> dict[str, Any]:
        if self.probed is None:
            raise ChildFailed("no report")
        return self.probed

    def gate(self, commit: str, *_: Any, **__: Any) -> dict[str, Any]:
        self.baselines.append(commit)
        if not self.gates:
            raise SideError("does not run")
        kind = self.gates.pop(0)
        return {"kind": kind, "sentence": f"{kind}: so much", "pairs": 8, "baseline": commit}

    @property
    def history(self) -> History:
        return read(Store(self.output / "store"))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    one = Machine(tmp_path / "nights")
    monkeypatch.setattr(nightly, "measure", one.measure)
    monkeypatch.setattr(nightly, "probe", one.probe)
    monkeypatch.setattr(nightly.compile_cache, "summary", lambda: {"directory": None, "reason": "none here"})
    monkeypatch.setattr(timeline, "with_machine", lambda found: found)  # the nights only, whatever this machine has
    monkeypatch.setattr(confirm, "run_gate", one.gate)
    monkeypatch.setattr(confirm, "_is_here", lambda _: one.here)
    return one


def test_every_attempt_is_kept_and_the_last_one_decides(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert machine(night(1)) == 3
    assert machine(night(2, invalid=("busy",)), night(3, 99.0)) == 0
    assert ([one.per_device for one in machine.history.measurements], machine.history.unread) == ([100.0, 100.0, 99.0], [])
    told = capsys.readouterr().err
    assert "attempt 1 of 3 is INVALID: busy" in told
    assert "PASS throughput: 99.0 tok/s per device" in told


@pytest.mark.parametrize(
    ("gate", "code", "word"), [("FAIL", 1, "confirmed by the gate"), ("PASS", 0, "CLEARED"), ("UNKNOWN", 3, "gate: UNKNOWN")]
)
def test_a_suspect_night_is_compared_with_the_newest_night_that_passed_and_judged_again(
    machine: Machine, capsys: pytest.CaptureFixture[str], gate: str, code: int, word: str
) -> None:
    machine(night(1)), machine(night(2))
    machine.gates = [gate]
    assert machine(night(3, 90.0)) == code
    assert machine.baselines == [f"{2:040x}"]
    assert word in " ".join(capsys.readouterr().err.split())
    assert [one.get("gate", {}).get("kind") for one in machine.history.notes] == [None, None, gate]
    assert len(machine.history.measurements) == 3
    page = (machine.output / "report.html").read_text()
    assert f"Compared with {2:040x} in the same night: {gate}: so much (8 pairs)" in page


def test_a_named_baseline_is_used_and_a_gate_that_cannot_run_is_told(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    for day in (1, 2, 3):
        Store(machine.output / "store").add(night(day).to_record())
    assert machine(night(4, 90.0), options=("--baseline", "v1")) == 3
    assert machine.baselines == ["v1"]
    assert "The gate did not run: does not run" in (machine.output / "report.html").read_text()
    machine.here = False
    assert machine(night(5, 90.0)) == 1  # the second valid night in a row
    assert "is not in this repository; name a commit with --baseline" in " ".join(capsys.readouterr().err.split())


def test_the_gate_does_not_run_for_a_night_above_its_limit(machine: Machine) -> None:
    machine(night(1))
    machine(night(2, 96.0)), machine(night(3, invalid=("x",)), options=("--attempts", "1"))
    assert machine.baselines == []


def test_the_probed_run_decides_too_and_its_findings_are_kept(machine: Machine) -> None:
    machine(night(1))
    finding = {"id": "F1", "severity": "error", "what": "met", "who": ["a"], "where": ["b"], "why": "c", "what_to_do": "d"}
    machine.probed = {**CLEAN, "findings": [finding]}
    assert machine(night(2)) == 1
    assert machine.history.notes[-1]["probed"]["findings"] == [finding]
    machine.probed = None
    assert machine(night(3)) == 3
    assert "Not observed: no report" in (machine.output / "report.html").read_text()


def test_a_night_that_failed_shows_the_known_failures_in_its_log_and_what_to_do(machine: Machine) -> None:
    assert machine(night(1)) == 3
    assert not {"triage", "timeline"} & machine.history.notes[-1].keys()
    machine.log = f'{"Traceback (most recent call last):"}\n  File "train.py", line 3, in step\n    loss.backward()\n{OOM}\n'
    assert machine(dataclasses.replace(failed("OutOfMemoryError", OOM), time="2026-01-02T00:00:00+00:00")) == 1
    (found,) = machine.history.notes[-1]["triage"]["failures"]
    assert found["kind"] == "cuda-oom"
    for name in ("report.html", "summary.md"):
        text = (machine.output / name).read_text()
        assert found["title"] in text, name
        assert "Dated before the change" in text, name


def test_a_night_that_fell_shows_what_is_dated_before_the_change(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    change = {"change": "healthy -> slow", "before": "9 tok/s in a", "after": "5 tok/s in b", "suspects": ["cache deleted"]}
    monkeypatch.setattr(timeline, "summary", lambda folder: [change] if folder == machine.output else [])
    machine(night(1)), machine(night(2)), machine(night(3, 90.0))
    assert machine.history.notes[-1]["timeline"] == [change]
    page = (machine.output / "report.html").read_text()
    assert "healthy -&gt; slow, after 9 tok/s in a" in page
    assert "cache deleted" in page


def test_the_files_are_written_told_and_made_again_from_the_store(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine(night(1)), machine(night(2))
    told = capsys.readouterr().err
    names = ("report.html", "summary.md", "junit.xml")
    written = {name: (machine.output / name).read_text() for name in names}
    assert all(str(machine.output / name) in told for name in names)
    assert "No directory is known: none here" in written["report.html"]
    assert "python -m regression.nightly --output" in written["summary.md"]
    assert "--measure.segments 3" in written["summary.md"]
    assert ET.fromstring(written["junit.xml"]).find("testsuite[@failures='0'][@errors='0'][@tests='7']") is not None
    for name in names:
        (machine.output / name).unlink()
    assert report.main([str(machine.output)]) == 0
    assert {name: (machine.output / name).read_text() for name in names} == written


def test_a_workload_that_stopped_is_told_once_a_day(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    other = dataclasses.replace(night(1), name="w", series="w [k]")
    Store(machine.output / "store").add(other.to_record())
    machine(night(1)), machine(night(2))
    assert capsys.readouterr().err.count("MISSING w: no valid night since") == 1


def test_a_night_that_cannot_be_read_is_told_and_the_others_count(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(machine.output / "store")
    store.add(night(1).to_record())
    store.add({"kind": "measurement", "series": "s", "time": "2026-01-01T00:00:00+00:00", "version": "another"})
    store.accept("s", "why")
    assert machine(night(2)) == 0
    assert "in another format, skipped" in " ".join(capsys.readouterr().err.split())


def test_only_nights_of_the_same_series_are_compared(machine: Machine) -> None:
    Store(machine.output / "store").add(dataclasses.replace(night(1, 500.0), series="another").to_record())
    assert machine(night(2)) == 3


@pytest.mark.parametrize(
    "change",
    [["--gpus", "-1"], ["--gpus", "1000"], ["--attempts", "0"], ["--segment-seconds", "0"], ["--burn-share", "1"], None],
)
def test_bad_usage_is_told_before_anything_runs(tmp_path: Path, machine: Machine, change: list[str] | None) -> None:
    with pytest.raises(SystemExit) as stop:
        main([] if change is None else ["--output", str(tmp_path), *change])
    assert (stop.value.code, machine.waiting) == (2, [])


def test_notes_are_json(machine: Machine) -> None:
    machine(night(1))
    (note,) = machine.history.notes
    assert json.loads(json.dumps(note)) == note
    assert set(note["commands"]) == {"this night", "the measured run", "the probed run"}
