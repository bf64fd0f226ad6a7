"""Laws of regression.headline: what runs where, what is kept, and when a step did as expected."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from regression import headline
from regression.headline_steps import SCALING, Sizes, Step, steps

RESULT = 'print("words"); print(\'{"tokens_per_second": 12.5, "fx_errors": 0}\')'


def step(name: str, code: str, **fields: Any) -> Step:
    return Step(name=name, what="a command", command=(sys.executable, "-c", code), **fields)


def run(monkeypatch: pytest.MonkeyPatch, output: Path, chosen: list[Step], *flags: str, left_out: tuple[str, ...] = ()) -> int:
    monkeypatch.setattr(headline, "steps", lambda _sizes: (chosen, list(left_out)))
    return headline.main(["--output", str(output), *flags])


@pytest.mark.parametrize("gpus", [0, 1, 2, 5, 8])
def test_no_step_needs_more_gpus_than_there_are_and_what_is_left_out_is_said(gpus: int) -> None:
    chosen, left_out = steps(Sizes(gpus=gpus))
    names = [each.name for each in chosen]
    assert len(set(names)) == len(names)
    for each in chosen:
        if "--topology" in each.command and "cold" not in each.name:
            targets, drafters = each.command[each.command.index("--topology") + 1].split("+")
            assert int(targets[:-1]) + int(drafters[:-1]) <= max(gpus, 2 * (gpus == 0))
    fitting = [name for name in SCALING if f"scaling-{name}" in names or any(name in word for word in left_out)]
    assert gpus < 2 or len(fitting) >= len(SCALING) - 1  # one of them is the main row
    assert ("train-processes" in names) == (gpus != 1)
    assert any("processes" in sentence for sentence in left_out) == (gpus == 1)


def test_every_step_that_leaves_files_gets_a_directory_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert {each.name for each in steps(Sizes(gpus=0))[0] if each.needs_output} == {"gate-itself", "gate-planted-slowdown"}
    tells = "import json, sys; print(json.dumps({'output': sys.argv[sys.argv.index('--output') + 1]}))"
    run(monkeypatch, tmp_path, [step("one", tells, needs_output=True), step("two", tells, needs_output=True)])
    found = [json.loads((tmp_path / f"{name}.json").read_text())["result"]["output"] for name in ("one", "two")]
    assert found == [str(tmp_path / "one.run"), str(tmp_path / "two.run")]


def test_eight_gpus_train_the_incident_s_size() -> None:
    chosen, _ = steps(Sizes(gpus=8))
    main = next(each.command for each in chosen if each.name == "train-threads")
    assert main[main.index("--topology") + 1] == "5t+3d"
    assert "random:qwen3-32b" in main
    assert all("random:qwen3-32b" not in each.command for each in steps(Sizes(gpus=2))[0])


def test_a_step_is_kept_and_not_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counted = f"open({str(tmp_path / 'runs')!r}, 'a').write('x'); {RESULT}"
    chosen = [step("one", counted), step("two", RESULT)]
    assert run(monkeypatch, tmp_path / "out", chosen, "--only", "one") == 3  # the other one is missing
    assert run(monkeypatch, tmp_path / "out", chosen) == 0
    assert (tmp_path / "runs").read_text() == "x"
    found = json.loads((tmp_path / "out" / "headline.json").read_text())
    assert found["kind"] == "result"
    assert found["steps"]["two"]["result"] == {"tokens_per_second": 12.5, "fx_errors": 0}


@pytest.mark.parametrize(
    ("code", "fields", "expected", "exit_code"),
    [
        (RESULT, {}, True, 0),
        ("raise SystemExit(1)", {}, False, 1),
        ("raise SystemExit(1)", {"exit_codes": (1,)}, True, 0),  # a planted fault that is found
        (RESULT, {"exit_codes": (1,)}, False, 1),  # one that is not
        ('print(\'{"tokens_per_second": 9.0, "fallbacks": 2}\')', {}, False, 1),  # fast, but not compiled
    ],
)
def test_a_step_does_as_expected_by_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, fields: dict[str, Any], expected: bool, exit_code: int
) -> None:
    assert run(monkeypatch, tmp_path, [step("it", code, **fields)]) == exit_code
    assert json.loads((tmp_path / "it.json").read_text())["as_expected"] is expected


def test_what_is_left_out_is_never_a_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run(monkeypatch, tmp_path, [step("it", RESULT)], left_out=("scaling: needs 2 GPUs",)) == 3


TRAINS = """
import json, pathlib, signal, sys, time
run = pathlib.Path(sys.argv[sys.argv.index("--output") + 1]); run.mkdir()
ended = []
signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
(run / "events.jsonl").write_text('{"name": "step"}\\n')
while not ended: time.sleep(0.01)
print(json.dumps({"tokens_per_second": 3.0}))
"""


def test_training_goes_on_for_its_seconds_and_is_asked_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run(monkeypatch, tmp_path, [step("train", TRAINS, seconds=0.2)]) == 0
    row = json.loads((tmp_path / "train.json").read_text())
    assert (row["result"], row["exit_code"]) == ({"tokens_per_second": 3.0}, 0)
    assert row["seconds"] >= 0.2


def test_training_without_a_result_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run(monkeypatch, tmp_path, [step("train", "pass", seconds=0.2)]) == 3
    assert "no result line" in json.loads((tmp_path / "train.json").read_text())["failure"]


@pytest.mark.parametrize("flags", [["--gpus", "99"], ["--only", "nothing"], ["--seconds", "0"], ["--starts", "0"]])
def test_bad_usage_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str]) -> None:
    monkeypatch.setattr(headline, "_gpus_found", lambda: 0)
    with pytest.raises(SystemExit) as stopped:
        headline.main(["--output", str(tmp_path / "out"), *flags])
    assert stopped.value.code == 2


def test_a_place_for_results_that_cannot_be_made_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, tmp_path / "file", [step("it", RESULT)])
    assert stopped.value.code == 2
    assert "name a directory" in capsys.readouterr().err


def test_the_list_shows_commands_as_they_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert headline.main(["--output", str(tmp_path / "out"), "--list"]) == 0
    shown = capsys.readouterr().err
    assert f"--output {tmp_path}/out/train-threads.run" in shown
    assert "asked to end 390 s after its first step" in shown
    assert not (tmp_path / "out").exists()
