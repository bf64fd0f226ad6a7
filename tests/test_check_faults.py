"""Every fault that makes a healthy loss serve badly is planted for real, and `check` names it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_checking import TARGET, cached_load, failed, training
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dflash.batch import Example, PackedBatch
from dflash.checking import subject
from dflash.data import chat, packing
from dflash.data.examples import load_examples, load_meta, write_examples
from dflash.decoding.draft_session import DraftSession
from dflash.modeling import loss, masks
from dflash.modeling.rope import RotaryEmbedding
from dflash.modeling.target import TargetRunner, load_target
from dflash.trainer import train

Values = dict[str, Any]
Weights = dict[str, Tensor]
Edit = Callable[[Values, Weights], None]


@pytest.fixture(autouse=True)
def one_load_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "load_target", cached_load)


@pytest.fixture(scope="session")
def run(trained_run: Path) -> Path:
    return trained_run


@pytest.fixture
def export(run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(run.parent / "export", tmp_path / "export")


def edit(export: Path, change: Edit, *, record: bool = False) -> Path:
    """Change an export; without its record, as if another program had written it."""
    values, weights = json.loads((export / "config.json").read_text()), load_file(export / "model.safetensors")
    change(values, weights)
    (export / "config.json").write_text(json.dumps(values))
    save_file(weights, export / "model.safetensors")
    if not record:
        (export / "training.json").unlink()
    return export


def top(**changes: Any) -> Edit:
    return lambda values, _: values.update(changes)


def inner(**changes: Any) -> Edit:
    return lambda values, _: values["dflash_config"].update(changes)


def rope(**changes: Any) -> Edit:
    def change(values: Values, _: Weights) -> None:
        values["rope_parameters"].update(changes)
        values.update(changes)

    return change


def prefixed(_: Values, weights: Weights) -> None:
    for name in list(weights):
        weights[f"model.{name}"] = weights.pop(name)


def weight(name: str, make: Callable[[Tensor], Tensor]) -> Edit:
    return lambda _, weights: weights.update({name: make(weights[name])})


FILE_FAULTS: dict[str, tuple[Edit, str]] = {
    "prefix on names": (prefixed, "names"),
    "unknown weight": (lambda _, weights: weights.update({"rotary_emb.inv_freq": torch.ones(16).bfloat16()}), "names"),
    "transposed fusion": (weight("fc.weight", lambda w: w.T.contiguous()), "shapes"),
    "fp32 weight": (weight("norm.weight", lambda w: w.float()), "dtypes"),
    "nan": (weight("norm.weight", lambda w: w * torch.nan), "finite"),
    "another activation": (top(hidden_act="gelu"), "config"),
    "last layer": (inner(target_layer_ids=[1, 3, 7]), "layers"),
    "layer out of range": (inner(target_layer_ids=[1, 3, 9]), "layers"),
    "block size in one place": (lambda values, _: values.pop("block_size"), "block-size"),
    "sliding layer": (top(layer_types=["sliding_attention"]), "layer-types"),
    "start token as mask": (inner(mask_token_id=257), "mask-token"),
    "letter as mask": (inner(mask_token_id=97), "mask-token"),
    "theta of another target": (rope(rope_theta=1_000_000.0), "rope"),
    "theta in one place": (top(rope_theta=1_000_000.0), "rope"),
    "copied partial rotary factor": (rope(partial_rotary_factor=0.5), "rope"),
    "scaling that the target lacks": (
        top(
            rope_scaling={"rope_type": "linear", "factor": 2.0},
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        ),
        "rope",
    ),
    "another label convention": (top(sample_from_anchor=True), "alignment"),
}


@pytest.mark.parametrize("fault", FILE_FAULTS)
def test_a_file_that_servers_misread_fails_by_its_topic(export: Path, fault: str) -> None:
    change, topic = FILE_FAULTS[fault]
    found = failed(edit(export, change), target=TARGET.path, probes=("contract",))
    assert set(found) == {f"contract.{topic}"}, found


@pytest.mark.parametrize(
    ("change", "topic"),
    [
        (inner(target_layer_ids=[2, 4, 6]), "layers"),
        (lambda values, _: (values.update(block_size=5), values["dflash_config"].update(block_size=5)), "block-size"),
        (inner(mask_token_id=256), "mask-token"),
        (rope(rope_theta=20_000.0), "rope"),
        (top(rms_norm_eps=1e-5), "config"),
    ],
)
def test_a_value_that_was_not_trained_fails_by_its_topic(export: Path, change: Edit, topic: str) -> None:
    found = failed(edit(export, change, record=True), probes=("contract",))
    assert f"contract.{topic}" in found
    assert "trained was" in found[f"contract.{topic}"]


def faulty_predicate(visible: Callable[..., Tensor]) -> Callable[..., Any]:
    """The mask's predicate, with something more visible."""
    real = masks.predicate

    def predicate(layout: masks.BlockLayout) -> Any:
        right = real(layout)
        slots, context = layout.anchors.shape[1], layout.document_ids.shape[1]

        def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            slot = (query // layout.block_size).clamp(max=slots - 1)
            more = visible(key, layout.anchors[row, slot], context) & (query < layout.num_queries)
            return right(row, head, query, key) | more

        return mask_mod

    return predicate


MASK_FAULTS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "key <= anchor": (lambda key, anchor, _: key == anchor, "leak.context"),
    "context of other documents": (lambda key, anchor, _: key < anchor, "leak.documents"),
    "other blocks": (lambda key, _, context: key >= context, "leak.blocks"),
}


@pytest.mark.parametrize("fault", MASK_FAULTS)
def test_a_leaking_mask_fails_by_its_kind(run: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    visible, name = MASK_FAULTS[fault]
    monkeypatch.setattr(masks, "predicate", faulty_predicate(visible))
    assert set(failed(run, probes=("leak",))) == {name}


def test_a_context_that_ends_too_early_fails(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = masks.predicate

    def predicate(layout: masks.BlockLayout) -> Any:
        right = real(layout)
        slots = layout.anchors.shape[1]

        def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            anchor = layout.anchors[row, (query // layout.block_size).clamp(max=slots - 1)]
            return right(row, head, query, key) & (key != anchor - 1)

        return mask_mod

    monkeypatch.setattr(masks, "predicate", predicate)
    found = failed(run, probes=("leak",))
    assert set(found) == {"leak.context"}
    assert "anchor-1 do not reach" in found["leak.context"]


def test_an_unclamped_mask_fails(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = masks.predicate

    def predicate(layout: masks.BlockLayout) -> Any:
        right = real(layout)

        def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            valid = layout.anchor_valid[row, query // layout.block_size]
            return right(row, head, query, key) & (valid | ~valid)

        return mask_mod

    monkeypatch.setattr(masks, "predicate", predicate)
    found = failed(run, probes=("leak",))
    assert set(found) == {"leak.clamp"}
    assert "device assert" in found["leak.clamp"]


def faulty_labels(*, shift: int = 0, in_document: bool = True) -> Callable[..., tuple[Tensor, Tensor]]:
    """The trainer's labels, shifted, or without regard to where a document ends."""

    def block_labels(batch: PackedBatch, block_size: int) -> tuple[Tensor, Tensor]:
        index = batch.anchors.unsqueeze(-1) + torch.arange(1, block_size) + shift
        length = batch.input_ids.shape[1]
        flat = index.clamp(max=length - 1).flatten(1)
        labels, marked, document = (
            source.gather(1, flat).view_as(index) for source in (batch.input_ids, batch.loss_mask, batch.document_ids)
        )
        same = document == batch.document_ids.gather(1, batch.anchors).unsqueeze(-1)
        inside = (index < length) & (same if in_document else document >= 0)
        return labels, inside & marked & batch.anchor_valid.unsqueeze(-1)

    return block_labels


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        (faulty_labels(shift=1), "leak.labels"),
        (faulty_labels(shift=-1), "leak.labels"),
        (faulty_labels(in_document=False), "leak.labels-in-document"),
    ],
)
def test_faulty_labels_fail_by_their_kind(
    run: Path, monkeypatch: pytest.MonkeyPatch, labels: Callable[..., tuple[Tensor, Tensor]], name: str
) -> None:
    monkeypatch.setattr(loss, "block_labels", labels)
    assert set(failed(run, probes=("leak",))) == {name}


def test_a_drafter_trained_on_shifted_labels_is_told_from_its_weights(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(loss, "block_labels", faulty_labels(shift=1))
        train(training(tmp_path / "run", run.parent / "data"))
    found = failed(tmp_path / "run", probes=("contract", "leak", "alignment"))
    assert set(found) == {"alignment.label-offset"}
    assert "shifted by one: index k predicts anchor + k +1" in found["alignment.label-offset"]


@pytest.mark.parametrize(("ids", "words"), [([2, 4, 6], "shifted by one layer down"), ([0, 2, 4], "shifted by one layer up")])
def test_shifted_feature_layers_are_told_from_the_weights(run: Path, export: Path, ids: list[int], words: str) -> None:
    other = edit(export, inner(target_layer_ids=ids))
    found = failed(other, target=TARGET.path, data=run.parent / "data", probes=("contract", "alignment"))
    assert set(found) == {"alignment.feature-layer"}
    assert words in found["alignment.feature-layer"]


def test_another_theta_than_the_trained_one_is_told_from_the_weights(run: Path, export: Path) -> None:
    other = edit(export, rope(rope_theta=1_000_000.0))
    found = failed(other, target=TARGET.path, data=run.parent / "data", probes=("alignment",))
    assert set(found) == {"alignment.rope"}
    assert "was trained with the target's rope" in found["alignment.rope"]


def test_frequencies_that_are_rounded_with_the_weights_fail(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RotaryEmbedding, "_apply", nn.Module._apply)
    found = failed(run, probes=("parity",))
    assert set(found) == {"parity.frequencies"}
    assert "serving in bfloat16 has torch.bfloat16 frequencies" in found["parity.frequencies"]


def test_features_of_the_layer_below_fail(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = TargetRunner.__init__

    def one_below(self: TargetRunner, model: Any, layer_ids: tuple[int, ...], **settings: Any) -> None:
        real(self, model, layer_ids, **settings)
        self._layers = [self.decoder.layers[number - 1] for number in layer_ids]

    monkeypatch.setattr(TargetRunner, "__init__", one_below)
    found = failed(run, probes=("parity",))
    assert {"parity.features", "parity.logits"} <= set(found)
    assert "training reads layer 0 for layer 1: shifted by -1" in found["parity.features"]


def test_positions_that_decoding_counts_from_one_fail(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = DraftSession.extend

    def later(self: DraftSession, features: Tensor, counts: list[int]) -> None:
        self.lengths = [max(1, length) for length in self.lengths]
        real(self, features, counts)

    monkeypatch.setattr(DraftSession, "extend", later)
    found = failed(run, probes=("parity",))
    assert "parity.logits" in found
    assert "parity.features" not in found


def test_a_target_that_mixes_packed_documents_fails(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = TargetRunner.run

    def through(self: TargetRunner, batch: PackedBatch) -> Any:
        straight = torch.arange(batch.positions.shape[1]).expand_as(batch.positions)
        return real(self, dataclasses.replace(batch, positions=straight))

    monkeypatch.setattr(TargetRunner, "run", through)
    assert set(failed(run, probes=("leak",))) == {"leak.target-documents"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda anchors, valid: (anchors[::-1].copy(), valid[::-1].copy()), "not ascending"),
        (lambda anchors, valid: (anchors + valid * 3, valid), "not both supervised"),
    ],
)
def test_unsorted_and_ineligible_anchors_fail(run: Path, monkeypatch: pytest.MonkeyPatch, change: Any, words: str) -> None:
    real = packing.draw_anchors
    monkeypatch.setattr(packing, "draw_anchors", lambda *args, **settings: change(*real(*args, **settings)))
    found = failed(run, probes=("leak",))
    assert set(found) == {"leak.anchors"}
    assert words in found["leak.anchors"]


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last and m.role == 'assistant' and not enable_thinking %}-{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not enable_thinking %}-{% endif %}{% endif %}"
)


def template_data(directory: Path, *, thinking: bool, claims: bool, mask_from: int | None = None) -> Path:
    """Data rendered by THINKING in one mode, which claims a mode."""
    _, tokenizer = load_target(TARGET, device="cpu")
    tokenizer.chat_template = THINKING
    prompt = chat.render_prompt(tokenizer, [{"role": "user", "content": "Tell."}], enable_thinking=thinking)
    ids = torch.tensor([*prompt, *tokenizer("A tale.")["input_ids"], tokenizer.eos_token_id]).int().numpy()
    start = len(prompt) if mask_from is None else mask_from
    example = Example(sample_id="one", ids=ids, loss_mask=torch.arange(len(ids)).numpy() >= start)
    meta = load_meta(directory)
    meta = dataclasses.replace(
        meta, chat_template_sha256=chat.template_sha256(tokenizer), enable_thinking=claims, prompts="gone", truncated_answers=0
    )
    write_examples(directory.parent / "rendered", {"train": [], "heldout": [example]}, meta)
    return directory.parent / "rendered"


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """The target with the template THINKING."""
    target = shutil.copytree(TARGET.path, tmp_path / "target")
    (target / "chat_template.jinja").write_text(THINKING)
    return target


@pytest.mark.parametrize(
    ("data", "settings", "fault"),
    [
        ({"thinking": True, "claims": True}, {}, None),
        ({"thinking": False, "claims": False}, {}, None),
        ({"thinking": True, "claims": False}, {}, "thinking"),
        ({"thinking": True, "claims": True}, {"thinking": "off"}, "thinking"),
        ({"thinking": False, "claims": False}, {"thinking": "on"}, "thinking"),
        ({"thinking": False, "claims": False, "mask_from": 0}, {}, "supervision"),
    ],
)
def test_a_thinking_mode_that_is_not_served_fails(
    run: Path, served: Path, tmp_path: Path, data: dict[str, Any], settings: dict[str, Any], fault: str | None
) -> None:
    shutil.copytree(run.parent / "data", tmp_path / "data")
    rendered = template_data(tmp_path / "data", **data)
    found = failed(run, target=str(served), data=rendered, probes=("template",), **settings)
    assert fault is None or f"template.{fault}" in found
    assert set(found) <= {f"template.{fault}", "template.render"}
    assert ("template.render" in found) == (fault == "supervision")


def test_another_template_than_the_data_s_fails(run: Path, served: Path) -> None:
    found = failed(run, target=str(served), probes=("template",))
    assert {"template.same", "template.render"} <= set(found)


def test_a_template_that_rewrites_its_prompt_fails(run: Path, served: Path) -> None:
    (served / "chat_template.jinja").write_text(THINKING.replace("assistant\n{% if not", "robot\n{% if not"))
    assert "template.prefix" in failed(run, target=str(served), probes=("template",))


def test_a_mask_token_that_the_data_was_not_prepared_with_fails(run: Path, tmp_path: Path) -> None:
    data = run.parent / "data"
    meta = dataclasses.replace(load_meta(data), mask_token_id=258)
    write_examples(tmp_path / "other", {"train": load_examples(data, "train")}, meta)
    found = failed(run, data=tmp_path / "other", probes=("contract",))
    assert set(found) == {"contract.mask-token"}
    assert "prepared with 258" in found["contract.mask-token"]
