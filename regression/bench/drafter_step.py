"""The drafter's training step: forward, loss, backward of one row of random data, and the optimizer step, whole and by parts.

    python -m regression.bench drafter_step

Random ends instead of a target: nothing but the drafter runs. Timed through the same worker, compile policy and optimizer as
in training. The peak beyond the optimizer's state leaves out the fp32 weights and AdamW's moments: what remains are gradients,
the frozen ends, the features, and everything that lives during the step.
Known limits: parts are timed one after the other on one stream and include what the host is late with; no other thread runs.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn

from dflash.arriving import Arriving
from dflash.batch import LossSums, PackedBatch, TargetStates
from dflash.compile_policy import CompilePolicy
from dflash.config import RunConfig
from dflash.flat import FlatAdamW
from dflash.modeling.attention import build_mask
from dflash.modeling.drafter import ContextPairs, Drafter, block_inputs
from dflash.modeling.ends import FrozenEnds
from dflash.modeling.head_scores import score, score_for_fp8
from dflash.modeling.loss import draft_loss
from dflash.modeling.masks import BlockLayout
from dflash.modeling.shape import DrafterShape
from dflash.modeling.tiles import tile_lists
from dflash.modeling.work import drafter_step_tflop
from dflash.worker import DrafterModelWorker
from regression.bench import settings as bench
from regression.bench.clock import Marks, ceilings, milliseconds, peak_bytes, reset_peak, synchronize
from regression.bench.figures import Figure, Result
from regression.bench.settings import Settings

GIB = 2**30
_SYNC_WARNING = "called a synchronizing CUDA operation"  # that the mode is a prototype is warned of, too


def measure(settings: Settings) -> Result:
    """Build, warm up, freeze, time."""
    config = settings.config()
    shape, device = bench.drafter_shape(config), settings.device
    best = ceilings(device)
    policy = CompilePolicy(config.compile, num_drafters=1)
    with policy.watching(), policy.in_worker():
        states = random_states(config, shape, device)
        worker = DrafterModelWorker("drafter-0", config, shape, random_ends(shape, device), device, policy)
        optimizer = FlatAdamW(worker.flat, config.optim)
        started = time.perf_counter()
        whole_step(worker, optimizer, states)
        synchronize(device)
        first_step_seconds = time.perf_counter() - started
        context = policy.compiled(_ContextProjections(worker.drafter))
        project(worker, context, states)
        with policy.frozen():
            figures = timed(settings, worker, optimizer, states, best)
            spent = milliseconds(lambda: project(worker, context, states), device, rounds=settings.rounds)
            figures.append(Figure(name="alone: projections of the context, forward", value=spent, unit="ms"))
            if config.compile.loss:
                figures.append(_uncompiled_scores(worker, states, settings))
        report = policy.report()
    counted = {"recompiles": len(report.recompiles_after_warmup), "fallbacks": len(report.fallbacks)}
    figures += [Figure(name=name, value=count, unit="a run", goal=settings.goal(0)) for name, count in counted.items()]
    figures.append(Figure(name="first step, compiling", value=first_step_seconds, unit="s"))
    details = {"reasons": [*report.recompiles_after_warmup, *report.fallbacks], **best, **_sizes(config, shape)}
    details |= {"levers": list(settings.levers), "parameters": worker.flat.weights.numel()}
    return Result(bench="drafter_step", shape=settings.shape, device=str(device), figures=tuple(figures), details=details)


def timed(
    settings: Settings, worker: DrafterModelWorker, optimizer: FlatAdamW, states: TargetStates, best: dict[str, float]
) -> list[Figure]:
    """Everything that is measured after the warm-up."""
    device, batch = settings.device, states.batch

    step = milliseconds(lambda: worker.forward_and_backward(states), device, rounds=settings.rounds)
    accumulate = milliseconds(lambda: _accumulate(worker, states), device, rounds=settings.rounds)
    pairs = bench.visible_pairs(BlockLayout.of(batch, worker.shape.block_size))
    tflop = drafter_step_tflop(
        worker.shape, context=batch.input_ids.shape[1], anchors=batch.anchors.shape[1], visible_pairs=pairs
    )
    ceiling, unit = best["matmul_tflops"], "ms"
    figures = [
        Figure(
            name="step (forward, loss, backward)", value=step, unit=unit, ceiling=tflop / ceiling * 1000, goal=settings.goal(126)
        ),
        Figure(name="context", value=batch.num_tokens / step * 1000, unit="tok/s", better="higher"),
        Figure(name="useful work", value=tflop / step * 1000, unit="TFLOP/s", ceiling=ceiling, better="higher"),
        Figure(name="the same as a worker does it, with its checks", value=accumulate, unit=unit),
        *_memory(settings, worker, optimizer, states),
    ]
    figures += [Figure(name=f"part: {name}", value=spent, unit=unit) for name, spent in parts(worker, states, settings).items()]
    sums = _accumulate(worker, states)
    update = milliseconds(lambda: _update(worker, optimizer, sums), device, rounds=settings.rounds)
    floor = 28 * worker.flat.weights.numel() / best["copy_gb_per_second"] / 1e6  # read w, g, m, v, write w, m, v: fp32
    figures.append(Figure(name="optimizer step", value=update, unit=unit, ceiling=floor))
    figures.append(
        Figure(
            name="host syncs of a step, optimizer included",
            value=count_syncs(worker, optimizer, states),
            unit="",
            goal=settings.goal(0),
            note="" if device.type == "cuda" else "none to count on a CPU",
        )
    )
    return figures


def parts(worker: DrafterModelWorker, states: TargetStates, settings: Settings) -> dict[str, float]:
    """Milliseconds of each part of a step: medians over rounds."""
    seen = [_marked_step(worker, states, settings) for _ in range(settings.rounds + 1)]
    return {name: statistics.median(one[name] for one in seen[1:]) for name in seen[0]}


def _marked_step(worker: DrafterModelWorker, states: TargetStates, settings: Settings) -> dict[str, float]:
    config, batch, size = settings.config(), states.batch, worker.shape.block_size
    marks = Marks(settings.device)
    ids, positions = block_inputs(batch, worker.shape.mask_token_id, size)
    with torch.no_grad():
        embeds = worker.ends.embed(ids)
    marks.mark("embedding")
    mask = build_mask(BlockLayout.of(batch, size), config.drafter.attention, settings.device)
    marks.mark("mask")
    with worker._autocast():
        hidden = worker._forward(embeds, positions, states.features, batch.positions, mask)
    marks.mark("drafter forward (context projections, layers)")
    leaf = hidden.detach().requires_grad_()
    sums = draft_loss(leaf, worker.ends, batch, config.loss, size, score=worker._score, fp8_head=worker._fp8_head)
    sums.loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    marks.mark("head and loss, both ways")
    hidden.backward(leaf.grad)  # type: ignore[no-untyped-call]
    marks.mark("drafter backward")
    worker.flat.collect_gradients()
    marks.mark("summing gradients")
    return marks.read()


def _uncompiled_scores(worker: DrafterModelWorker, states: TargetStates, settings: Settings) -> Figure:
    compiled, worker._score = worker._score, score_for_fp8 if worker._fp8_head else score
    spent = parts(worker, states, settings)["head and loss, both ways"]
    worker._score = compiled
    return Figure(name="alone: head and loss with uncompiled scores", value=spent, unit="ms")


class _ContextProjections(nn.Module):
    """A part of the drafter's forward pass, to be compiled by itself."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, features: Tensor, positions: Tensor) -> ContextPairs:
        return self.drafter.project_context(features, positions)


def project(worker: DrafterModelWorker, context: Callable[..., ContextPairs], states: TargetStates) -> None:
    """The projections of the context alone, without gradients."""
    with torch.no_grad(), worker._autocast():
        context(states.features, states.batch.positions)


def random_ends(shape: DrafterShape, device: torch.device) -> FrozenEnds:
    """An embedding and a head of random numbers, as large as a target's, in the dtype that training uses."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(1)

    def table() -> Tensor:
        values = torch.empty(shape.vocab_size, shape.hidden_size, device=device, dtype=dtype)
        return values.normal_(0.0, 0.02, generator=generator)

    embedding = nn.Embedding(shape.vocab_size, shape.hidden_size, _weight=table())
    return FrozenEnds(embedding, table(), None)


def random_states(config: RunConfig, shape: DrafterShape, device: torch.device) -> TargetStates:
    """Random features for a random batch, whose tiles are made ahead as a target worker does."""
    batch: PackedBatch = bench.random_batch(config, shape.vocab_size)
    if config.drafter.attention == "flex":
        batch = dataclasses.replace(batch, tiles=tile_lists(batch, shape.block_size))
    batch = batch.to(device)
    generator = torch.Generator(device).manual_seed(2)
    width = shape.num_features * shape.hidden_size
    features = torch.randn(1, batch.input_ids.shape[1], width, device=device, generator=generator)
    return TargetStates(batch=batch, features=features.to(torch.bfloat16) if device.type == "cuda" else features)


def whole_step(worker: DrafterModelWorker, optimizer: FlatAdamW, states: TargetStates) -> None:
    """One micro-batch and the update, as the trainer does them with one drafter."""
    _update(worker, optimizer, _accumulate(worker, states))


def _accumulate(worker: DrafterModelWorker, states: TargetStates) -> LossSums:
    worker.accumulate(states)
    (part,) = worker.take_contributions()
    return part.sums


def _update(worker: DrafterModelWorker, optimizer: FlatAdamW, sums: LossSums) -> None:
    norm = optimizer.norm()
    arriving = Arriving(torch.cat([sums.vector(), norm.reshape(1)]))
    optimizer.step(0, total_weight=sums.weight, norm=norm)
    arriving.read()
    worker.settle()
    worker.clear_gradients()


def _memory(settings: Settings, worker: DrafterModelWorker, optimizer: FlatAdamW, states: TargetStates) -> list[Figure]:
    if settings.device.type != "cuda":
        return [Figure(name="peak memory", value=None, unit="GiB", note="not counted on a CPU")]
    state = 4 * worker.flat.weights.numel() + sum(
        value.nbytes for values in optimizer.optimizer.state.values() for value in values.values()
    )
    held = torch.cuda.memory_allocated(settings.device)
    reset_peak(settings.device)
    whole_step(worker, optimizer, states)
    peak = peak_bytes(settings.device)
    return [
        Figure(name="peak memory", value=peak / GIB, unit="GiB"),
        Figure(name="peak beyond fp32 weights and moments", value=(peak - state) / GIB, unit="GiB", goal=settings.goal(13)),
        Figure(name="peak beyond what is held between steps", value=(peak - held) / GIB, unit="GiB"),
    ]


def count_syncs(worker: DrafterModelWorker, optimizer: FlatAdamW, states: TargetStates) -> int | None:
    """Calls of one step that wait until the device has nothing to do: what torch's debug mode warns of, and `synchronize` itself.

    Waiting for an event with work queued behind it is none: that is how a step learns its sums.
    """
    if worker.device.type != "cuda":
        return None
    with _counting_syncs() as found:
        whole_step(worker, optimizer, states)
    sys.stderr.write("".join(f"host sync: {line}\n" for line in found))
    return len(found)


@contextmanager
def _counting_syncs() -> Iterator[list[str]]:
    found: list[str] = []
    real = torch.cuda.Stream.synchronize

    def counted(stream: torch.cuda.Stream) -> None:
        found.append("Stream.synchronize")
        real(stream)

    with warnings.catch_warnings(record=True) as seen, mock.patch.object(torch.cuda.Stream, "synchronize", counted):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [f"{one.filename}:{one.lineno}" for one in seen if _SYNC_WARNING in str(one.message)]


def _sizes(config: RunConfig, shape: DrafterShape) -> dict[str, int]:
    return {
        "context_tokens": config.data.sequence_length,
        "anchors": config.data.num_anchors,
        "block_size": shape.block_size,
        "vocabulary": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "layers": shape.num_layers,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this bench alone."""
    return bench.main("drafter_step", measure, arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
