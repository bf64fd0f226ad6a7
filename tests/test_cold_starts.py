import json
import threading
from pathlib import Path

import pytest

from regression import cold_starts
from regression.cold_starts import Start, outcome_of, speed, summary

FX = """Traceback (most recent call last):
  File "eval_frame.py", line 986, in compile_wrapper
    raise RuntimeError(
RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized function.
error: drafter-1 failed
"""


@pytest.mark.parametrize(
    ("result", "errors", "outcome", "reason"),
    [
        ({"fallbacks": 0, "recompiles_after_warmup": 0, "fx_errors": 0}, "", "clean", ""),
        ({"fallbacks": 2}, "", "uncompiled", "2 fallbacks"),
        ({}, FX, "crash", "RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized function."),
        (
            {},
            "dflash.RecompileError: compiled code was bypassed:\n3 of 9 calls ran no compiled graph\n",
            "uncompiled",
            "3 of 9 calls ran no compiled graph",
        ),
        (
            {},
            "RecompileError: compiled after warm-up:\n- forward (a.py:3) in thread x\n",
            "recompiled",
            "forward (a.py:3) in thread x",
        ),
        ({}, "Segmentation fault (core dumped)", "crash", "Segmentation fault (core dumped)"),
    ],
)
def test_a_start_is_told_by_its_result_or_by_its_error(result: dict[str, int], errors: str, outcome: str, reason: str) -> None:
    assert outcome_of(result, errors) == (outcome, reason)


def test_full_speed_is_reached_by_the_first_step_near_the_steady_rate(tmp_path: Path) -> None:
    rates = [5.0, 50.0, 95.0, 100.0, 102.0, 98.0]
    events = [{"name": "phase", "time_seconds": 10.0, "fields": {"text": "building 3 drafters"}}]
    events += [{"name": "step", "time_seconds": 20.0 + n, "fields": {"tokens_per_second": rate}} for n, rate in enumerate(rates)]
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert speed(path) == (12.0, 100.0)


def test_the_summary_counts_every_start_once() -> None:
    def start(policy: str, outcome: str, reason: str = "", rate: float | None = None) -> Start:
        return Start(policy=policy, outcome=outcome, reason=reason, seconds_to_full_speed=rate, tokens_per_second=rate)

    starts = [
        start("none", "crash", "F"),
        start("none", "crash", "F"),
        start("none", "hang"),
        start("isolate", "clean", rate=3.0),
    ]
    found = summary(starts, ("none", "isolate"))
    assert (found["none"]["crash"], found["none"]["hang"], found["none"]["clean"]) == (2, 1, 0)
    assert found["none"]["reasons"] == {"F": 2}
    assert found["none"]["tokens_per_second"] is None
    assert (found["isolate"]["clean"], found["isolate"]["tokens_per_second"]) == (1, 3.0)


def test_a_cold_start_of_the_default_policy_is_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--policies", "prewarm", "--starts", "1", "--topology", "1t+2d", "--steps", "3", "--batches-per-step", "2"]
    assert cold_starts.main([*flags, "--json", str(tmp_path / "out.json")]) == 0
    found = json.loads(capsys.readouterr().out)["prewarm"]
    assert found["clean"] == 1
    assert found["tokens_per_second"] > 0
    assert json.loads((tmp_path / "out.json").read_text())["starts"][0]["outcome"] == "clean"


def test_one_failure_of_a_policy_that_must_hold_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(policy: str, _command: object, *, timeout_seconds: float) -> Start:  # noqa: ARG001 - the real signature
        return Start(policy=policy, outcome="crash", reason="F", seconds_to_full_speed=None, tokens_per_second=None)

    monkeypatch.setattr(cold_starts, "cold_start", crash)
    assert cold_starts.main(["--policies", "none", "--starts", "1"]) == 0
    assert cold_starts.main(["--policies", "isolate", "--starts", "1"]) == 1


def test_starts_at_one_time_are_all_counted_and_policies_still_take_turns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    together = threading.Barrier(2, timeout=30.0)  # breaks unless two run at one time

    def clean(policy: str, _command: object, *, timeout_seconds: float) -> Start:  # noqa: ARG001 - the real signature
        together.wait()
        return Start(policy=policy, outcome="clean", reason="", seconds_to_full_speed=1.0, tokens_per_second=2.0)

    monkeypatch.setattr(cold_starts, "cold_start", clean)
    flags = ["--policies", "lock,prewarm", "--starts", "3", "--at-once", "2", "--json", str(tmp_path / "out.json")]
    assert cold_starts.main(flags) == 0
    assert {policy: row["clean"] for policy, row in json.loads(capsys.readouterr().out).items()} == {"lock": 3, "prewarm": 3}
    assert [start["policy"] for start in json.loads((tmp_path / "out.json").read_text())["starts"]] == ["lock", "prewarm"] * 3
