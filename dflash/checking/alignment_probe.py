"""What was this drafter trained to do? Asked of its weights, on text of the target.

A drafter predicts best what it was trained on. So it is run on the same blocks with other readings of its contract: labels
one place earlier or later, features one target layer higher or lower, other rotary frequencies. If another reading fits
better than the one in config.json, training and config.json disagree: serving follows config.json and will be slow,
however healthy the loss was.

Readings are compared block by block; one beats another when the mean difference over blocks is at least `CLEAR` standard
errors. A drafter that predicts no offset clearly better than another (untrained, or text that repeats itself) shows nothing,
and that is said. Known limit: a reading that none of those below comes near to is not found.

Legend: N anchor slots, B block size, S tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash.batch import PackedBatch, TargetStates
from dflash.checking.settings import Check, judged, unobserved
from dflash.checking.subject import Subject
from dflash.checking.texts import Texts
from dflash.modeling.rope import RotaryEmbedding, rope_of_target
from dflash.modeling.target import text_config, text_decoder

OFFSETS = (-1, 0, 1, 2)  # of labels, relative to the token at anchor + k
SHIFTS = (0, -1, 1, -2, 2)  # of all feature layers
THETAS = (1e4, 5e5, 1e6, 5e6, 1e7)
CLEAR = 4.0  # standard errors
LEAST_ACCURACY = 0.02
LEAST_BLOCKS = 8
LEAST_NATS = 0.02  # a reading that is better by less is the same reading

Embedding = -1  # as a layer id: what goes into layer 0


@dataclass(frozen=True)
class Reading:
    """Per offset and block [blocks] fp64: share of positions hit, and mean log-likelihood; NaN where no label exists."""

    hits: Mapping[int, Tensor]
    likelihood: Mapping[int, Tensor]

    def accuracy(self, offset: int) -> float:
        """Mean share of hits."""
        value = self.hits[offset].nanmean().item()
        return 0.0 if math.isnan(value) else value


def probe(subject: Subject, texts: Texts) -> Iterator[Check]:
    """Label offset, feature layers, rotary frequencies."""
    names = ("alignment.label-offset", "alignment.feature-layer", "alignment.rope")
    assert subject.shape is not None
    batches = [batch.to(subject.device) for batch in texts.batches()]
    outputs = [layer_outputs(subject.model, batch) for batch in batches]
    variants = _layer_variants(subject.shape.target_layer_ids, subject.shape.num_target_layers)
    readings = {name: _read(subject, batches, outputs, layers) for name, layers in variants.items()}
    best = max(readings, key=lambda name: max(readings[name].accuracy(offset) for offset in OFFSETS))
    offset, why_not = _clear_offset(readings[best])
    if offset is None:
        yield from (unobserved(name, why_not, "check a trained checkpoint, or more --examples") for name in names)
        return
    yield _label_offset(readings[best], offset)
    yield _feature_layer(readings, offset)
    declared = {"as declared": readings[best]}
    for name, rotary in _rope_variants(subject):
        declared[name] = _with_rotary(subject, rotary, lambda: _read(subject, batches, outputs, variants[best]))
    yield _rope(declared, offset)


def _clear_offset(reading: Reading) -> tuple[int | None, str]:
    """The offset that is predicted clearly better than all others, or why there is none."""
    blocks = int((~reading.hits[0].isnan()).sum())
    if blocks < LEAST_BLOCKS:
        return None, f"{blocks} blocks, at least {LEAST_BLOCKS} are needed"
    best = max(OFFSETS, key=reading.accuracy)
    unclear = [other for other in OFFSETS if other != best and _beats(reading.hits[best], reading.hits[other]) < CLEAR]
    if reading.accuracy(best) < LEAST_ACCURACY or unclear:
        return None, f"no label offset is predicted clearly better than the others ({_offsets(reading)}, {blocks} blocks)"
    return best, ""


def _offsets(reading: Reading) -> str:
    return ", ".join(f"{offset:+d}: {100 * reading.accuracy(offset):.1f} %" for offset in OFFSETS)


def _beats(one: Tensor, other: Tensor) -> float:
    """By how many standard errors `one` is above `other`, block by block [blocks]; 0 with too few blocks."""
    difference = one - other
    difference = difference[~difference.isnan()]
    if len(difference) < LEAST_BLOCKS:
        return 0.0
    mean, error = difference.mean().item(), difference.std().item() / math.sqrt(len(difference))
    return math.copysign(math.inf, mean) if error == 0 and mean else mean / error if error else 0.0


def _label_offset(reading: Reading, offset: int) -> Check:
    found = f"index k predicts the token at anchor + k best ({_offsets(reading)})"
    if offset:
        found = (
            f"labels are shifted by {_one(offset)}: index k predicts the token at anchor + k {offset:+d} ({_offsets(reading)})"
        )
    fix = "train with labels at anchor + k, or convert the checkpoint to the convention it is served under"
    return judged("alignment.label-offset", offset == 0, found, fix)


def _one(number: int) -> str:
    return "one" if abs(number) == 1 else str(abs(number))


def _feature_layer(readings: dict[str, Reading], offset: int) -> Check:
    name = "alignment.feature-layer"
    likelihood = {layers: reading.likelihood[offset] for layers, reading in readings.items()}
    own, best = "as declared", max(likelihood, key=lambda layers: likelihood[layers].nanmean().item())
    shown = ", ".join(f"{layers}: {-value.nanmean().item():.3f}" for layers, value in likelihood.items())
    if best != own and _better(likelihood[best], likelihood[own]):
        found = f"features are {best} in training: they fit the drafter best (loss {shown})"
        return judged(name, good=False, found=found, fix="write the layers that were trained into target_layer_ids (0-based)")
    unclear = [layers for layers in likelihood if layers != own and not _better(likelihood[own], likelihood[layers])]
    if unclear:
        return unobserved(name, f"the declared layers fit no better than {' or '.join(unclear)} (loss {shown})")
    return judged(name, good=True, found=f"the declared layers fit best (loss {shown})", fix="")


def _better(one: Tensor, other: Tensor) -> bool:
    return (one - other).nanmean().item() >= LEAST_NATS and _beats(one, other) >= CLEAR


def _rope(readings: dict[str, Reading], offset: int) -> Check:
    likelihood = {name: reading.likelihood[offset] for name, reading in readings.items()}
    own = likelihood.pop("as declared")
    better = [name for name, value in likelihood.items() if _better(value, own)]
    shown = ", ".join(f"{name}: {-value.nanmean().item():.3f}" for name, value in likelihood.items())
    found = f"loss {-own.nanmean().item():.3f} as declared, {shown}"
    if better:
        best = max(better, key=lambda name: likelihood[name].nanmean().item())
        found = f"the drafter was trained with {best}, not with the declared frequencies ({found})"
    return judged("alignment.rope", not better, found, "declare the frequencies of training, or train with those of the target")


def _read(subject: Subject, batches: list[PackedBatch], outputs: list[dict[int, Tensor]], layers: tuple[int, ...]) -> Reading:
    hits: dict[int, list[Tensor]] = {offset: [] for offset in OFFSETS}
    likelihood: dict[int, list[Tensor]] = {offset: [] for offset in OFFSETS}
    assert subject.shape is not None
    size = subject.shape.block_size
    for batch, output in zip(batches, outputs, strict=True):
        features = torch.cat([output[layer] for layer in layers], dim=-1)
        hidden = subject.worker.block_states(TargetStates(batch=batch, features=features))
        hidden = hidden.view(-1, size, hidden.shape[-1])[batch.anchor_valid[0], 1:]
        log_q = subject.worker.ends.logits(hidden).log_softmax(-1)  # [blocks, B-1, V]
        guesses = log_q.argmax(-1)
        for offset in OFFSETS:
            labels, known = _labels(batch, size, offset)
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


def _layer_variants(ids: tuple[int, ...], depth: int) -> dict[str, tuple[int, ...]]:
    names = {shift: f"shifted by {_one(shift)} layer{'s' * (abs(shift) > 1)} {'up' if shift > 0 else 'down'}" for shift in SHIFTS}
    names[0] = "as declared"
    shifted = {names[shift]: tuple(layer + shift for layer in ids) for shift in SHIFTS}
    possible = {name: layers for name, layers in shifted.items() if layers[0] >= Embedding and layers[-1] < depth}
    return possible | ({"in reverse order": ids[::-1]} if len(ids) > 1 else {})


def layer_outputs(model: Any, batch: PackedBatch) -> dict[int, Tensor]:
    """Output [1, S, H] fp32 of every decoder layer by its id, and of the embedding as -1; collected apart from the trainer."""
    decoder = text_decoder(model)
    outputs: dict[int, Tensor] = {}

    def keep(layer: int) -> Callable[..., None]:
        def hook(_module: Any, arguments: Any, output: Any) -> None:
            if layer == 0:
                outputs[Embedding] = (arguments[0] if arguments else outputs[Embedding]).float().clone()
            outputs[layer] = (output[0] if isinstance(output, tuple) else output).float().clone()

        return hook

    hooks = [layer.register_forward_hook(keep(number)) for number, layer in enumerate(decoder.layers)]
    hooks.append(decoder.embed_tokens.register_forward_hook(lambda _m, _a, output: outputs.update({Embedding: output.float()})))
    try:
        decoder(input_ids=batch.input_ids, position_ids=batch.positions, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def _rope_variants(subject: Subject) -> Iterator[tuple[str, RotaryEmbedding]]:
    """Other rotary embeddings that trainers are known to use by accident."""
    shape = subject.shape
    assert shape is not None
    declared = shape.rope_parameters
    candidates = {f"theta {theta:g}": {**declared, "rope_theta": theta} for theta in THETAS}
    if declared.get("rope_type", "default") != "default":
        candidates["no scaling"] = {"rope_type": "default", "rope_theta": declared["rope_theta"]}
    candidates["the target's rope"] = rope_of_target(text_config(subject.model))
    for name, parameters in candidates.items():
        rotary = RotaryEmbedding(parameters, shape.head_dim, shape.max_position_embeddings)
        if not torch.equal(rotary.inv_freq, subject.worker.drafter.rotary.inv_freq.cpu()):
            yield name, rotary
    rounded = RotaryEmbedding(declared, shape.head_dim, shape.max_position_embeddings)
    rounded.inv_freq = rounded.inv_freq.bfloat16().float()
    yield "frequencies rounded to bf16", rounded


def _with_rotary(subject: Subject, rotary: RotaryEmbedding, read: Callable[[], Reading]) -> Reading:
    drafter = subject.worker.drafter
    own = drafter.rotary
    rotary.inv_freq = rotary.inv_freq.to(subject.device)
    drafter.rotary = rotary
    try:
        return read()
    finally:
        drafter.rotary = own
