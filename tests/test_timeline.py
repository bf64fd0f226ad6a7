"""Laws of the timeline: the case study's causes come first, dates that cannot be are left out and said, nothing is changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from diagnostics import timeline
from diagnostics.dated import caches, code, machine, packages, runs
from diagnostics.dated.deduced import deduce
from diagnostics.dated.entry import Entry, Found
from diagnostics.dated.moments import Moment, moments, states
from diagnostics.dated.places import places, usual
from diagnostics.dated.runs import Run, read
from diagnostics.dated.stamps import Stamps
from fixtures.case_study import dated

NOW = time.mktime((2026, 6, 1, 12, 0, 0, 0, 0, -1))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("case")
    dated.build(folder)
    return folder


@pytest.fixture(scope="module")
def changes(case: Path) -> list[Moment]:
    found, logs = timeline.gather(places([case]), NOW, system=False)
    return moments(states(logs), deduce(found.entries, logs))


def kinds(change: Moment) -> list[str]:
    return [suspect.entry.kind for suspect in change.suspects]


def write_log(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def steps(begin: float, rates: list[float]) -> list[str]:
    return [
        f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(begin + 10 * n))} step {n} {rate:.0f} tok/s"
        for n, rate in enumerate(rates)
    ]


def test_the_case_study_puts_cache_deletion_and_torch_replacement_first(changes: list[Moment], case: Path) -> None:
    slower, crash = changes
    assert (slower.before.label, slower.after.label, crash.after.label) == ("healthy", "slow", "failed")
    assert crash.after.kinds == ("F1",)
    assert kinds(crash)[:2] == ["cache deleted", "torch replaced"]
    assert [suspect.entry.where for suspect in crash.suspects[:2]] == [
        str(case / "torchinductor_team"), str(case / "venv/lib/python3.12/site-packages")]  # fmt: skip
    assert kinds(slower)[0] == "torch replaced"


def test_a_replaced_build_is_seen_by_the_libraries_that_it_left(changes: list[Moment]) -> None:
    assert "libraries of CUDA 13 came (2" in changes[0].suspects[0].entry.what


def test_what_lies_after_a_change_or_before_the_last_good_run_is_no_suspect(changes: list[Moment]) -> None:
    for change in changes:
        for suspect in change.suspects:
            assert suspect.entry.time_seconds > change.since_seconds
            earliest = suspect.entry.not_before_seconds or suspect.entry.time_seconds
            assert earliest <= change.after.begin_seconds + 60
    assert all("Train on eight GPUs" not in suspect.entry.what for change in changes for suspect in change.suspects)


def test_the_command_prints_and_writes_all_that_and_changes_nothing(
    case: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in case.rglob("*")}
    out = tmp_path / "out.json"
    assert timeline.main([str(case), "--json", str(out)]) == 1
    assert {path: path.stat().st_mtime_ns for path in case.rglob("*")} == before
    printed = capsys.readouterr().out
    assert "slow -> failed" in printed
    assert "suspect 1" in printed
    written: dict[str, Any] = json.loads(out.read_text())
    assert written["changes"][1]["suspects"][0]["entry"]["kind"] == "cache deleted"
    times = [entry["time_seconds"] for entry in written["entries"]]
    assert times == sorted(times)


def test_installs_by_pip_itself_are_dated_and_one_pip_run_is_one_entry(tmp_path: Path) -> None:
    wheels = [wheel(tmp_path, "torch", "2.11.0+cu128"), wheel(tmp_path, "left_pad", "1.0")]
    target = tmp_path / "site-packages"
    begun = time.time()
    command = (
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--no-compile",
        "--target",
        str(target),
        *wheels,
    )
    subprocess.run(command, check=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    (entry,) = packages.find(target, time.time()).entries
    assert entry.kind == "torch installed"
    assert entry.fields["packages"] == {"torch": "2.11.0+cu128", "left-pad": "1.0"}
    assert begun - 2 <= entry.time_seconds <= time.time()


def wheel(folder: Path, name: str, version: str) -> str:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", f"{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n")
    return str(path)


def test_two_builds_in_one_environment_are_told(tmp_path: Path) -> None:
    for version, at in (("2.11.0+cu128", NOW - 9000), ("2.11.0+cu130", NOW - 5000)):
        (tmp_path / f"torch-{version}.dist-info").mkdir()
        os.utime(tmp_path / f"torch-{version}.dist-info", (at, at))
    found = packages.find(tmp_path, NOW).entries
    assert [(entry.kind, entry.time_seconds) for entry in found if "there twice" in entry.what] == [
        ("torch replaced", NOW - 5000)
    ]


def test_an_emptied_cache_is_dated_by_its_folder_and_a_thinned_one_too(tmp_path: Path) -> None:
    emptied, thinned = tmp_path / "torchinductor_a", tmp_path / "torchinductor_b"
    for folder in (emptied, thinned):
        folder.mkdir()
    (thinned / "kernel.py").write_text("x")
    os.utime(thinned / "kernel.py", (NOW - 9000, NOW - 9000))
    for folder in (emptied, thinned):
        os.utime(folder, (NOW - 100, NOW - 100))
    assert [(entry.kind, entry.time_seconds) for entry in caches.find(emptied, NOW).entries] == [("cache emptied", NOW - 100)]
    assert [(entry.kind, entry.time_seconds) for entry in caches.find(thinned, NOW).entries] == [
        ("cache born", NOW - 9000),
        ("cache lost entries", NOW - 100),
    ]


def test_a_cache_older_than_the_runs_was_not_deleted(tmp_path: Path) -> None:
    run = read(write_log(tmp_path / "a.log", steps(NOW - 5000, [100.0] * 5)), NOW)
    born = Entry(time_seconds=NOW - 9000, kind="cache born", what="", where="c", how="")
    assert [entry.kind for entry in deduce([born], [run])] == ["cache born"]
    late = Entry(time_seconds=NOW - 100, kind="cache born", what="", where="c", how="")
    deleted = deduce([late], [run])[1]
    assert (deleted.kind, deleted.not_before_seconds, deleted.time_seconds) == ("cache deleted", run.end_seconds, NOW - 100)


def test_a_slow_down_within_one_run_is_a_change_at_its_time(tmp_path: Path) -> None:
    run = read(write_log(tmp_path / "a.log", steps(NOW - 9000, [1000.0] * 60 + [200.0] * 60)), NOW)
    (change,) = moments(states([run]), [])
    assert (change.before.label, change.after.label) == ("healthy", "slow")
    assert abs(change.after.begin_seconds - (NOW - 9000 + 600)) <= 60


def test_a_warning_in_the_log_of_a_slow_run_is_told_with_it(tmp_path: Path) -> None:
    lines = steps(NOW - 9000, [1000.0] * 60 + [200.0] * 60)
    lines.insert(60, "UserWarning: flex_attention called without torch.compile() - this will use an unfused implementation")
    (change,) = moments(states([read(write_log(tmp_path / "a.log", lines), NOW)]), [])
    assert "warns of F7-flex" in change.after.what


def test_a_long_log_is_thinned_and_keeps_its_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_MAX_SAMPLES", 100)
    run = read(write_log(tmp_path / "a.log", steps(NOW - 90_000, [1000.0] * 2000 + [200.0] * 2000)), NOW)
    assert len(run.samples) < 100
    (change,) = moments(states([run]), [])
    assert abs(change.after.begin_seconds - (NOW - 90_000 + 20_000)) < 3000
    assert run.end_seconds == NOW - 90_000 + 39_990


@pytest.mark.parametrize("name", ["run.log", "events.jsonl"])
def test_a_growing_log_is_read_up_to_its_size_when_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    lines = steps(NOW - 3600, [100.0] * 20)
    if name == "events.jsonl":
        fields = {"name": "step", "fields": {"tokens_per_second": 100.0}}
        lines = [json.dumps({"time_seconds": NOW - 3600 + 10 * n, **fields}) for n in range(20)]
    path = write_log(tmp_path / name, lines)
    stamp = runs._Reading.stamp

    def another_line(reading: runs._Reading, line: int, seconds: float) -> None:
        stamp(reading, line, seconds)
        if line < 500:
            with path.open("a") as file:
                file.write(lines[-1] + "\n")

    monkeypatch.setattr(runs._Reading, "stamp", another_line)
    monkeypatch.setattr("diagnostics.logs.reader.BLOCK_BYTES", 100)
    assert len(read(path, NOW).samples) == 20


def test_noise_is_no_change(tmp_path: Path) -> None:
    run = read(write_log(tmp_path / "a.log", steps(NOW - 9000, [1000.0 - 250 * (n // 10 % 2) + n % 7 for n in range(120)])), NOW)
    assert moments(states([run]), []) == []


def test_our_events_and_other_units_are_read(tmp_path: Path) -> None:
    events = [
        json.dumps({"name": "step", "time_seconds": NOW - 900 + n, "fields": {"tokens_per_second": 500.0}}) for n in range(5)
    ]
    run = read(write_log(tmp_path / "events.jsonl", [*events, "{broken"]), NOW)
    assert (run.unit, run.begin_seconds, run.segments[0].rate) == ("tok/s", NOW - 900, 500.0)
    assert rate(tmp_path, "12%|#  | 3/20 [00:01<00:09, 3.25it/s]") == ("it/s", 3.25)
    assert rate(tmp_path, "throughput 21.5 Ktok/s") == ("tok/s", 21_500.0)
    assert rate(tmp_path, "loss 1.2 tok/s 21,503") == ("tok/s", 21_503.0)
    assert rate(tmp_path, '{"tokens_per_second": 7.5}') == ("tok/s", 7.5)


def rate(folder: Path, line: str) -> tuple[str, float]:
    run: Run = read(write_log(folder / "one.log", [line]), NOW)
    return run.unit, run.samples[0][1]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("2026-05-04T10:00:00Z x", 1777888800.0),
        ("[2026-05-04 10:00:00,123] x", None),
        ("2026-05-04 12:00:00+02:00 x", 1777888800.0),
        ("[rank0]:[E504 10:00:00.123456 x.cpp:1] y", None),
        ("May  4 10:00:00 host kernel: x", None),
    ],
)
def test_stamps_of_loggers_are_read(tmp_path: Path, line: str, expected: float | None) -> None:
    path = write_log(tmp_path / "a.log", [line])
    os.utime(path, (NOW, NOW))
    local = time.mktime((2026, 5, 4, 10, 0, 0, 0, 0, -1))
    assert Stamps(path, NOW).of(line) == (local if expected is None else expected)


def test_a_stamp_without_a_year_is_not_in_the_future(tmp_path: Path) -> None:
    path = write_log(tmp_path / "a.log", [])
    os.utime(path, (NOW, NOW))
    seconds = Stamps(path, NOW).of("E1211 10:00:00.123456 7 x.py:1] y")
    assert seconds == time.mktime((2025, 12, 11, 10, 0, 0, 0, 0, -1))
    assert Stamps(path, NOW).of("E1399 10:00:00.123456 7 x.py:1] y") is None


def test_clocks_that_cannot_be_are_left_out_and_said(tmp_path: Path) -> None:
    place, cache = tmp_path / "site-packages", tmp_path / "torchinductor_a"
    for folder, at in (("a-1.dist-info", 0), ("b-1.dist-info", NOW + 10**7), ("c-1.dist-info", NOW - 50)):
        (place / folder).mkdir(parents=True)
        os.utime(place / folder, (at, at))
    found = packages.find(place, NOW)
    assert [entry.fields["packages"] for entry in found.entries] == [{"c": "1"}]
    assert "2 packages not believed" in found.notes[0]
    cache.mkdir()
    (cache / "k").write_text("")
    os.utime(cache / "k", (NOW + 10**7, NOW + 10**7))
    assert "not believed" in caches.find(cache, NOW).notes[0]
    run = read(write_log(tmp_path / "a.log", [*steps(NOW - 500, [1.0] * 3), *steps(NOW - 9000, [1.0] * 3)]), NOW)
    assert any("jumps back 1 times" in note for note in run.notes)


def test_a_machines_log_gives_driver_loads_and_upgrades(tmp_path: Path) -> None:
    dpkg = write_log(
        tmp_path / "dpkg.log",
        ["2026-05-04 10:00:00 upgrade nvidia-driver-580:amd64 580.65 580.82", "2026-05-04 10:00:00 upgrade vim:amd64 1 2"],
    )
    kernel = write_log(
        tmp_path / "kern.log",
        [
            "May  4 10:00:00 h kernel: NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.82.07  Mon",
            "May  4 10:00:00 h kernel: other",
        ],
    )
    os.utime(kernel, (NOW, NOW))
    assert [entry.kind for path in (dpkg, kernel) for entry in machine.of_log(path, NOW).entries] == [
        "driver installed",
        "driver loaded",
    ]


def test_bad_input_is_said_with_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("nowhere", "file.log"):
        (tmp_path / "file.log").write_text("x")
        with pytest.raises(SystemExit) as stopped:
            timeline.main([str(tmp_path / wrong)])
        assert stopped.value.code == 2
    (tmp_path / "file.log").write_bytes(bytes(range(1, 32)) * 99)
    (tmp_path / "repository" / ".git").mkdir(parents=True)
    assert timeline.main([str(tmp_path)]) == 3
    printed = capsys.readouterr().out
    assert "it is binary" in printed
    assert "git does not answer" in printed
    (tmp_path / "file.log").write_text("\n".join(steps(NOW - 900, [1.0] * 30)))
    assert timeline.main([str(tmp_path)]) == 3


def test_no_secret_of_a_log_or_commit_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path / "a.log", steps(NOW - 9000, [100.0] * 9))
    failure = ["Traceback (most recent call last):", '  File "/a/b.py", line 1, in f', "RuntimeError: token=plant failed"]
    write_log(tmp_path / "b.log", [*steps(NOW - 4000, [100.0] * 9), *failure])
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(("git", "init", "-q", str(tmp_path / "r")), check=True)
    subprocess.run(("git", "-C", str(tmp_path / "r"), *who, "commit", "-q", "--allow-empty", "-m", "token=plant"), check=True)
    assert timeline.main([str(tmp_path), "--json", str(tmp_path / "out.json")]) == 1
    shown = capsys.readouterr().out
    assert "token=*** failed" in shown
    assert "plant" not in shown + (tmp_path / "out.json").read_text()


def test_junk_among_events_is_passed_over(tmp_path: Path) -> None:
    times = ("-1e18", "1e300", "NaN", "9" * 400)
    junk = ["[" * 100_000, *(f'{{"time_seconds": {seconds}}}' for seconds in times),
            '{"time_seconds": 1.7e9, "name": "step", "fields": "x"}',
            '{"time_seconds": 1.7e9, "name": "step", "fields": {"tokens_per_second": NaN}}']  # fmt: skip
    write_log(tmp_path / "events.jsonl", junk)
    assert timeline.main([str(tmp_path)]) == 3
    run = read(tmp_path / "events.jsonl", NOW)
    assert (run.begin_seconds, run.end_seconds, run.samples) == (1.7e9, 1.7e9, [])


def test_a_run_before_the_year_2000_is_left_out(tmp_path: Path) -> None:
    os.utime(write_log(tmp_path / "a.log", ["100 tok/s"]), (86_400, 86_400))
    found, logs = timeline.gather(places([tmp_path]), NOW, system=False)
    assert (logs, "not believed" in found.notes[-1]) == ([], True)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.log")
    assert places([tmp_path]).logs == []


def test_a_current_folder_that_was_deleted_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert usual().notes == ["the current folder was deleted: not looked at"]


def test_two_equal_runs_are_no_change(tmp_path: Path) -> None:
    for name, at in (("a.log", NOW - 9000), ("b.log", NOW - 4000)):
        write_log(tmp_path / name, steps(at, [100.0] * 9))
    assert timeline.main([str(tmp_path)]) == 0


def test_a_folder_that_may_not_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").mkdir()
    real = os.scandir

    def scandir(path: Any) -> Any:  # root may read everything: the refusal is that of the operating system
        if str(path).endswith("secret"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert any("secret: Permission denied" in note for note in places([tmp_path]).notes)


def test_commits_are_dated_by_git(case: Path) -> None:
    found = code.find(case / "code", NOW).entries
    assert [entry.what.partition(" ")[2][8:] for entry in sorted(found, key=lambda entry: entry.time_seconds)] == [
        "Train on eight GPUs",
        "Skip the check of the tracing flag",
    ]


def test_the_summary_is_the_change_with_its_suspects(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "with_machine", lambda found: found)
    monkeypatch.setattr(machine, "of_this_machine", lambda _: Found())
    told = timeline.summary(case)
    assert told
    assert set(told[0]) == {"change", "before", "after", "suspects"}
    assert "cache" in told[0]["suspects"][0]
