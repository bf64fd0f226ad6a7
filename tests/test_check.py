"""Laws of `check`: clean checkpoints pass, what is missing is said, bad input is refused, and the exit code tells them apart."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_checking import STEPS, TARGET, cached_load, verdicts

from dflash import __main__ as command
from dflash.checking import runner, subject
from dflash.checking.settings import ALWAYS_REQUIRED, Check
from dflash.config import DrafterConfig, TargetConfig
from dflash.modeling.contract import write_export
from dflash.modeling.drafter import Drafter
from dflash.modeling.target import drafter_shape

UNTRAINED = {"alignment.label-offset", "alignment.feature-layer", "alignment.rope"}
TEMPLATE = {"template.prefix", "template.same", "template.render", "template.thinking", "template.supervision"}


@pytest.fixture(autouse=True)
def one_load_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "load_target", cached_load)


@pytest.fixture(scope="session")
def run(trained_run: Path) -> Path:
    return trained_run


@pytest.fixture(scope="session")
def export(run: Path) -> Path:
    return run.parent / "export"


def random_export(path: Path, family: str, block: int, seed: int, *, record: bool = True) -> Path:
    """An untrained drafter of a random target."""
    target = TargetConfig(path=f"random:{family}", dtype="float32", mask_token_id=5)
    model, _ = cached_load(target, device=torch.device("cpu"))
    shape = drafter_shape(model, DrafterConfig(block_size=block, num_layers=2, num_features=3), 5)
    weights = Drafter(shape, generator=torch.Generator().manual_seed(seed)).state_dict()
    known = {"target": dataclasses.asdict(target), "data": "synthetic:4", "step": 0}
    write_export(path, weights, shape, target.path, known if record else None)
    return path


def status_of(found: dict[str, Any], status: str) -> set[str]:
    return {name for name, (word, _) in found.items() if word == status}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trained_run_passes_everything(run: Path, dtype: str) -> None:
    found = verdicts(run, dtype=dtype)
    assert status_of(found, "pass") == set(found) > set(ALWAYS_REQUIRED)
    assert {name.partition(".")[0] for name in found} == {"contract", "leak", "alignment", "parity", "template"}


def test_an_export_finds_target_and_data_by_its_record(run: Path, export: Path) -> None:
    found = verdicts(export)
    assert status_of(found, "pass") == set(found)
    assert status_of(verdicts(run / "checkpoints" / f"step-{STEPS:06d}", probes=("contract",)), "pass") < set(found)


@pytest.mark.parametrize(
    ("family", "block", "seed", "dtype"),
    [
        ("llama", 16, 2, "float32"),
        ("qwen3_moe", 8, 3, "bfloat16"),
        ("gemma3", 2, 4, "float32"),
    ],
)
def test_untrained_drafters_of_any_target_raise_no_false_alarm(
    tmp_path: Path, family: str, block: int, seed: int, dtype: str
) -> None:
    found = verdicts(random_export(tmp_path / "export", family, block, seed), dtype=dtype, max_tokens=16)
    assert status_of(found, "fail") == set()
    assert status_of(found, "not observed") == UNTRAINED | TEMPLATE | {"contract.tokenizer"}


@pytest.mark.parametrize("lost", ["input_embedding_scale", "final_logit_softcapping"])
def test_an_export_that_hides_what_gemma_does_at_its_ends_fails(tmp_path: Path, lost: str) -> None:
    export = random_export(tmp_path / "export", "gemma3", 4, 0, record=False)
    values = json.loads((export / "config.json").read_text())
    assert values["dflash_config"].pop(lost) == {"input_embedding_scale": 8.0, "final_logit_softcapping": 30.0}[lost]
    (export / "config.json").write_text(json.dumps(values))
    found = verdicts(export, target="random:gemma3", probes=("contract",))
    assert status_of(found, "fail") == {"contract.ends"}
    assert lost in found["contract.ends"][1]


def test_without_data_the_target_writes_the_text(export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = shutil.copytree(export, tmp_path / "export")
    record = json.loads((other / "training.json").read_text())
    (other / "training.json").write_text(json.dumps(record | {"data": "gone"}))
    assert command.main(["check", str(other), "--probes", "parity", "--max-tokens", "16"]) == 0
    assert "that the target wrote to 4 built-in prompts, because" in result_of(capsys)["texts"]
    assert command.main(["check", str(other), "--probes", "template"]) == 3
    assert "the recorded data cannot be used" in capsys.readouterr().err


def test_what_a_hybrid_target_cannot_show_is_said_and_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = random_export(tmp_path / "export", "qwen3_5", 4, 0)
    assert command.main(["check", str(export), "--max-tokens", "16"]) == 3
    result = result_of(capsys)
    assert result["failed"] == []
    assert {"leak.target-documents", "parity.features", "parity.logits"} <= set(result["not_observed"])
    assert result["required_missing"] == ["parity.logits"]


def test_without_a_target_only_the_files_are_observed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = random_export(tmp_path / "export", "qwen3", 4, 0, record=False)
    assert command.main(["check", str(export)]) == 3
    result = result_of(capsys)
    assert result["required_missing"] == ["leak.context", "parity.logits"]
    assert {"contract.target", "contract.record", "leak.all", "alignment.all", "parity.all"} <= set(result["not_observed"])
    assert command.main(["check", str(export), "--target", "random:qwen3", "--probes", "leak"]) == 0


def test_the_exit_code_is_1_where_a_check_failed_even_if_others_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = random_export(tmp_path / "export", "qwen3", 4, 0, record=False)
    values = json.loads((export / "config.json").read_text())
    (export / "config.json").write_text(json.dumps(values | {"layer_types": None}))
    assert command.main(["check", str(export)]) == 1
    assert result_of(capsys)["failed"] == ["contract.layer-types"]


def test_a_drafter_that_cannot_be_built_is_reported_and_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = random_export(tmp_path / "export", "qwen3", 4, 0)
    values = json.loads((export / "config.json").read_text())
    del values["head_dim"]
    (export / "config.json").write_text(json.dumps(values))
    assert command.main(["check", str(export)]) == 1
    result = result_of(capsys)
    assert result["failed"] == ["contract.config"]
    assert {"leak.all", "parity.all"} <= set(result["not_observed"])


def test_each_check_is_a_line_with_its_fix(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = [Check("leak.context", "fail", "it leaks", "do this"), Check("parity.logits", "not observed", "no [target]")]
    monkeypatch.setattr(runner, "_checks", lambda *_: iter(planted))
    assert command.main(["check", str(run)]) == 1
    shown = capsys.readouterr()
    assert "fail         leak.context: it leaks. Fix: do this" in shown.err.splitlines()
    assert "not observed parity.logits: no [target]" in shown.err.splitlines()
    assert json.loads(shown.out.splitlines()[-1])["checks"][0] == vars(planted[0])


def test_asked_probes_run_alone_and_must_observe_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = random_export(tmp_path / "export", "qwen3", 4, 0)
    assert command.main(["check", str(export), "--probes", "leak"]) == 0
    assert {check["name"].partition(".")[0] for check in result_of(capsys)["checks"]} == {"leak"}
    assert command.main(["check", str(export), "--probes", "leak", "template"]) == 3


def result_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


@pytest.mark.parametrize(
    ("family", "message"), [("fixture", "a hidden size of 64, the target"), ("random:qwen3-deep", "known random targets are")]
)
def test_another_target_is_bad_input(tmp_path: Path, family: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    export = random_export(tmp_path / "export", "qwen3", 4, 0)
    assert command.main(["check", str(export), "--target", TARGET.path if family == "fixture" else family]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "message"), [("vocab_size", "a vocabulary of 520"), ("num_hidden_layers", "a number of target layers of 12")]
)
def test_a_target_of_another_vocabulary_or_depth_is_bad_input(
    tmp_path: Path, field: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    export = random_export(tmp_path / "export", "qwen3", 4, 0)
    values = json.loads((export / "config.json").read_text())
    if field == "vocab_size":
        values["vocab_size"] = 520
    else:
        values["num_target_layers"] = values["dflash_config"]["num_target_layers"] = 12
    (export / "config.json").write_text(json.dumps(values))
    assert command.main(["check", str(export)]) == 2
    assert message in capsys.readouterr().err


def test_what_is_no_whole_checkpoint_is_bad_input(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half_run = shutil.copytree(run, tmp_path / "half")
    step = half_run / "checkpoints" / f"step-{STEPS:06d}"
    (step / "drafter.safetensors").write_bytes((step / "drafter.safetensors").read_bytes()[:-1])
    half_export = random_export(tmp_path / "export", "qwen3", 4, 0)
    (half_export / "model.safetensors").write_bytes((half_export / "model.safetensors").read_bytes()[:100])
    alone = shutil.copytree(half_export, tmp_path / "alone")
    (alone / "model.safetensors").unlink()
    (tmp_path / "empty").mkdir()
    for path, message in (
        (half_run, "it is truncated or was changed"),
        (step, "it is truncated or was changed"),
        (half_export, "is not a whole exported drafter (SafetensorError"),
        (alone, "is not a whole exported drafter (FileNotFoundError"),
        (tmp_path / "empty", "is no training run"),
        (tmp_path / "nowhere", "is no training run"),
    ):
        assert command.main(["check", str(path)]) == 2
        assert message in capsys.readouterr().err


def test_data_that_was_asked_for_must_be_there(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["check", str(run), "--data", str(tmp_path / "nothing")]) == 2
    assert "not a directory of prepared data" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--gguf-file", "x"], ["--max-tokens", "3"], ["--examples", "0"]])
def test_settings_without_a_meaning_are_bad_usage(run: Path, flags: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(["check", str(run), *flags])
    assert caught.value.code == 2
