"""The target with its features, beside plain transformers that keeps all hidden states, in one run on equal weights.

    python -m regression.bench target_forward

One row of one document of random tokens. The runner stops at its last selected layer and copies the features of the selected
ones into one tensor; transformers runs all layers and no head. Timed: the runner as it is, the runner with compiled layers
(`--compile.target`), and a row of four documents, for which transformers makes a mask and leaves its fastest kernel.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from dflash.batch import PackedBatch
from dflash.compile_policy import CompilePolicy
from dflash.modeling.anatomy import text_config, text_decoder
from dflash.modeling.feature_layers import target_layer_ids
from dflash.modeling.target import TargetRunner, load_target
from dflash.modeling.work import target_forward_tflop
from regression.bench import settings as bench
from regression.bench.clock import ceilings, milliseconds, peak_bytes, reset_peak, synchronize
from regression.bench.figures import Figure, Result
from regression.bench.settings import Settings

DOCUMENTS = 4  # of the packed row


def measure(settings: Settings) -> Result:
    """Time transformers first and on a model of its own: it leaves hooks in it, and the runner takes layers away."""
    config, device = settings.config(), settings.device
    best = ceilings(device)
    model, _ = load_target(config.target, device=device)
    text = text_config(model)
    batch = bench.random_batch(config, text.vocab_size).to(device)
    ids = target_layer_ids(text.num_hidden_layers, config.drafter.num_features)
    with torch.inference_mode():
        plain = milliseconds(lambda: transformers_forward(model, batch), device, rounds=settings.rounds, warmup=2)
        expected = torch.cat([transformers_forward(model, batch)[layer + 1] for layer in ids], dim=-1)
    del model
    model, _ = load_target(config.target, device=device)
    policy = CompilePolicy(config.compile, num_drafters=1)
    with policy.watching(), policy.in_worker():
        uncompiled = TargetRunner(model, ids, keep_final_hidden=False)
        as_it_is = milliseconds(lambda: uncompiled.run(batch), device, rounds=settings.rounds, warmup=2)
        runner = TargetRunner(model, ids, keep_final_hidden=False, compiled=policy.compiled)
        started = time.perf_counter()
        found, _ = runner.run(batch)
        synchronize(device)
        first_seconds = time.perf_counter() - started
        deviation = ((found.float() - expected.float()).norm() / expected.float().norm()).item()
        with policy.frozen():
            reset_peak(device)
            compiled = milliseconds(lambda: runner.run(batch), device, rounds=settings.rounds, warmup=2)
            peak = peak_bytes(device)
            packed_batch = packed(batch)
            packed_row = milliseconds(lambda: runner.run(packed_batch), device, rounds=settings.rounds, warmup=2)
        report = policy.report()
    tokens = batch.num_tokens
    tflop = target_forward_tflop(text, layers=ids[-1] + 1, tokens=tokens)
    limit = best["matmul_tflops"] * tokens / tflop
    figures = [
        _rate("transformers, all hidden states", tokens, plain),
        _rate("runner, layers as they are", tokens, as_it_is, limit),
        _rate("runner, compiled layers", tokens, compiled, limit, goal=settings.goal(40_000)),
        _rate("runner, compiled layers, four documents a row", tokens, packed_row, limit),
        Figure(name="ratio_to_transformers", value=plain / compiled, unit="times", better="higher", goal=settings.goal(1.3)),
        Figure(name="useful work", value=tflop / compiled * 1000, unit="TFLOP/s", better="higher", ceiling=best["matmul_tflops"]),
        Figure(name="deviation of features from transformers'", value=deviation, unit="relative"),
        Figure(name="peak memory", value=peak / 2**30 if device.type == "cuda" else None, unit="GiB"),
        Figure(name="first batch, compiling", value=first_seconds, unit="s"),
        Figure(name="recompiles", value=len(report.recompiles_after_warmup), unit="a run", goal=settings.goal(0)),
        Figure(name="fallbacks", value=len(report.fallbacks), unit="a run", goal=settings.goal(0)),
    ]
    details = {"tokens": tokens, "layer_ids": list(ids), "layers": text.num_hidden_layers, **best}
    return Result(bench="target_forward", shape=settings.shape, device=str(device), figures=tuple(figures), details=details)


def transformers_forward(model: Any, batch: PackedBatch) -> Any:
    """What a trainer does that knows nothing but transformers."""
    return text_decoder(model)(
        input_ids=batch.input_ids, position_ids=batch.positions, use_cache=False, output_hidden_states=True
    ).hidden_states


def packed(batch: PackedBatch) -> PackedBatch:
    """The same tokens as several documents of one length."""
    length = -(-batch.num_tokens // DOCUMENTS)
    samples = (tuple(f"document {number}" for number in range(DOCUMENTS)),)
    return dataclasses.replace(
        batch, positions=batch.positions % length, document_ids=batch.positions // length, sample_ids=samples
    )


def _rate(name: str, tokens: int, spent: float, limit: float | None = None, goal: float | None = None) -> Figure:
    return Figure(
        name=name, value=tokens / spent * 1000, unit="tok/s", ceiling=limit, goal=goal, better="higher", note=f"{spent:.2f} ms"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this bench alone."""
    return bench.main("target_forward", measure, arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
