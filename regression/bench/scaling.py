"""How the drafter's step grows with context, anchors and vocabulary: measured exponents beside those of the useful work.

    python -m regression.bench scaling

From a base shape each of the three is doubled and doubled again. An exponent is the slope of log milliseconds over the three
points: 1 where the whole cost is proportional to it, 0 where nothing depends on it; what is expected is the slope of the useful
work. Part of a step is fixed, so it grows more slowly than its work: `milliseconds = fixed + work / rate` is fitted to all
points, and the worst one is told. On a GPU peak memory likewise. On a CPU nothing is compiled without a lever that asks for it,
and the work of attention is that of all pairs, because there a dense mask is computed whole.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch._dynamo

from dflash.compile_policy import CompilePolicy
from dflash.config import RunConfig
from dflash.modeling.masks import BlockLayout
from dflash.modeling.shape import DrafterShape
from dflash.modeling.work import drafter_step_tflop
from dflash.worker import DrafterModelWorker
from regression.bench import settings as bench
from regression.bench.clock import milliseconds, peak_bytes, reset_peak
from regression.bench.drafter_step import random_ends, random_states
from regression.bench.figures import Figure, Result
from regression.bench.settings import Settings

FACTORS = (1, 2, 4)
AXES = ("context", "anchors", "vocabulary")
BASES = {"qwen3-8b": (0.5, 0.5, 0.5), "tiny": (4.0, 4.0, 8.0)}  # of each axis; larger where the shape itself takes no time


@dataclass(frozen=True, kw_only=True)
class Point:
    """One shape, measured."""

    axis: str
    factor: int
    context: int
    anchors: int
    vocabulary: int
    milliseconds: float
    tflop: float
    peak_bytes: int  # 0 on a CPU


def measure(settings: Settings) -> Result:
    """Time all shapes; the base counts for every axis."""
    base = point(settings, "base", 1)
    points = [base, *(point(settings, axis, factor) for axis in AXES for factor in FACTORS[1:])]
    fixed, per_tflop = fit(points)
    figures = [_exponent(axis, points) for axis in AXES]
    worst = max(abs(one.milliseconds / (fixed + per_tflop * one.tflop) - 1) for one in points)
    figures += [
        Figure(name="fixed part of a step", value=fixed, unit="ms"),
        Figure(name="rate beyond it", value=1000 / per_tflop, unit="TFLOP/s", better="higher"),
        Figure(name="worst point off the fitted law", value=worst, unit="share"),
        Figure(name="base step", value=base.milliseconds, unit="ms"),
    ]
    if settings.device.type == "cuda":
        figures += [_memory(axis, points) for axis in AXES]
    details: dict[str, Any] = {"points": [dataclasses.asdict(one) for one in points], "levers": list(settings.levers)}
    return Result(bench="scaling", shape=settings.shape, device=str(settings.device), figures=tuple(figures), details=details)


def point(settings: Settings, axis: str, factor: int) -> Point:
    """Measure the base shape with one of its sizes multiplied."""
    config, shape = shapes(settings, axis, factor)
    device = settings.device
    torch._dynamo.reset()  # every shape is compiled by itself; Dynamo keeps only a few versions of a function
    policy = CompilePolicy(config.compile, num_drafters=1)
    with policy.watching(), policy.in_worker():
        states = random_states(config, shape, device)
        worker = DrafterModelWorker("drafter-0", config, shape, random_ends(shape, device), device, policy)
        worker.forward_and_backward(states)
        with policy.frozen():
            reset_peak(device)
            spent = milliseconds(lambda: worker.forward_and_backward(states), device, rounds=settings.rounds)
    layout = BlockLayout.of(states.batch, shape.block_size)
    flex = config.drafter.attention == "flex"
    pairs = bench.visible_pairs(layout) if flex else layout.num_queries * layout.num_keys  # a dense mask is computed whole
    context, anchors = config.data.sequence_length, config.data.num_anchors
    return Point(
        axis=axis,
        factor=factor,
        context=context,
        anchors=anchors,
        vocabulary=shape.vocab_size,
        milliseconds=spent,
        tflop=drafter_step_tflop(shape, context=context, anchors=anchors, visible_pairs=pairs),
        peak_bytes=peak_bytes(device),
    )


def shapes(settings: Settings, axis: str, factor: int) -> tuple[RunConfig, DrafterShape]:
    """The configuration and the drafter's shape of one point; the base is BASES times the shape of the other benches."""
    config = settings.config()
    context, anchors, vocabulary = (
        base * (factor if name == axis else 1) for name, base in zip(AXES, BASES[settings.shape], strict=True)
    )
    data = dataclasses.replace(
        config.data,
        sequence_length=round(config.data.sequence_length * context),
        num_anchors=round(config.data.num_anchors * anchors),
    )
    compiles = settings.device.type == "cuda" or {"loss", "target", "memory"} & set(settings.levers)
    policy = "prewarm" if compiles else "eager"
    config = dataclasses.replace(config, data=data, compile=dataclasses.replace(config.compile, policy=policy))  # type: ignore[arg-type]
    shape = bench.drafter_shape(config)
    size = round(shape.vocab_size * vocabulary)
    return config, dataclasses.replace(shape, vocab_size=size, mask_token_id=min(shape.mask_token_id, size - 1))


def fit(points: Sequence[Point]) -> tuple[float, float]:
    """Milliseconds that do not depend on the work, and milliseconds a TFLOP: least squares of relative errors."""
    spent = np.array([one.milliseconds for one in points])
    columns = np.stack([np.ones(len(points)), np.array([one.tflop for one in points])], axis=1)
    found, *_ = np.linalg.lstsq(columns / spent[:, None], np.ones(len(points)), rcond=None)
    return float(found[0]), float(found[1])


def exponent(factors: Sequence[int], values: Sequence[float]) -> float:
    """Slope of log value over log factor."""
    return float(np.polyfit(np.log(factors), np.log(values), 1)[0])


def _along(axis: str, points: Sequence[Point]) -> list[Point]:
    return [one for one in points if one.axis in ("base", axis)]


def _exponent(axis: str, points: Sequence[Point]) -> Figure:
    line = _along(axis, points)
    factors = [one.factor for one in line]
    expected = exponent(factors, [one.tflop for one in line])
    steps = " ".join(f"{one.milliseconds:.4g}" for one in line)
    note = f"useful work: {expected:.2f}; x1 x2 x4: {steps} ms"
    return Figure(name=f"exponent of {axis}", value=exponent(factors, [one.milliseconds for one in line]), unit="", note=note)


def _memory(axis: str, points: Sequence[Point]) -> Figure:
    line = _along(axis, points)
    value = exponent([one.factor for one in line], [float(one.peak_bytes) for one in line])
    sizes = " ".join(f"{one.peak_bytes / 2**30:.1f}" for one in line)
    return Figure(name=f"exponent of {axis}, peak memory", value=value, unit="", note=f"x1 x2 x4: {sizes} GiB")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this bench alone."""
    return bench.main("scaling", measure, arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
