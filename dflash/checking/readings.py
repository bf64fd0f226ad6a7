"""A drafter read in other ways than its config.json says: other labels, target layers, rotary frequencies.

Features are collected and labels made here, apart from the trainer's own code, because that is what is in question.

Legend: N anchor slots, B block size, S tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash.batch import PackedBatch, TargetStates
from dflash.checking.subject import Subject
from dflash.modeling.rope import RotaryEmbedding, rope_of_target
from dflash.modeling.target import text_config, text_decoder

OFFSETS = (-1, 0, 1, 2)  # of labels, relative to the token at anchor + k
SHIFTS = (0, -1, 1, -2, 2)  # of all feature layers
THETAS = (1e4, 5e5, 1e6, 5e6, 1e7)
DECLARED = "as declared"
EMBEDDING = -1  # as a layer id: what goes into layer 0


@dataclass(frozen=True)
class Reading:
    """Per offset and block [blocks] fp64: share of positions hit, and mean log-likelihood; NaN where no label exists."""

    hits: Mapping[int, Tensor]
    likelihood: Mapping[int, Tensor]

    def mean(self, offset: int) -> float:
        """Mean log-likelihood in nats; minus infinity where no label exists."""
        value = self.likelihood[offset].nanmean().item()
        return -math.inf if math.isnan(value) else value

    def accuracy(self, offset: int) -> float:
        """Mean share of hits."""
        value = self.hits[offset].nanmean().item()
        return 0.0 if math.isnan(value) else value


class Reader:
    """Runs the drafter over all texts under other readings of its contract."""

    def __init__(self, subject: Subject, batches: list[PackedBatch], outputs: list[dict[int, Tensor]]) -> None:
        assert subject.shape is not None
        self._worker, self._size = subject.worker, subject.shape.block_size
        self._batches, self._outputs = batches, outputs
        self._layers = _layer_variants(subject.shape.target_layer_ids, subject.shape.num_target_layers)
        self._ropes = _rope_variants(subject)

    def by_layers(self, rope: str) -> dict[str, Reading]:
        """Every choice of layers, with one choice of frequencies."""
        return {name: self._with_rope(rope, layers) for name, layers in self._layers.items()}

    def by_ropes(self, layers: str) -> dict[str, Reading]:
        """Every choice of frequencies, with one choice of layers."""
        return {name: self._with_rope(name, self._layers[layers]) for name in self._ropes}

    def _with_rope(self, rope: str, layers: tuple[int, ...]) -> Reading:
        drafter = self._worker.drafter
        own = drafter.rotary
        drafter.rotary = self._ropes[rope]
        try:
            return self._read(layers)
        finally:
            drafter.rotary = own

    def _read(self, layers: tuple[int, ...]) -> Reading:
        hits: dict[int, list[Tensor]] = {offset: [] for offset in OFFSETS}
        likelihood: dict[int, list[Tensor]] = {offset: [] for offset in OFFSETS}
        for batch, output in zip(self._batches, self._outputs, strict=True):
            features = torch.cat([output[layer] for layer in layers], dim=-1)
            hidden = self._worker.block_states(TargetStates(batch=batch, features=features))
            hidden = hidden.view(-1, self._size, hidden.shape[-1])[batch.anchor_valid[0], 1:]
            log_q = self._worker.ends.logits(hidden).log_softmax(-1)  # [blocks, B-1, V]
            guesses = log_q.argmax(-1)
            for offset in OFFSETS:
                labels, known = _labels(batch, self._size, offset)
                chosen = log_q.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
                hits[offset].append(_block_means((guesses == labels).double(), known))
                likelihood[offset].append(_block_means(chosen.double(), known))
        return Reading({o: torch.cat(v).cpu() for o, v in hits.items()}, {o: torch.cat(v).cpu() for o, v in likelihood.items()})


def _labels(batch: PackedBatch, block_size: int, offset: int) -> tuple[Tensor, Tensor]:
    """Tokens at anchor + k + offset [blocks, B-1] of a row with one document, and which of them exist and come after the anchor.

    Written apart from the trainer's own labels on purpose: those are what is in question.
    """
    anchors = batch.anchors[0][batch.anchor_valid[0]].unsqueeze(-1)
    place = anchors + torch.arange(1, block_size, device=anchors.device) + offset
    length = int((batch.document_ids[0] >= 0).sum())
    known = (place > anchors) & (place < length)
    place = place.clamp(0, length - 1)
    return batch.input_ids[0][place], known & batch.loss_mask[0][place]


def _block_means(values: Tensor, known: Tensor) -> Tensor:
    return torch.where(known, values, 0.0).sum(-1) / torch.where(known.any(-1), known.sum(-1), torch.nan)


def one(number: int) -> str:
    """A small distance in words."""
    return "one" if abs(number) == 1 else str(abs(number))


def _layer_variants(ids: tuple[int, ...], depth: int) -> dict[str, tuple[int, ...]]:
    names = {shift: f"shifted by {one(shift)} layer{'s' * (abs(shift) > 1)} {'up' if shift > 0 else 'down'}" for shift in SHIFTS}
    names[0] = DECLARED
    shifted = {names[shift]: tuple(layer + shift for layer in ids) for shift in SHIFTS}
    possible = {name: layers for name, layers in shifted.items() if layers[0] >= EMBEDDING and layers[-1] < depth}
    return possible | ({"in reverse order": ids[::-1]} if len(ids) > 1 else {})


def layer_outputs(model: Any, batch: PackedBatch) -> dict[int, Tensor]:
    """Output [1, S, H] fp32 of every decoder layer by its id, and of the embedding as -1; collected apart from the trainer."""
    decoder = text_decoder(model)
    outputs: dict[int, Tensor] = {}

    def keep(layer: int) -> Callable[..., None]:
        def hook(_module: Any, arguments: Any, output: Any) -> None:
            if layer == 0:
                outputs[EMBEDDING] = (arguments[0] if arguments else outputs[EMBEDDING]).float().clone()
            outputs[layer] = (output[0] if isinstance(output, tuple) else output).float().clone()

        return hook

    hooks = [layer.register_forward_hook(keep(number)) for number, layer in enumerate(decoder.layers)]
    hooks.append(decoder.embed_tokens.register_forward_hook(lambda _m, _a, output: outputs.update({EMBEDDING: output.float()})))
    try:
        decoder(input_ids=batch.input_ids, position_ids=batch.positions, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def _rope_variants(subject: Subject) -> dict[str, RotaryEmbedding]:
    """The declared rotary embedding, and those that trainers are known to use by accident."""
    shape = subject.shape
    assert shape is not None
    declared = shape.rope_parameters
    candidates = {DECLARED: declared, "the target's rope": rope_of_target(text_config(subject.model))}
    candidates |= {f"theta {theta:g}": {**declared, "rope_theta": theta} for theta in THETAS}
    if declared.get("rope_type", "default") != "default":
        candidates["no scaling"] = {"rope_type": "default", "rope_theta": declared["rope_theta"]}
    found: dict[str, RotaryEmbedding] = {}
    for name, parameters in candidates.items():
        rotary = RotaryEmbedding(parameters, shape.head_dim, shape.max_position_embeddings).to(subject.device)
        if not any(torch.equal(rotary.inv_freq, other.inv_freq) for other in found.values()):
            found[name] = rotary
    rounded = RotaryEmbedding(declared, shape.head_dim, shape.max_position_embeddings).to(subject.device)
    rounded.inv_freq = rounded.inv_freq.bfloat16().float()
    return found | {"frequencies rounded to bf16": rounded}
