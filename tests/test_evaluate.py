"""Laws of an evaluation, held on a real run directory: checkpoint, prepared data and a random target."""

import copy
import dataclasses
import json
import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import torch

from dflash import checkpoint
from dflash.__main__ import _exit_code
from dflash.batch import Example
from dflash.command_config import EvaluateConfig
from dflash.config import ConfigError, DataConfig, DrafterConfig, RunConfig, TargetConfig
from dflash.data.examples import DataError, Meta, write_examples
from dflash.decoding import evaluate as module
from dflash.decoding.evaluate import evaluate, select_prompts
from dflash.modeling.drafter import Drafter, DrafterShape
from dflash.modeling.target import load_target, text_config

MASK, EOS, BLOCK = 511, 2, 4
TARGET = TargetConfig(path="random:qwen3", dtype="float32", mask_token_id=MASK)


def example(name: str, prompt: int, answer: int = 4) -> Example:
    ids = np.random.default_rng(prompt).integers(3, 500, prompt + answer).astype(np.int32)
    return Example(sample_id=name, ids=ids, loss_mask=np.arange(prompt + answer) >= prompt)


def write_data(path: Path, examples: list[Example], **changes: Any) -> Path:
    meta = Meta(target=TARGET.path, vocab_size=512, mask_token_id=MASK, pad_token_id=0, eos_token_ids=(EOS,))
    write_examples(path, {"heldout": examples}, dataclasses.replace(meta, **changes))
    return path


def write_run(path: Path, *, data: Path, target: TargetConfig = TARGET, text_changes: dict[str, int] | None = None) -> Path:
    """A run of one checkpoint; `text_changes` make its drafter belong to another target."""
    text = copy.deepcopy(text_config(load_target(TARGET, device="cpu")[0]))
    for name, value in (text_changes or {}).items():
        setattr(text, name, value)
    drafter = DrafterConfig(block_size=BLOCK, num_layers=1, num_features=2)
    shape = DrafterShape.from_target(text, drafter, MASK)
    config = RunConfig(output=path, target=target, drafter=drafter, data=DataConfig(path=data))
    checkpoint.save(
        path,
        checkpoint.TrainState(
            step=0,
            weights=Drafter(shape).state_dict(),
            moments={"step": torch.zeros(1)},
            shape=shape.to_zlab_config(),
            config=config,
            metrics={},
        ),
    )
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("evaluate")
    data = write_data(root / "data", [example(f"sample-{n}", 4 + n) for n in range(5)])
    return write_run(root / "run", data=data)


def settings(run: Path, **changes: Any) -> EvaluateConfig:
    values: dict[str, Any] = {"checkpoint": "last", "max_prompts": 3, "max_new_tokens": 9} | changes
    return EvaluateConfig(run=run, **values)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_written_is_what_is_returned_and_adds_up(
    run: Path, temperature: float, capsys: pytest.CaptureFixture[str]
) -> None:
    result = evaluate(settings(run, temperature=temperature, seed=3))
    written = run / "evaluate-last.json"
    assert json.loads(written.read_text()) == result
    assert [p.name for p in run.iterdir() if p.suffix == ".partial"] == []
    assert result["lossless"] is True
    assert result["prompts_differing"] == []
    assert result["prompts"] == 3
    assert result["target_forwards"] == {"prefill": 3, "rounds": result["rounds"]}
    assert result["tokens"] == 3 + round(result["tau_sum"] * result["rounds"])
    assert result["tokens_per_target_forward"] == result["tokens"] / (3 + result["rounds"])
    assert result["tau_ci95"][0] <= result["tau"] <= result["tau_ci95"][1] <= BLOCK
    assert len(result["acceptance_per_position"]) == len(result["rounds_per_position"]) == BLOCK - 1
    assert result["speedup_over_plain"] > 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "speed-up over plain" in shown.err


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_are_reported_as_the_chain_is_and_pictures_are_drawn(run: Path, temperature: float) -> None:
    result = evaluate(settings(run, budgets=(4, 30), batch=2, temperature=temperature))
    assert json.loads((run / "evaluate-last.json").read_text()) == result
    assert [tree["budget"] for tree in result["trees"]] == [4, 30]
    for tree in result["trees"]:
        assert tree["lossless"] is True
        assert tree["tokens"] == result["tokens"]
        assert tree["tokens"] == 3 + round(tree["tau_sum"] * tree["rounds"])
        assert tree["tau_ci95"][0] <= tree["tau"] <= tree["tau_ci95"][1] <= BLOCK
        assert len(tree["acceptance_per_position"]) == BLOCK - 1
        assert min(tree["seconds"]["speculative"][stage] for stage in ("prefill", "draft", "build", "verify", "commit")) > 0
        assert tree["speedup_over_plain"] > 0
    for name in ("tau", "tau_sum", "tau_block"):
        assert len({part[f"{name}_definition"] for part in (result, *result["trees"])}) == 1
    assert result["pictures"] == [str(run / f"evaluate-last-{name}.svg") for name in ("acceptance", "budgets")]
    for picture in result["pictures"]:
        assert ET.parse(picture).getroot().tag.endswith("svg")
    evaluate(settings(run, max_new_tokens=2, baseline=False))
    assert not Path(result["pictures"][1]).exists(), "a picture of another evaluation does not stay beside the new numbers"


def test_a_comparison_tells_the_difference_of_each_way_or_is_refused_before_decoding(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.json"
    first = evaluate(settings(run, budgets=(4,)))
    first["tau_by_prompt"] = {prompt: tau - 0.25 for prompt, tau in first["tau_by_prompt"].items()}
    other.write_text(json.dumps(first | {"target": "the same model elsewhere"}))
    capsys.readouterr()
    found = evaluate(settings(run, budgets=(4,), against=other))
    assert found["against"]["caution"] is None
    assert found["against"]["tau_difference"] == pytest.approx(0.25)
    assert found["against"]["trees"][0]["tau_difference"] == 0
    assert found["against"]["prompts"] == found["prompts"]
    assert "+0.25" in capsys.readouterr().err
    del first["target_digest"]
    other.write_text(json.dumps(first))
    older = evaluate(settings(run, budgets=(4,), against=other))
    assert older["against"]["tau_difference"] == pytest.approx(0.25)
    assert "only the paths" in older["against"]["caution"]
    assert "only the paths" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr("dflash.decoding.evaluate._decode", lambda *_: pytest.fail("decoded"))
    with pytest.raises(ConfigError, match="max_new_tokens"):
        evaluate(settings(run, max_new_tokens=5, against=other))


def test_prompts_decoded_together_give_the_numbers_of_prompts_decoded_alone(run: Path) -> None:
    few = {"max_prompts": 5, "max_new_tokens": 5, "budgets": (6,), "baseline": False}
    alone, together = (evaluate(settings(run, batch=batch, **few)) for batch in (1, 3))
    for key in ("tokens", "rounds", "tau", "acceptance_per_position", "target_forwards", "tokens_per_target_forward"):
        assert alone[key] == together[key], key
        assert alone["trees"][0][key] == together["trees"][0][key], key


def test_every_way_decodes_every_prompt_and_takes_its_turn_first(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = module.decode, []

    def observed(model: Any, prompts: list[list[int]], wanted: Any, *, drafting: Any, requests: range) -> Any:
        calls.append(("plain" if drafting is None else drafting.budget or "chain", list(requests)))
        assert prompts == [example("", 4 + n).ids[: 4 + n].tolist() for n in requests], (
            "they end before the first supervised token"
        )
        return real(model, prompts, wanted, drafting=drafting, requests=requests)

    monkeypatch.setattr(module, "decode", observed)
    evaluate(settings(run, max_prompts=5, max_new_tokens=2, batch=2, budgets=(3,)))
    warm_up, decoded = calls[:3], calls[3:]
    assert warm_up == [("plain", [0, 1]), ("chain", [0, 1]), (3, [0, 1])]
    assert decoded == [
        *(("plain", [0, 1]), ("chain", [0, 1]), (3, [0, 1])),
        *(("chain", [2, 3]), (3, [2, 3]), ("plain", [2, 3])),
        *((3, [4]), ("plain", [4]), ("chain", [4])),
    ]


def test_two_evaluations_differ_in_seconds_only(run: Path) -> None:
    first, second = (evaluate(settings(run, temperature=0.7, max_new_tokens=5, budgets=(5,))) for _ in range(2))
    for result in (first, second):
        for part in (result, *result["trees"]):
            del part["seconds"], part["speedup_over_plain"]
    assert first == second


def test_another_dtype_than_the_run_s_is_used_and_reported(run: Path) -> None:
    half = evaluate(settings(run, dtype="bfloat16"))
    assert half["dtype"] == "bfloat16"
    assert evaluate(settings(run))["dtype"] == "float32"


def test_without_a_baseline_nothing_is_claimed(run: Path) -> None:
    result = evaluate(settings(run, baseline=False))
    assert result["lossless"] is None
    assert result["prompts_differing"] is None
    assert result["speedup_over_plain"] is None
    assert result["seconds"]["plain"] is None


def test_a_prompt_that_decodes_differently_is_named_for_each_way(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.decode

    def altered(*arguments: Any, drafting: Any, requests: range) -> Any:
        done = real(*arguments, drafting=drafting, requests=requests)
        if drafting and drafting.budget == 5:
            done = [
                dataclasses.replace(g, tokens=(0, *g.tokens[1:])) if n == 1 else g for n, g in zip(requests, done, strict=True)
            ]
        return done

    monkeypatch.setattr(module, "decode", altered)
    result = evaluate(settings(run, budgets=(5, 6)))
    assert [part["lossless"] for part in (result, *result["trees"])] == [True, False, True]
    assert result["trees"][0]["prompts_differing"] == ["sample-1"]
    assert _exit_code(result) == 1
    assert _exit_code(result | {"dtype": "bfloat16"}) == 0


def test_a_failed_write_keeps_the_earlier_result(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate(settings(run))
    before = (run / "evaluate-last.json").read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        evaluate(settings(run, seed=9))
    assert (run / "evaluate-last.json").read_bytes() == before
    assert list(run.glob(".evaluate*")) == []


def test_prompts_are_the_first_that_can_be_decoded_and_the_others_are_listed() -> None:
    examples = [
        example("no prompt", 0),
        example("long", 60),
        example("a", 5),
        example("unanswered", 7, answer=0),
        example("b", 6),
        example("c", 7),
    ]
    config = EvaluateConfig(run=Path("unused"), max_prompts=2, max_new_tokens=30)
    prompts, skipped = select_prompts(examples, config, 64)
    assert [(name, len(ids)) for name, ids in prompts] == [("a", 5), ("b", 6)]
    assert skipped == [
        ("no prompt", "no token before its first supervised one"),
        ("long", "60 prompt and 30 new tokens exceed the target's 64 positions"),
        ("unanswered", "no supervised token"),
    ]
    assert [name for name, _ in select_prompts(examples, config, None)[0]] == ["long", "a"]


def test_data_without_a_usable_prompt_is_refused(run: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data", [example("no prompt", 0)])
    with pytest.raises(DataError, match="no prompt: no token before its first supervised one"):
        evaluate(settings(run, data=data))
    empty = write_data(tmp_path / "empty", [])
    with pytest.raises(DataError, match="the split is empty"):
        evaluate(settings(run, data=empty))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"vocab_size": 600}, "vocabulary of 600, the target has 512"), ({"mask_token_id": 7}, "mask token id 7, the run uses 511")],
)
def test_data_of_another_target_is_refused(run: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    data = write_data(tmp_path / "data", [example("a", 5)], **changes)
    with pytest.raises(DataError, match=message):
        evaluate(settings(run, data=data))


@pytest.mark.parametrize(
    ("text_changes", "message"),
    [
        ({"hidden_size": 32}, r"hidden size of 32, the target 'random:qwen3' has 64"),
        ({"vocab_size": 520}, r"vocabulary of 520, .* has 512"),
        ({"num_hidden_layers": 12}, r"number of target layers of 12, .* has 8"),
    ],
)
def test_a_drafter_of_another_target_is_refused(run: Path, tmp_path: Path, text_changes: dict[str, int], message: str) -> None:
    other = write_run(tmp_path / "run", data=run.parent / "data", text_changes=text_changes)
    with pytest.raises(checkpoint.CheckpointError, match=message):
        evaluate(settings(other))


def test_a_hybrid_target_is_refused(run: Path, tmp_path: Path) -> None:
    hybrid = dataclasses.replace(TARGET, path="random:qwen3_5")
    other = write_run(tmp_path / "run", data=run.parent / "data", target=hybrid)
    with pytest.raises(ConfigError, match="cannot be cropped"):
        evaluate(settings(other))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint": "../last"}, "is a path"),
        ({"device": "gpu"}, "not known to torch"),
        ({"device": "cuda:64"}, "needs 65 GPUs, found"),
        ({"budgets": (16, 0)}, "a tree budget is 0: use 1 to 4096"),
        ({"budgets": (5000,)}, "a tree budget is 5000: use 1 to 4096"),
        ({"budgets": (16, 16)}, "name each one once"),
        ({"batch": 0}, "batch is 0: use at least 1"),
    ],
)
def test_impossible_settings_are_refused(run: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate(settings(run, **changes))
