"""What was this drafter trained to do? Asked of its weights, on text of the target.

A drafter predicts best what it was trained on. So it is run on the same blocks with other readings of its contract: labels
one place earlier or later, features one target layer higher or lower, other rotary frequencies. If another reading fits
better than the one in config.json, training and config.json disagree: serving follows config.json and will be slow,
however healthy the loss was.

Readings are compared block by block; one beats another when its mean log-likelihood is higher by a least amount and by
`CLEAR` standard errors. A drafter that predicts no offset clearly better than another (untrained, or text that repeats
itself) shows nothing, and that is said. Known limit: a reading that none of those in `readings` comes near to is not found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from torch import Tensor

from dflash.checking.readings import DECLARED, OFFSETS, Reader, Reading, layer_outputs, one
from dflash.checking.settings import Check, judged, unobserved
from dflash.checking.subject import Subject
from dflash.checking.texts import Texts

CLEAR = 4.0  # standard errors
LEAST_ACCURACY = 0.02
LEAST_BLOCKS = 8
LEAST_NATS = 0.02  # a reading that is better by less is the same reading
# An untrained drafter of text that comes in runs hits the nearer offset a little more often; a trained one is far from that.
LEAST_NATS_OFFSET = 0.1


def probe(subject: Subject, texts: Texts) -> Iterator[Check]:
    """Label offset, feature layers, rotary frequencies."""
    names = ("alignment.label-offset", "alignment.feature-layer", "alignment.rope")
    assert subject.shape is not None
    batches = [batch.to(subject.device) for batch in texts.batches()]
    reader = Reader(subject, batches, [layer_outputs(subject.model, batch) for batch in batches])
    layers = reader.by_layers(DECLARED)
    ropes = reader.by_ropes(_best(layers))
    if _best(ropes) != DECLARED:  # with other frequencies, other layers may fit: the ones above were read with the wrong ones
        layers = reader.by_layers(_best(ropes))
        ropes = reader.by_ropes(_best(layers))
    best = max((layers[_best(layers)], ropes[_best(ropes)]), key=_peak)
    offset, why_not = _clear_offset(best)
    if offset is None:
        yield from (unobserved(name, why_not, "check a trained checkpoint, or more --examples") for name in names)
        return
    yield _label_offset(best, offset)
    yield _feature_layer(layers, offset)
    yield _rope(ropes, offset)


def _peak(reading: Reading) -> float:
    return max(reading.mean(offset) for offset in OFFSETS)


def _best(readings: Mapping[str, Reading]) -> str:
    return max(readings, key=lambda name: _peak(readings[name]))


def _clear_offset(reading: Reading) -> tuple[int | None, str]:
    """The offset that is predicted clearly better than all others, or why there is none."""
    blocks = int((~reading.hits[0].isnan()).sum())
    if blocks < LEAST_BLOCKS:
        return None, f"{blocks} blocks, at least {LEAST_BLOCKS} are needed"
    best = max(OFFSETS, key=reading.mean)
    own = reading.likelihood[best]
    unclear = [other for other in OFFSETS if other != best and not _better(own, reading.likelihood[other], LEAST_NATS_OFFSET)]
    if reading.accuracy(best) < LEAST_ACCURACY or unclear:
        return None, f"no label offset is predicted clearly better than the others ({_offsets(reading)}, {blocks} blocks)"
    return best, ""


def _offsets(reading: Reading) -> str:
    return ", ".join(f"{o:+d}: loss {-reading.mean(o):.2f}, {100 * reading.accuracy(o):.0f} % hit" for o in OFFSETS)


def _beats(own: Tensor, other: Tensor) -> float:
    """By how many standard errors `own` is above `other`, block by block [blocks]; 0 with too few blocks."""
    difference = own - other
    difference = difference[~difference.isnan()]
    if len(difference) < LEAST_BLOCKS:
        return 0.0
    mean, error = difference.mean().item(), difference.std().item() / math.sqrt(len(difference))
    return math.copysign(math.inf, mean) if error == 0 and mean else mean / error if error else 0.0


def _label_offset(reading: Reading, offset: int) -> Check:
    found = f"index k predicts the token at anchor + k best ({_offsets(reading)})"
    if offset:
        found = f"labels are shifted by {one(offset)}: index k predicts anchor + k {offset:+d} best ({_offsets(reading)})"
    fix = "train with labels at anchor + k, or convert the checkpoint to the convention it is served under"
    return judged("alignment.label-offset", offset == 0, found, fix)


def _feature_layer(readings: dict[str, Reading], offset: int) -> Check:
    name = "alignment.feature-layer"
    likelihood = {layers: reading.likelihood[offset] for layers, reading in readings.items()}
    own, best = DECLARED, max(likelihood, key=lambda layers: likelihood[layers].nanmean().item())
    shown = ", ".join(f"{layers}: {-value.nanmean().item():.3f}" for layers, value in likelihood.items())
    if best != own and _better(likelihood[best], likelihood[own]):
        found = f"features are {best} in training: they fit the drafter best (loss {shown})"
        return judged(name, good=False, found=found, fix="write the layers that were trained into target_layer_ids (0-based)")
    unclear = [layers for layers in likelihood if layers != own and not _better(likelihood[own], likelihood[layers])]
    if unclear:
        return unobserved(name, f"the declared layers fit no better than {' or '.join(unclear)} (loss {shown})")
    return judged(name, good=True, found=f"the declared layers fit best (loss {shown})", fix="")


def _better(own: Tensor, other: Tensor, least: float = LEAST_NATS) -> bool:
    return (own - other).nanmean().item() >= least and _beats(own, other) >= CLEAR


def _rope(readings: dict[str, Reading], offset: int) -> Check:
    likelihood = {name: reading.likelihood[offset] for name, reading in readings.items()}
    own = likelihood.pop(DECLARED)
    better = [name for name, value in likelihood.items() if _better(value, own)]
    shown = ", ".join(f"{name}: {-value.nanmean().item():.3f}" for name, value in likelihood.items())
    found = f"loss {-own.nanmean().item():.3f} as declared, {shown}"
    if better:
        best = max(better, key=lambda name: likelihood[name].nanmean().item())
        found = f"the drafter was trained with {best}, not with the declared frequencies ({found})"
    return judged("alignment.rope", not better, found, "declare the frequencies of training, or train with those of the target")
