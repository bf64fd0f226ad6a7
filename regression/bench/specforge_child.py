"""One training step of SpecForge's own drafter and loss, for the bench `specforge`; needs the package `specforge` on the path.

Driven as its trainer does: `OnlineDFlashModel` around `DFlashDraftModel` in bf16, transformers' compiled flex attention on GPUs
(a dense mask on CPUs), the head in checkpointed chunks of 128 blocks, decay 7. Not driven: its
optimizer, data and capture server.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config

from dflash.modeling.loss import default_gamma
from dflash.modeling.random_targets import RANDOM_TARGETS
from regression.bench import settings as bench
from regression.bench.clock import milliseconds, peak_bytes, reset_peak, synchronize
from regression.bench.settings import Settings


def measure(settings: Settings) -> dict[str, Any]:
    """Times and memory as JSON values."""
    config, device = settings.config(), settings.device
    on_gpu = device.type == "cuda"
    backend = "flex_attention" if on_gpu else "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if on_gpu else torch.float32)
    try:
        shape = bench.drafter_shape(config)
        batch = bench.random_batch(config, shape.vocab_size).to(device)
        with device:
            model = _model(settings, backend)
            features = torch.randn(1, config.data.sequence_length, shape.num_features * shape.hidden_size)
    finally:
        torch.set_default_dtype(before)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss, _, _ = model(batch.input_ids, features, batch.loss_mask.float())
        loss.backward()

    started = time.perf_counter()
    step()
    synchronize(device)
    first_seconds = time.perf_counter() - started
    spent = milliseconds(step, device, rounds=settings.rounds)
    reset_peak(device)
    step()
    return {
        "step_ms": spent,
        "first_step_seconds": first_seconds,
        "peak_bytes": peak_bytes(device),
        "parameters": sum(p.numel() for p in model.draft_model.parameters()),
        "backend": backend,
        "version": _version(),
    }


def _model(settings: Settings, backend: str) -> Any:
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel  # noqa: PLC0415 - only this process has it
    from specforge.modeling.draft.dflash import DFlashDraftModel  # noqa: PLC0415

    config = settings.config()
    shape = bench.drafter_shape(config)
    target = RANDOM_TARGETS[config.target.path.removeprefix("random:")]().to_dict()
    values = target | {
        "num_hidden_layers": shape.num_layers,
        "layer_types": ["full_attention"] * shape.num_layers,
        "num_target_layers": shape.num_target_layers,
        "block_size": shape.block_size,
        "dflash_config": {"mask_token_id": shape.mask_token_id, "target_layer_ids": list(shape.target_layer_ids)},
    }
    drafter_config = Qwen3Config(**values)
    drafter_config._attn_implementation = backend
    head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False).requires_grad_(requires_grad=False)
    embedding = nn.Embedding(shape.vocab_size, shape.hidden_size).requires_grad_(requires_grad=False)
    return OnlineDFlashModel(
        DFlashDraftModel(drafter_config).train(),
        head,
        embedding,
        shape.mask_token_id,
        block_size=shape.block_size,
        attention_backend=backend,
        num_anchors=config.data.num_anchors,
        loss_decay_gamma=default_gamma(shape.block_size),
    )


def _version() -> str | None:
    try:
        return importlib.metadata.version("specforge")
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser()
    bench.add_options(parser)
    sys.stdout.write(json.dumps(measure(bench.from_options(parser.parse_args()))) + "\n")
