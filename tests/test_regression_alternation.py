"""Laws of running builds in turns: what counts of a turn, and real processes that are held, let go and ended."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from regression import alternation, sampler
from regression.alternation import Build, BuildFailed, run_in_turns, run_reasons, steps_of, tokens_and_seconds, too_short
from regression.child import Place
from regression.spec import RunSpec

# Steps until SIGTERM and writes what every step saw of the clock; {fault} comes after step 20.
RUN = """
import json, os, pathlib, signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
output = pathlib.Path(sys.argv[1])
output.mkdir()
with output.joinpath("events.jsonl").open("a", buffering=1) as events:
    count, before = 0, time.time()
    while not asked:
        time.sleep(0.002)
        count, now = count + 1, time.time()
        tokens = {rate} * (now - before)
        events.write(json.dumps({{"name": "step", "time_seconds": now, "fields": {{"tokens": tokens}}}}) + "\\n")
        before = now
        if count == 10:
            events.write(json.dumps({{"name": "notice", "fields": {{"text": "steady after 10 steps"}}}}) + "\\n")
        if count == 20:
            {fault}
measure = {{"incomplete": None, "segments": [], "num_devices": 1}}
print(json.dumps({{"topology": "1t+1d", "workers": {workers}, "measure": measure, **{more}}}))
"""
WORKERS = [{"worker": "target-0", "items": 1}, {"worker": "drafter-0", "items": 1}]


@pytest.fixture(autouse=True)
def quick_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "INTERVAL_SECONDS", 0.02)


def build(name: str, directory: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Build:
    values = {"rate": 100.0, "fault": "pass", "workers": WORKERS, "more": {}} | changes
    program = RUN.format(**values)
    monkeypatch.setattr(RunSpec, "command", lambda self, output: [sys.executable, "-c", self.preset, str(output)])
    return Build(name=name, spec=RunSpec(preset=program, gpus=0, segment_seconds=1.0), place=Place(), directory=directory / name)


def test_each_build_gets_its_rate_and_they_never_run_at_one_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = [build("a", tmp_path, monkeypatch), build("b", tmp_path, monkeypatch, rate=300.0)]
    found = run_in_turns(builds, turns=2, turn_seconds=0.5, timeout_seconds=60.0)
    assert found.rates == {"a": pytest.approx(100.0), "b": pytest.approx(300.0)}
    assert [reason for reason in found.invalid if "CPUs" not in reason] == []
    ends = {one.name: [end for end, _ in steps_of((one.directory / "run" / "events.jsonl").read_text())] for one in builds}
    # Order a b b a: between the first and the last end of b's last turns nothing of a ended, and the other way round.
    tagged = sorted([(end, "a") for end in ends["a"]] + [(end, "b") for end in ends["b"]])
    runs = "".join(name for place, (_, name) in enumerate(tagged) if place == 0 or tagged[place - 1][1] != name)
    assert runs.endswith(("aba", "abab")), runs  # b's two turns are neighbours; at the end both are let go


def test_nothing_stays_behind_when_a_build_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = build("dying", tmp_path, monkeypatch, fault="sys.exit('out of tokens')")
    with pytest.raises(BuildFailed, match="out of tokens") as failed:
        run_in_turns([build("other", tmp_path, monkeypatch), dying], turns=2, turn_seconds=0.2, timeout_seconds=60.0)
    assert failed.value.build.name == "dying"
    assert [child for child in psutil.Process().children() if "events.jsonl" in " ".join(child.cmdline())] == []


def test_a_build_that_is_never_steady_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never = build("never", tmp_path, monkeypatch)
    monkeypatch.setattr(alternation._Side, "_has_said", lambda *_: False)
    with pytest.raises(BuildFailed, match="not steady within 0 s"):
        run_in_turns([never], turns=1, turn_seconds=0.1, timeout_seconds=0.3)


def test_a_run_that_ends_by_itself_is_told_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"measure": {"incomplete": "never steady: noise", "segments": [], "num_devices": 1}}
    early = build("early", tmp_path, monkeypatch, fault="asked.append(1)", more=more)
    with pytest.raises(BuildFailed, match="ended before its time: never steady: noise"):
        run_in_turns([early], turns=2, turn_seconds=0.3, timeout_seconds=60.0)


def test_what_the_run_says_of_itself_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = build("idle", tmp_path, monkeypatch, workers=WORKERS[:1], more={"fallbacks": 2})
    found = run_in_turns([idle], turns=1, turn_seconds=0.1, timeout_seconds=60.0)
    assert {"idle: 2 fallbacks", "idle: drafter-0 did nothing"} <= set(found.invalid)


def test_a_compile_while_it_was_timed_does_not_count() -> None:
    result = {"topology": "1t+1d", "workers": WORKERS, "measure": {"segments": [{"compiles": 0}, {"compiles": 2}]}}
    assert run_reasons(result) == ["2 compile phases ended while it was timed"]


STEPS = [(1.0, 10), (2.0, 10), (3.0, 10), (4.0, 10), (14.5, 10), (15.0, 30), (15.5, 30), (16.0, 30), (99.0, 7)]


def test_only_whole_steps_inside_a_turn_count() -> None:
    # The step that ended first in a turn began before it: 3 steps of 10 in 3 s, and 3 of 30 in 1.5 s.
    assert tokens_and_seconds(STEPS, [(0.5, 4.5), (14.0, 16.0)]) == (120, 4.5)
    assert tokens_and_seconds(STEPS, [(50.0, 60.0)]) == (0, 0.0)


def test_a_turn_with_few_steps_is_told() -> None:
    assert too_short(STEPS, [(0.5, 4.5), (14.0, 16.0)]) == []
    assert too_short(STEPS, [(0.5, 3.5), (14.0, 16.0)]) == ["in 1 of 2 turns fewer than 4 steps ended: use longer turns"]


def test_a_line_that_is_being_written_is_no_step() -> None:
    line = json.dumps({"name": "step", "time_seconds": 1.0, "fields": {"tokens": 3}})
    assert steps_of(f"{line}\n{line[:20]}") == [(1.0, 3)]
