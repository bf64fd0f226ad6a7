"""Laws of fixtures.real_run: how parts become data, time limits, results and their settings, what comes back of a drafter."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash import checkpoint
from dflash.batch import Example
from dflash.config import ConfigError, DataConfig, DrafterConfig, RunConfig, to_dict
from dflash.data.examples import load_examples, write_examples
from dflash.data.meta import Meta
from dflash.data.packing import PackedStream
from dflash.modeling.contract import write_export
from dflash.modeling.drafter import Drafter
from dflash.modeling.shape import DrafterShape
from fixtures.real_run import ablations, evaluating, training
from fixtures.real_run.answers import answer_all
from fixtures.real_run.imported import as_run
from fixtures.real_run.report import gather, tables
from fixtures.real_run.results import is_complete, keep
from fixtures.real_run.running import Deadline, all_of, run
from fixtures.real_run.settings import OutOfTime, Settings, StageError
from fixtures.real_run.texts import hash_of
from fixtures.real_run.training import curve
from fixtures.real_run.unpacking import Rows


def example(name: str, length: int, prompt: int = 3) -> Example:
    ids = np.array([hash_of(f"{name} {i}")[0] for i in range(length)], dtype=np.int32)
    return Example(sample_id=name, ids=ids, loss_mask=np.arange(length) >= prompt)


def meta(**changes: Any) -> Meta:
    return Meta(
        **{"target": "t", "vocab_size": 260, "mask_token_id": 259, "pad_token_id": 256, "eos_token_ids": (258,), **changes}
    )


# Parts and data


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Two parts of two prompts, and a held-out one of three, as the stage `prompts` leaves them."""
    made = Settings.parse(["--preset", "tiny-cpu", "--output", str(tmp_path), "--part-prompts", "2", "--prompts", "4"], None)[0]
    (tmp_path / "prompts").mkdir()
    for split, names in (("train", "abcd"), ("heldout", "xyz")):
        lines = [json.dumps({"id": name, "messages": [{"role": "user", "content": name}]}) + "\n" for name in names]
        (tmp_path / "prompts" / f"{split}.jsonl").write_text("".join(lines))
    return made


def answered(settings: Settings, part: str, names: str) -> None:
    counts = {"finish_reasons": {"stop": len(names)}, "truncated_answers": 1}
    write_examples(
        settings.output / "parts" / part, {"train": [example(name, 9) for name in names]}, meta(**counts), skipped=[(part, "why")]
    )


def test_parts_become_one_set_whose_held_out_examples_are_those_of_the_first_part(settings: Settings) -> None:
    for part, names in (("heldout", "xyz"), ("train-00", "ab"), ("train-01", "cd")):
        answered(settings, part, names)
    result = answer_all(settings, Deadline.of(None))
    assert [it.sample_id for it in load_examples(settings.data, "train")] == list("abcd")
    assert [it.sample_id for it in load_examples(settings.data, "heldout")] == sorted("xyz", key=hash_of)
    assert result["examples"] == {"train": 4, "heldout": 3}
    assert result["skipped"] == {"why": 3}
    assert result["finish_reasons"] == {"stop": 7}
    assert result["answer_tokens"] == 7 * 6


def test_parts_that_are_missing_are_only_done_without_when_asked_to(settings: Settings) -> None:
    answered(settings, "heldout", "xyz")
    answered(settings, "train-00", "ab")
    with pytest.raises(OutOfTime):
        answer_all(settings, Deadline(1.0, time.monotonic() - 2))
    assert not settings.data.exists()
    result = answer_all(dataclasses.replace(settings, partial=True), Deadline.of(None))
    assert result["parts"] == {"answered": 2, "all": 3}
    assert result["prompts_asked"] == settings.prompts + settings.heldout
    assert [it.sample_id for it in load_examples(settings.data, "train")] == list("ab")


def test_without_the_held_out_part_nothing_is_published(settings: Settings) -> None:
    answered(settings, "train-00", "ab")
    answered(settings, "train-01", "cd")
    with pytest.raises(StageError, match="the held-out one and another are needed"):
        answer_all(dataclasses.replace(settings, partial=True), Deadline.of(None))
    assert not settings.data.exists()


def test_a_directory_of_other_settings_is_refused(settings: Settings) -> None:
    settings.bind()
    settings.bind()
    with pytest.raises(ConfigError, match="begun with --max-new-tokens 24, now it is 25"):
        dataclasses.replace(settings, max_new_tokens=25).bind()


# Time


def test_a_command_out_of_time_is_ended_and_said_to_be(tmp_path: Path) -> None:
    command = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    with pytest.raises(OutOfTime, match="ended after"):
        run(["-c", command], log=tmp_path / "log", deadline=Deadline.of(3.0))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_command_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"exit code 1; .*log ends with:[\s\S]*ZeroDivisionError"):
        run(["-c", "1/0"], log=tmp_path / "log", deadline=Deadline.of(None))


def test_a_failure_quotes_what_its_own_command_wrote(tmp_path: Path) -> None:
    for error in ("1/0", "[][1]"):
        with pytest.raises(StageError, match="exit code 1") as raised:
            run(["-c", error], log=tmp_path / "log", deadline=Deadline.of(None))
    assert "IndexError" in str(raised.value)
    assert "ZeroDivisionError" not in str(raised.value)


def test_decodings_that_run_together_have_a_log_each(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    logs: list[Path] = []

    def decoded(_command: list[str], *, log: Path, **_others: Any) -> dict[str, Any]:
        logs.append(log)
        return {"tau": 1.0, "trees": [], "speedup_over_plain": None}

    monkeypatch.setattr(evaluating, "run", decoded)
    evaluating.evaluate(settings, Deadline.of(None), name="b8", run_directory=settings.run)
    evaluating.evaluate(settings, Deadline.of(None), name="b8", run_directory=settings.run)
    assert sorted(log.name for log in logs) == [f"evaluate-b8-{way}.log" for way in ("greedy", "sampled", "timed")]


def test_the_last_line_is_the_result_and_the_package_path_comes_last(tmp_path: Path) -> None:
    command = "import json, sys; print('noise'); print(json.dumps({'last': sys.path[-1], 'path': sys.path}))"
    result = run(["-c", command], log=tmp_path / "log", deadline=Deadline.of(None), more_path=tmp_path)
    assert str(Path.cwd()) in result["path"]
    assert result["path"].index(str(Path.cwd())) < result["path"].index(str(tmp_path))


def test_a_directory_keeps_the_size_of_its_parts(tmp_path: Path) -> None:
    arguments = ["--output", str(tmp_path), "--preset", "tiny-cpu", "--stage", "report", "--part-prompts"]
    Settings.parse([*arguments, "4"], "")[0].bind()
    with pytest.raises(ConfigError, match="--part-prompts 4, now it is 8"):
        Settings.parse([*arguments, "8"], "")[0].bind()


def test_after_a_failure_no_other_unit_begins() -> None:
    begun: list[int] = []

    def unit(number: int) -> None:
        begun.append(number)
        if number == 0:
            raise StageError("0")

    with pytest.raises(StageError, match="0"):
        all_of([lambda n=n: unit(n) for n in range(50)], jobs=1)  # type: ignore[misc]
    assert begun == [0]


# SpecForge's rows


def test_every_document_of_every_batch_has_a_row_of_its_own_that_starts_at_0() -> None:
    examples = [example(f"e{number}", 5 + number % 17) for number in range(40)]
    config = DataConfig(sequence_length=32, rows_per_batch=2, num_anchors=4)
    stream = PackedStream(examples, config, seed=3, pad_token_id=256)
    batches = 3 * stream.batches_per_epoch()
    rows = Rows.of(stream, batches)
    by_name = {it.sample_id: it for it in examples}
    fullest = 0
    for index in range(batches):
        batch = stream.batch(index)
        features = batch.input_ids[..., None].float() + 0.5
        ids, states, mask = rows.unpack(batch, features)
        names = [name for row in batch.sample_ids for name in row]
        fullest = max(fullest, len(names))
        for row, name in enumerate(names):
            length = len(by_name[name].ids)
            assert ids[row, :length].tolist() == by_name[name].ids.tolist()
            assert states[row, :length, 0].tolist() == (by_name[name].ids + 0.5).tolist()
            assert mask[row].tolist() == [float(x) for x in by_name[name].loss_mask] + [0.0] * (rows.tokens - length)
        assert not mask[len(names) :].any()
    assert rows.documents == fullest
    assert rows.tokens == 128


def test_an_imported_drafter_comes_back_as_a_run_with_the_same_weights(tmp_path: Path) -> None:
    like = tmp_path / "like"
    like.mkdir()
    config = RunConfig(devices="cpu", output=like, drafter=DrafterConfig(block_size=4, num_layers=1, num_features=1))
    (like / "config.json").write_text(json.dumps(to_dict(config)))
    shape = DrafterShape(
        hidden_size=16, intermediate_size=16, num_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_features=1, block_size=8, rms_norm_eps=1e-6, rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
        mask_token_id=3, target_layer_ids=(1,), num_target_layers=4, vocab_size=32, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    weights = {name: weight.bfloat16() for name, weight in Drafter(shape).state_dict().items()}
    write_export(tmp_path / "export", weights, shape, "target", {})
    as_run(tmp_path / "export", tmp_path / "run", like=like, step=7)
    drafter, found, state = checkpoint.load_drafter(tmp_path / "run", "last", torch.device("cpu"))
    assert state.step == 7
    assert drafter.shape == shape
    assert found.drafter.block_size == 8
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, weights[name].float())


# Numbers


def test_the_curve_holds_decodes_only_and_the_later_of_two_at_one_step(tmp_path: Path) -> None:
    def line(step: int, tau: float, kind: str = "decode") -> str:
        fields = {"kind": kind, "step": step, "tau": tau, "tau_ci95": None, "foretold": 2.0, "rounds": 9}
        return json.dumps({"kind": "record", "name": "acceptance", "fields": fields})

    lines = [line(20, 1.5), line(10, 1.2), line(10, 9.0, "estimate"), json.dumps({"name": "step", "fields": {}}), line(20, 1.7)]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert [(point["step"], point["tau"]) for point in curve(tmp_path / "events.jsonl")] == [(10, 1.2), (20, 1.7)]


def test_variants_double_and_halve_the_numbers_of_the_preset(settings: Settings) -> None:
    assert ablations.flags_of(settings, "anchors half") == ["--data.num-anchors", "20"]
    assert ablations.flags_of(settings, "anchors double") == ["--data.num-anchors", "80"]
    assert ablations.flags_of(settings, "loss kl") == ["--loss.kind", "kl"]


def test_what_is_missing_is_named_and_what_is_there_is_tabled(settings: Settings) -> None:
    out = settings.output
    part = {"tau": 2.5, "tau_ci95": [2.0, 3.0], "tau_sum": 2.4, "tokens_per_target_forward": 2.2, "speedup_over_plain": None}
    greedy = part | {"acceptance_per_position": [0.7, None], "trees": [{"budget": 16, **part, "tau": 3.5}]}
    for name, by_prompt in (("b16-greedy", {"a": 2.0, "b": 3.0}), ("specforge-b16-greedy", {"a": 2.5, "b": 3.5})):
        trees = [greedy["trees"][0] | {"tau_by_prompt": {"a": 3.0, "b": 4.0}}]
        (out / f"evaluate-{name}.json").write_text(json.dumps(greedy | {"tau_by_prompt": by_prompt, "trees": trees}))
    trained = {"steps": 10, "loss": 1.0, "tokens_per_second": 5.0, "seconds": {"training": 2.0}, "curve": []}
    (out / "train-b16.json").write_text(json.dumps(trained))
    (out / "ablations").mkdir()
    (out / "ablations" / "loss-kl.json").write_text(json.dumps(part | {"flags": ["--loss.kind", "kl"], "loss": 1.0}))
    found = gather(out)
    assert {"answers", "specforge", "evaluate-b16-sampled", "evaluate-b16-timed", "ablation base"} <= set(found["missing"])
    assert not {"train", "evaluate-b16-greedy", "ablation loss kl"} & set(found["missing"])
    text = tables(found)
    assert "| b16-greedy | tree of 16 | 3.50 [2.00, 3.00] | 2.40 | 2.20 | - |" in text
    assert "| loss-kl | --loss.kind kl | 2.50 [2.00, 3.00] | 1.00 |" in text
    assert "0.70 -" in text
    assert "| b16-greedy | chain | -0.50 [-0.50, -0.50] | 0 better, 2 worse, of 2 |" in text
    assert "| b16-greedy | tree of 16 | 0.00 [0.00, 0.00] | 0 better, 0 worse, of 2 |" in text


# Results and their settings


@pytest.mark.parametrize(
    ("change", "stale"),
    [
        ({"steps": 9}, {"train"}),
        ({"decode_points": 2}, {"train"}),
        ({"budgets": (16, 32)}, {"greedy"}),
        ({"timed_budgets": (8,)}, {"timed"}),
        ({"evaluate_prompts": 2}, {"greedy"}),
        ({"evaluate_tokens": 9}, {"greedy", "timed", "ablations"}),
        ({"ablation_steps": 3}, {"ablations"}),
        ({"train_flags": ("--optim.learning-rate", "1e-3")}, {"train", "ablations"}),
        ({"device": "cuda:0"}, {"train", "ablations", "greedy", "timed"}),
        ({"jobs": 4, "seconds": 9.0, "batch_size": 7}, set()),
    ],
)
def test_what_was_made_with_other_settings_is_refused(settings: Settings, change: dict[str, Any], stale: set[str]) -> None:
    def refused(changed: Settings) -> set[str]:
        looks: dict[str, Any] = {
            "train": lambda: is_complete(training.result_file(changed), training.needs(changed)),
            "ablations": lambda: ablations.check(changed),
            **{way: lambda w=way: evaluating.check(only(w, changed), "b8", changed.run) for way in ("greedy", "timed")},
        }
        found = set()
        for name, look in looks.items():
            try:
                look()
            except ConfigError:
                found.add(name)
        return found

    def only(way: str, changed: Settings) -> Settings:
        return dataclasses.replace(changed, ways=(way,))

    keep(training.result_file(settings), training.needs(settings), {})
    (settings.output / "ablations").mkdir()
    keep(ablations.result_file(settings, "base"), ablations.needs(settings), {})
    for way in ("greedy", "timed"):
        keep(evaluating.result_file(settings, "b8", way), evaluating.needs(settings, way, settings.run), {})
    assert refused(settings) == set()
    assert refused(dataclasses.replace(settings, **change)) == stale


def test_a_decoding_of_another_checkpoint_is_refused(settings: Settings) -> None:
    keep(evaluating.result_file(settings, "b8", "greedy"), evaluating.needs(settings, "greedy", settings.run), {})
    marker = checkpoint.checkpoint_dir(settings.run) / "step-000008" / checkpoint.MARKER
    marker.parent.mkdir(parents=True)
    marker.write_text("{}")
    with pytest.raises(
        ConfigError, match=r"made with checkpoint none, now it is checkpoint step-000008 [0-9a-f]{12}: .*another --output"
    ):
        evaluating.check(settings, "b8", settings.run)


def test_a_result_that_states_no_settings_is_not_taken_for_complete(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(ConfigError, match="does not say with which settings"):
        is_complete(tmp_path / "result.json", {"--steps": 3})
