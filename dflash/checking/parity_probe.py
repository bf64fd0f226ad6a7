"""Does serving compute what training computed? The same text through both of the program's paths.

Training: the target's packed forward, then all blocks at once under a mask. Serving: the target step by step with its KV
cache, a `DraftSession` that projects each token's features once and keeps keys and values, no mask, and everything in the
dtype that is served. Features, rotary frequencies, logits and greedy tokens are compared.

The deviation of two tensors is the root mean square of their difference, divided by the spread of the first. Greedy tokens
may differ where the two best logits of training are closer than the deviation allows.

Legend: B block size, K features, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash.batch import PackedBatch, TargetStates
from dflash.checking.readings import layer_outputs
from dflash.checking.settings import Check, judged, unobserved
from dflash.checking.subject import Subject
from dflash.checking.texts import Texts
from dflash.config import ConfigError
from dflash.decoding.draft_session import DraftSession
from dflash.decoding.target_session import TargetSession, check_croppable
from dflash.modeling.attention import decoding_kernels

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
TEXTS, BLOCKS = 2, 8  # compared: texts, and blocks of each

NAMES = ("parity.features", "parity.logits", "parity.tokens")


def probe(subject: Subject, texts: Texts) -> Iterator[Check]:
    """Frequencies, features, logits, tokens."""
    yield _frequencies(subject)
    try:
        check_croppable(subject.model)
    except ConfigError as error:
        yield from (unobserved(name, str(error)) for name in NAMES)
        return
    batches = [batch for batch, _ in zip(texts.batches(), range(TEXTS), strict=False)]
    pairs = [_both_ways(subject, batch.to(subject.device)) for batch in batches]
    yield _features(subject, batches, pairs)
    yield from _logits(subject, pairs)


def _frequencies(subject: Subject) -> Check:
    """Both drafters' rotary frequencies against transformers' own, which stay fp32."""
    shape = subject.shape
    assert shape is not None
    parameters = {key: value for key, value in shape.rope_parameters.items() if key != "partial_rotary_factor"}
    config = Qwen3Config(
        head_dim=shape.head_dim, max_position_embeddings=shape.max_position_embeddings, rope_parameters=parameters
    )
    expected = Qwen3RotaryEmbedding(config).inv_freq.float()
    used = {
        "training": subject.worker.drafter.rotary.inv_freq,
        "serving": subject.served[0].rotary.inv_freq,
        "serving in bfloat16": subject.bfloat16_frequencies,
    }
    wrong = []
    for where, found in used.items():
        off = ((found.cpu().float() - expected) / expected).abs().max().item()
        if found.dtype != torch.float32 or off > 1e-6:
            wrong.append(f"{where} has {found.dtype} frequencies, off by up to {off:.1e} of their value")
    good = f"{len(expected)} frequencies, fp32 and equal to transformers' in training and serving"
    fix = "keep inv_freq in fp32 when the module is cast, then train again"
    return judged("parity.frequencies", not wrong, "; ".join(wrong) or good, fix)


Pair = dict[str, Tensor]  # of one text: training and serving features [tokens, K*H] and logits [blocks, B-1, V], fp32


def _both_ways(subject: Subject, batch: PackedBatch) -> Pair:
    assert subject.shape is not None
    size = subject.shape.block_size
    used = batch.anchors[0][batch.anchor_valid[0] & (batch.anchors[0] > 0)].sort().values
    chosen = used[:: -(-len(used) // BLOCKS)]
    features = subject.runner.run(batch)[0].float()
    hidden = subject.worker.block_states(TargetStates(batch=batch, features=features))
    logits = subject.worker.ends.logits(hidden).view(-1, size, subject.shape.vocab_size)[:, 1:]
    slots = (batch.anchors[0][None] == chosen[:, None]).int().argmax(-1)  # the first slot of each
    served, tokens, proposed = _serve(subject, batch.input_ids[0], chosen.tolist())
    return {
        "training features": features[0, : len(served)],
        "serving features": served,
        "training logits": logits[slots],
        "serving logits": tokens,
        "proposed": proposed,
    }


@torch.inference_mode()
def _serve(subject: Subject, ids: Tensor, anchors: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Features [last anchor, K*H], logits [anchors, B-1, V] and proposed tokens [anchors, B-1] of the decoding path."""
    assert subject.shape is not None
    drafter, ends = subject.served
    drafting = DraftSession(drafter, ends, 1)
    features, logits, start = [], [], 0
    with TargetSession(subject.model, subject.shape.target_layer_ids) as target, decoding_kernels():
        for anchor in anchors:
            places = torch.arange(anchor - start, device=ids.device)[None]
            if start:
                target.verify(ids[None, start:anchor], places + start, None)
                target.keep([range(anchor - start)])
            else:
                target.prefill([ids[:anchor]])
            features.append(target.features(places))
            drafting.extend(features[-1], [anchor - start])
            logits.append(drafting.logits([int(ids[anchor])])[0].float())
            start = anchor
    scores = torch.stack(logits)
    return torch.cat(features, dim=1)[0].float(), scores, scores.argmax(-1)


def deviation(one: Tensor, other: Tensor) -> float:
    """Root mean square of the difference, divided by the spread of `one`."""
    return ((one - other).square().mean().sqrt() / one.std().clamp_min(1e-30)).item()


def _features(subject: Subject, batches: list[PackedBatch], pairs: list[Pair]) -> Check:
    assert subject.shape is not None
    ids, size = subject.shape.target_layer_ids, subject.shape.hidden_size
    allowed = TOLERANCE[subject.dtype]
    outputs = layer_outputs(subject.model, batches[0].to(subject.device))
    problems, worst = [], 0.0
    for number, layer in enumerate(ids):
        part = slice(number * size, (number + 1) * size)
        training, serving = (torch.cat([pair[f"{path} features"][:, part] for pair in pairs]) for path in ("training", "serving"))
        worst = max(worst, deviation(training, serving))
        tokens = len(pairs[0]["training features"])
        for path in ("training", "serving"):
            here = pairs[0][f"{path} features"][:, part]
            off = {other: deviation(output[0, :tokens], here) for other, output in outputs.items()}
            best = min(off, key=lambda other: off[other])
            if off[layer] > allowed and best != layer:
                problems.append(f"{path} reads layer {best} for layer {layer}: shifted by {best - layer:+d}")
    if worst > allowed and not problems:
        problems.append(f"features of training and serving differ by {worst:.1e}, allowed {allowed:.0e}")
    good = f"{len(ids)} layers: training and serving differ by at most {worst:.1e} (allowed {allowed:.0e})"
    fix = "read the output of layer id, which is hidden_states[id + 1], in training and in serving"
    return judged("parity.features", not problems, "; ".join(problems) or good, fix)


def _logits(subject: Subject, pairs: list[Pair]) -> Iterator[Check]:
    allowed = TOLERANCE[subject.dtype]
    training, serving = (torch.cat([pair[f"{path} logits"] for pair in pairs]) for path in ("training", "serving"))
    off = deviation(training, serving)
    found = f"{len(training)} blocks differ by {off:.1e}, allowed {allowed:.0e} in {str(subject.dtype).removeprefix('torch.')}"
    fix = "the drafter computes something else when it decodes: compare positions, context and rotary frequencies of both paths"
    yield judged("parity.logits", off <= allowed, found, fix)
    proposed = torch.cat([pair["proposed"] for pair in pairs])
    top = training.topk(2, dim=-1)
    near = (top.values[..., 0] - top.values[..., 1]) <= 4 * allowed * training.std()
    different = top.indices[..., 0] != proposed
    wrong, ties = int((different & ~near).sum()), int((different & near).sum())
    found = f"{wrong} of {proposed.numel()} greedy tokens differ ({ties} more at near ties)"
    yield judged("parity.tokens", wrong == 0, found, fix)
