import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_training import make_config

from dflash import __main__ as command
from dflash import resuming
from dflash.config import ConfigError, RunConfig, run_config_from_dict, to_dict
from dflash.modeling import contract
from dflash.presets import PRESETS, preset
from dflash.trainer import train

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("main") / "run"
    train(make_config(output, optim={"steps": 1}))
    return output


def flags(output: Path) -> list[str]:
    text = (
        "train --preset tiny-cpu --target.path random:qwen3 --target.mask-token-id 5 "
        "--drafter.init random --data.path synthetic:8 --data.sequence-length 32 --data.num-anchors 4 "
        "--optim.steps 2 --telemetry.wandb off --compile.policy eager"
    )
    return [*text.split(), "--output", str(output)]


def test_the_last_line_of_train_is_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*flags(tmp_path / "run"), "--topology", "1t+2d", "--loss.kind", "dpace"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["preset"], result["topology"], result["steps"]) == ("tiny-cpu", "1t+2d", 2)
    saved = run_config_from_dict(json.loads((tmp_path / "run" / "config.json").read_text()))
    assert saved.loss.kind == "dpace"


def test_a_run_that_ended_before_it_was_measured_says_why_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([*flags(tmp_path / "run"), "--measure"]) == 3
    assert re.search(r"^not measured: .+; give the run more --optim.steps$", capsys.readouterr().err, re.MULTILINE)


def test_what_a_cpu_cannot_do_is_refused_at_once_and_in_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash.assembly.load_target", lambda *_, **__: pytest.fail("a target was loaded"))
    levers = ["--drafter.attention", "flex", "--loss.fp8-head", "--optim.bf16-copies"]
    assert command.main([*flags(tmp_path / "run"), *levers]) == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1
    for words in ("cannot train flex_attention on a CPU", "loss.fp8-head is for GPUs", "optim.bf16-copies is for GPUs"):
        assert words in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--topology", "5t"], "not of the form Nt\\+Md"),
        (["--data.sequence-length", "8"], "too short for a block"),
        (["--optim.clip", "-1"], "optim.clip is -1.0: use a positive number"),
        (["--optim.beta1", "1.0"], "optim.beta1 is 1.0"),
        (["--telemetry.queue-items", "0"], "queue-items is 0: use at least 1"),
        (["--target.path", "package:nope.nope"], "pip install --no-deps nope.nope"),
        (["--output", "/proc/nowhere"], "FileNotFoundError"),
        (["--preset", "large"], "unknown preset 'large': known are tiny-cpu"),
        (["--data.path", "nowhere"], "not a directory of prepared data"),
        (["--compile.policy", "prewarm", "--compile.backend", "magic"], "'magic' is not known to this torch"),
        (["--compile.loss", "--compile.policy", "eager"], "use --compile.no-loss, or another policy"),
    ],
)
def test_bad_settings_exit_with_2_and_say_what_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: list[str], message: str
) -> None:
    arguments = flags(tmp_path / "run")
    if change[0] == "--preset":
        arguments[2] = change[1]
    else:
        arguments += change
    try:
        code = command.main(arguments)
    except SystemExit as stop:  # a value that the configuration itself refuses is reported by the argument parser
        code = stop.code
    assert code == 2
    error = capsys.readouterr().err
    assert re.search(message, error)


def test_a_second_preset_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["--preset", "qwen3-8b"], ["--preset=tiny-cpu"]):
        assert command.main([*flags(tmp_path / "run"), *more]) == 2
        assert "a run has one preset, found tiny-cpu, " in capsys.readouterr().err


def test_a_run_keeps_others_out_of_its_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resuming, "_LOCK_SECONDS", 0.1)
    for resume in ([], ["--resume"]):
        with resuming.held(RunConfig(output=tmp_path / "run")):
            assert command.main([*flags(tmp_path / "run"), *resume]) == 2
        assert f"{tmp_path / 'run'} is in use by another run: wait" in capsys.readouterr().err
    assert command.main([*flags(tmp_path / "none"), "--resume"]) == 2
    assert not (tmp_path / "none").exists()


def test_storage_that_cannot_lock_is_used_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(_lock: object) -> None:
        raise NotImplementedError("no flock here")

    monkeypatch.setattr(resuming.FileLock, "acquire", cannot)
    assert command.main(flags(tmp_path / "run")) == 0
    told = (tmp_path / "run" / "events.jsonl").read_text()
    assert told.count("cannot be locked (no flock here): whether another run uses it is not known") == 1


def test_help_of_several_ranks_is_printed_by_the_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for rank, shown in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as ended:
            command.main(["train", "--help"])
        assert (ended.value.code, bool(capsys.readouterr().out)) == (0, shown)


def test_an_unknown_flag_is_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main([*flags(tmp_path / "run"), "--optim.learningrate", "1"])
    assert caught.value.code == 2
    assert "learningrate" in capsys.readouterr().err


def test_an_unknown_key_of_a_saved_configuration_is_named() -> None:
    values = to_dict(RunConfig())
    values["optim"]["momentum"] = 0.9
    with pytest.raises(ConfigError, match=r"unknown key optim\.momentum: known are steps"):
        run_config_from_dict(values)


def test_export_writes_the_released_form_and_refuses_what_a_server_would_misread(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.main(["export", str(run), str(tmp_path / "out"), "--checkpoint", "last"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 1
    assert contract.check_export(tmp_path / "out") == []
    monkeypatch.setattr(contract, "check_export", lambda _: ["fc.weight is missing"])
    assert command.main(["export", str(run), str(tmp_path / "other")]) == 1
    assert "fc.weight is missing" in capsys.readouterr().err
    assert command.main(["export", str(tmp_path / "empty"), str(tmp_path / "third")]) == 2


def test_usage_without_a_command_is_an_error_and_help_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 2
    assert command.main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in PRESETS)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_survives_a_round_trip_through_json(name: str) -> None:
    config = PRESETS[name]()
    assert config.preset == name
    assert run_config_from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_a_bfloat16_target_trains_on_a_cpu(tmp_path: Path) -> None:
    assert command.main([*flags(tmp_path / "run"), "--target.dtype", "bfloat16"]) == 0


@pytest.mark.parametrize(("dtype", "lossless", "code"), [("float32", False, 1), ("float32", True, 0), ("bfloat16", False, 0)])
def test_lost_tokens_fail_in_float32_only(
    dtype: str, lossless: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(command.COMMANDS, "evaluate", lambda _arguments: {"lossless": lossless, "dtype": dtype})
    assert command.main(["evaluate"]) == code
    assert json.loads(capsys.readouterr().out)["lossless"] is lossless


def test_the_committed_target_of_a_preset_is_found_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert preset("tiny-cpu").target.path == "fixtures/tiny_target/model"
    monkeypatch.chdir(tmp_path)
    assert (Path(preset("tiny-cpu").target.path) / "config.json").is_file()


HELP = """
import sys
from dflash.__main__ import COMMANDS, main
for command in COMMANDS:
    try:
        main([command, "--help"])
        raise AssertionError(command)
    except SystemExit as end:
        assert not end.code, command
    assert not {"torch", "transformers"} & sys.modules.keys(), command
"""


def test_help_of_every_command_imports_nothing_that_takes_long() -> None:
    done = subprocess.run((sys.executable, "-c", HELP), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--optim.learning-rate" in done.stdout
