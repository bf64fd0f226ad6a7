"""Laws of the command `python -m fixtures.real_run`: which stages begin, and what is refused before any work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fixtures.real_run import ablations, evaluating, training
from fixtures.real_run.__main__ import main
from fixtures.real_run.results import keep
from fixtures.real_run.settings import Settings


def test_stages_that_are_complete_are_skipped_and_bad_input_has_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--preset", "tiny-cpu", "--output", str(tmp_path), "--stage", "prompts", "--prompts", "12", "--heldout", "2"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["prompts"]["prompts"] == {"train": 12, "heldout": 2}
    written = (tmp_path / "prompts" / "train.jsonl").read_bytes()
    (tmp_path / "prompts" / "train.jsonl").write_bytes(written[:10])
    assert main(command) == 0
    assert "complete" in capsys.readouterr().out
    assert (tmp_path / "prompts" / "train.jsonl").read_bytes() == written[:10]
    assert main([*command, "--max-new-tokens", "3"]) == 2
    assert "--max-new-tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stages", "there", "first"),
    [
        (["answers"], [], "prompts comes"),
        (["train"], ["prompts/prompts.json"], "answers comes"),
        (["ablations"], ["prompts/prompts.json"], "answers comes"),
        (["evaluate"], [], "answers comes"),
        (["evaluate"], ["data/COMPLETE"], "train, with --block-size 8, comes"),
        (["evaluate", "train"], ["data/COMPLETE"], "train, with --block-size 8, comes"),
        (["evaluate"], ["data/COMPLETE", "run-b8/config.json"], "train, with --block-size 8, comes"),
        (["specforge"], ["data/COMPLETE"], "train, with --block-size 8, comes"),
    ],
)
def test_a_stage_without_what_an_earlier_one_makes_says_what_comes_first_before_any_work(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    stages: list[str],
    there: list[str],
    first: str,
) -> None:
    monkeypatch.setattr("fixtures.real_run.__main__._run", lambda *_: pytest.fail("a stage has begun"))
    (tmp_path / "specforge").mkdir()
    for name in there:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    command = ["--preset", "tiny-cpu", "--output", str(tmp_path), "--specforge", str(tmp_path), "--stage", *stages]
    assert main(command) == 2
    assert f"the stage {first} first" in capsys.readouterr().err
    assert not (tmp_path / "settings.json").exists()


def test_a_stage_whose_input_an_earlier_one_makes_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr("fixtures.real_run.__main__._run", lambda stage, _settings: begun.append(stage))
    stages = ["prompts", "answers", "train", "evaluate", "ablations"]
    assert main(["--preset", "tiny-cpu", "--output", str(tmp_path), "--stage", *stages]) == 0
    assert begun == stages


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--preset", "nonsense"], "unknown preset 'nonsense'"),
        (["--steps", "0"], "--steps is 0: use at least 1"),
        (["--evaluate-tokens", "-3"], "--evaluate-tokens is -3"),
        (["--block-size", "1"], "--block-size is 1: use at least 2"),
        (["--block-size", "300"], "too short for a block"),
        (["--temperature", "nan"], "--temperature is nan"),
        (["--budgets", "16", "16"], "--budgets names one twice"),
        (["--budgets", "0"], "a tree budget is 0"),
        (["--device", "tpu"], "device 'tpu' is not known"),
        (["--specforge", "nowhere"], "nowhere holds no package specforge"),
        (["--", "--optim.no-such-flag", "3"], "no-such-flag"),
        (["--", "--optim.learning-rate", "-1"], "learning"),
    ],
)
def test_what_a_later_stage_would_refuse_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str], said: str
) -> None:
    monkeypatch.setattr("fixtures.real_run.__main__._run", lambda *_: pytest.fail("a stage has begun"))
    try:
        code: Any = main(["--output", str(tmp_path / "new"), "--preset", "tiny-cpu", *flags])
    except SystemExit as error:  # of the command line's parser
        code = error.code
    assert code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_stages_that_have_nothing_left_to_do_need_no_input(tmp_path: Path) -> None:
    settings = Settings.parse(["--preset", "tiny-cpu", "--output", str(tmp_path)], None)[0]
    numbers = {"tau": 2.0, "trees": [], "speedup_over_plain": 1.0}
    for way in settings.ways:
        keep(evaluating.result_file(settings, "b8", way), evaluating.needs(settings, way, settings.run), numbers)
    (tmp_path / "ablations").mkdir()
    for name in ablations.VARIANTS:
        keep(ablations.result_file(settings, name), ablations.needs(settings), numbers)
    assert main(["--preset", "tiny-cpu", "--output", str(tmp_path), "--stage", "evaluate", "ablations"]) == 0


def test_other_steps_are_refused_by_the_command_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings.parse(["--preset", "tiny-cpu", "--output", str(tmp_path)], None)[0]
    keep(training.result_file(settings), training.needs(settings), {})
    command = ["--preset", "tiny-cpu", "--output", str(settings.output), "--stage", "prompts", "train"]
    assert main([*command, "--steps", "9"]) == 2
    assert "train-b8.json was made with --steps 8, now it is --steps 9: use the same" in capsys.readouterr().err
    assert not (settings.output / "prompts" / "prompts.json").exists()
