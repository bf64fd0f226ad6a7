"""Bytes that a run needs on each GPU, by parts, before anything is loaded; `dflash.plan` is the command.

What stays (weights, gradients, moments, frozen ends, features in the queue), and what a step adds at its peak. Counted are the
levers that change it: `compile.loss`, `compile.activation_memory`, `optim.bf16_copies`, `loss.fp8_head`, `fully_shard`.

Known limits: fragmentation, CUDA's own context (about 0.5 GiB) and the compiler's scratch are left out. Below 1, every
`activation_memory` counts as torch's first stage of saving, which the budget 0.75 was measured to take: at 0.5 up to 10 % less
was measured. What fp8 takes while one kernel does not make its scores has not been measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash.config import RunConfig, Topology
from dflash.modeling.loss import chunks
from dflash.modeling.shape import DrafterShape

_FP8, _BF16, _FP32 = 1, 2, 4
# Of a drafter in threads: the micro-batch that it is at, and the one before, until the GPU is done with it (`dflash.worker`).
_HELD = 2
_SENT = 3  # of a target in processes: one is made while two are on their way (`dflash.engine.transport`)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The numbers that everything is worked out from."""

    shape: DrafterShape
    drafter_parameters: int
    target_parameters: int  # embedding and layers that run
    target_layers: int  # that run
    tied: bool  # the target's head is its embedding


def memory_of(config: RunConfig, sizes: Sizes, targets: Sequence[str], drafters: Sequence[str]) -> dict[str, dict[str, int]]:
    """Bytes on every device by part."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for device in targets:
        for name, size in {**_of_target(config, sizes), **_made(config, sizes, len(targets), len(drafters))}.items():
            found[device][name] += size
    for number, device in enumerate(drafters):
        for name, size in _of_drafter(config, sizes, leads=number == 0).items():
            found[device][name] += size
        if config.engine == "processes":
            found[device]["features that arrive"] += -(-config.telemetry.queue_items // len(drafters)) * _features(config, sizes)
        elif device not in targets:
            found[device]["features of two micro-batches"] += _HELD * _features(config, sizes)
    return {device: dict(parts) for device, parts in found.items()}


def _of_target(config: RunConfig, sizes: Sizes) -> dict[str, int]:
    shape, tokens = sizes.shape, config.data.rows_per_batch * config.data.sequence_length
    width = 3 * shape.intermediate_size + 6 * shape.hidden_size  # of one layer: gate, up, product; norms, residuals, attention
    value: int = getattr(torch, config.target.dtype).itemsize
    return {"target: weights": value * sizes.target_parameters, "target: a forward pass": value * tokens * width}


def _made(config: RunConfig, sizes: Sizes, targets: int, drafters: int) -> dict[str, int]:
    """Features on the device of one of the targets. A queue counts one from when it is begun to when a drafter takes it."""
    one = _features(config, sizes)
    if config.engine == "processes":
        return {"features that are sent": _SENT * one}
    queued, held = -(-config.telemetry.queue_items // targets), -(-_HELD * drafters // targets)
    return {"features in the queue": queued * one, "features that drafters hold": held * one}


def _of_drafter(config: RunConfig, sizes: Sizes, *, leads: bool) -> dict[str, int]:
    shape, parameters = sizes.shape, sizes.drafter_parameters
    if config.fully_shard:
        return _of_sharded_drafter(config, sizes)
    leads = leads or config.engine == "processes"  # there each drafter makes the update
    return {
        "drafter: fp32 weights and gradients": 2 * _FP32 * parameters,
        "drafter: moments": 2 * _FP32 * parameters if leads else 0,
        "drafter: bf16 weights": _BF16 * parameters,  # copies that stay, or casts that last from forward to backward
        "drafter: frozen ends": shape.vocab_size * shape.hidden_size * _bytes_of_ends(config, sizes),
        "drafter: a step": _step_bytes(config, sizes),
    }


def _of_sharded_drafter(config: RunConfig, sizes: Sizes) -> dict[str, int]:
    """Parts of everything; of the gathered, what lies outside layers, two layers, and gradients of one, in bf16 and fp32."""
    shape, parameters = sizes.shape, sizes.drafter_parameters
    part = -(-parameters // Topology.parse(config.topology).drafters)
    outside = shape.num_features * shape.hidden_size**2
    layer = -(-(parameters - outside) // shape.num_layers)
    gathered = _BF16 * (outside + 2 * layer) + (_BF16 + _FP32) * max(layer, outside)
    return {
        "drafter: parts of fp32 weights and gradients": 2 * _FP32 * part,
        "drafter: parts of moments": 2 * _FP32 * part,
        "drafter: gathered weights and gradients": gathered,
        "drafter: frozen ends": shape.vocab_size * shape.hidden_size * _bytes_of_ends(config, sizes),
        "drafter: a step, or the start": max(_step_bytes(config, sizes), _FP32 * parameters),  # it starts with all weights
    }


def _bytes_of_ends(config: RunConfig, sizes: Sizes) -> int:
    """Of each number of a table: embedding and head, which may be one, and the head in fp8 for each product."""
    return _BF16 * (1 if sizes.tied else 2) + (2 * _FP8 if config.loss.fp8_head else 0)


def _step_bytes(config: RunConfig, sizes: Sizes) -> int:
    """The larger of two peaks: in the loss, with all activations, and at the end of backward, with all gradients."""
    shape, data = sizes.shape, config.data
    drafts = data.rows_per_batch * data.num_anchors * (shape.block_size - 1)
    part = chunks(drafts, config.loss.chunk_tokens)[0]
    scores: int = (part.stop - part.start) * shape.vocab_size * _bytes_of_logit(config)
    rows = 3 * _BF16 * drafts * shape.hidden_size  # the head's input, its gradient, and the drafter's output
    gradients = 0 if config.fully_shard else (_BF16 if config.optim.bf16_copies else _FP32) * sizes.drafter_parameters
    return max(_activation_bytes(config, shape) + scores + rows, gradients)


def _activation_bytes(config: RunConfig, shape: DrafterShape) -> int:
    """What backward finds of the drafter's forward."""
    data = config.data
    context = data.rows_per_batch * data.sequence_length
    block = data.rows_per_batch * data.num_anchors * shape.block_size
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    # Of a block token in a layer: input, residual; q before and after its norm, what attention gives; k and v likewise; gate, up.
    of_block = 2 * shape.hidden_size + 3 * queries + 4 * keys + 2 * shape.intermediate_size
    fused = shape.hidden_size  # of a context token, once; in each layer it has keys and values
    if config.compile.activation_memory == 1:  # else made again: the outputs of all norms over H, and gate times up
        of_block += 2 * shape.hidden_size + shape.intermediate_size
        fused += shape.hidden_size
    return _BF16 * (shape.num_layers * (block * of_block + context * 4 * keys) + context * fused)


def _bytes_of_logit(config: RunConfig) -> int:
    """At the peak of scoring: the logit, its gradient where one kernel makes it, else fp32 copies."""
    made = (_FP8 if config.loss.fp8_head else _BF16) if config.compile.loss else 2 * _FP32
    if config.loss.fp8_head and not config.compile.loss:
        made = 4 * _FP32 + 1  # capped logits, likelihoods, two products, and which token is the label
    size = _BF16 + made
    return 2 * size if config.loss.kind == "kl" else size


def _features(config: RunConfig, sizes: Sizes) -> int:
    """Bytes of the target states of one micro-batch."""
    width = sizes.shape.num_features + (1 if config.loss.kind == "kl" else 0)
    value: int = getattr(torch, config.target.dtype).itemsize
    tokens: int = config.data.rows_per_batch * config.data.sequence_length
    return value * tokens * width * sizes.shape.hidden_size
