"""What a run needs and what it could give, worked out before anything is loaded: `python -m dflash plan --preset P [fields]`.

Memory is counted by parts (`dflash.plan_memory`). Useful work is that of `dflash.modeling.work`. Tokens per second follow from
work and rates (`dflash.plan_speed`), and rates are measured, never assumed: `--rates FILE` reads what
`python -m regression.bench drafter_step target_forward --json FILE` found on such a GPU.

The counts are of one micro-batch under bf16 with flex attention. Anchors are taken to lie evenly in rows of one document: a
block sees half of its row.

Known limits: GPUs only. Experts of a mixture, and layers without attention, count as if they were dense. What was compared with
measurements on one H200 (tests/test_plan.py): memory of three runs and of steps with and without levers, within 5 % (10 % for
activation memory 0.5); tokens per second of two runs of Qwen3-8B's shape, within 5 %. Rates of that shape are wrong by a factor
of 4 for a model of 135M parameters, which keeps the GPU less busy: `cautions` says it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dflash.config import ConfigError, RunConfig, TargetConfig, Topology
from dflash.modeling.anatomy import text_config, text_decoder
from dflash.modeling.drafter import Drafter
from dflash.modeling.random_targets import RANDOM_TARGETS
from dflash.modeling.shape import DrafterShape
from dflash.modeling.work import drafter_step_tflop, target_forward_tflop
from dflash.plan_memory import Sizes, memory_of
from dflash.plan_speed import Rates, read_rates, speed_of

__all__ = ["Rates", "plan", "read_rates", "split"]

GIB = 2**30


def plan(config: RunConfig, rates: Rates | None = None, gpu_memory_gib: float | None = None) -> dict[str, Any]:
    """The plan as JSON values; `failed` names devices that hold less than they need. Raises ConfigError, also for CPUs."""
    targets, drafters = devices_of(config)
    settings = _target_config(config.target)
    sizes = sizes_of(config, settings)
    memory = memory_of(config, sizes, targets, drafters)
    totals = {device: sum(parts.values()) for device, parts in memory.items()}
    work = work_of(config, sizes, text_config_of(settings))
    too_small = [] if gpu_memory_gib is None else [d for d, total in totals.items() if total > gpu_memory_gib * GIB]
    return {
        "preset": config.preset,
        "topology": config.topology,
        "drafter_parameters": sizes.drafter_parameters,
        "target_parameters": sizes.target_parameters,
        "tflop_per_micro_batch": work,
        "memory_gib": {device: round(total / GIB, 2) for device, total in totals.items()},
        "memory_parts_gib": {d: {name: round(size / GIB, 3) for name, size in parts.items()} for d, parts in memory.items()},
        "speed": None if rates is None else speed_of(config, sizes, work, rates, targets, drafters),
        "speed_unknown_because": "no --rates FILE with measured rates" if rates is None else None,
        "failed": too_small,
        "advice": _advice(config, sizes, gpu_memory_gib) if gpu_memory_gib is not None and too_small else None,
    }


def split(config: RunConfig, gpus: int, rates: Rates | None = None) -> tuple[RunConfig, dict[str, Any]]:
    """The same run on `gpus` GPUs, one a worker, at the topology of most tokens per second; and what each topology gives.

    Without rates both stages are taken to do as many TFLOP/s, and the figures only compare. Raises ConfigError for less than 2.
    """
    if gpus < 2:
        raise ConfigError(f"--gpus is {gpus}: a target and a drafter on GPUs of their own need 2; leave it out to share one")
    settings = _target_config(config.target)
    sizes = sizes_of(config, settings)
    work = work_of(config, sizes, text_config_of(settings))
    known = rates or Rates(drafter_tflops=1, target_tflops=1, compiled_target_tflops=1, update_seconds_per_parameter=0)
    runs = [dataclasses.replace(config, topology=f"{n}t+{gpus - n}d", devices="cuda") for n in range(1, gpus)]
    speeds = [speed_of(run, sizes, work, known, *devices_of(run))["tokens_per_second"] for run in runs]
    best = speeds.index(max(speeds))
    splits = [
        {"topology": run.topology, "tokens_per_second": speed if rates else None, "of_the_best": speed / speeds[best]}
        for run, speed in zip(runs, speeds, strict=True)
    ]
    by = "measured rates" if rates else "useful work alone, because no --rates FILE is given"
    return runs[best], {"recommended_topology": runs[best].topology, "recommended_by": by, "splits": splits}


def devices_of(config: RunConfig) -> tuple[list[str], list[str]]:
    """The device of each target and drafter worker, as in `dflash.engine.devices`, on a machine that need not be this one."""
    topology = Topology.parse(config.topology)
    if topology.targets == 0:
        raise ConfigError("a plan is for runs with targets: leave --data.features out, and name targets in --topology")
    if config.target.tensor_parallel > 1:
        raise ConfigError("a plan knows targets of one device only: leave --target.tensor-parallel out")
    workers = topology.targets + topology.drafters
    names = [f"cuda:{i}" for i in range(workers)] if config.devices == "cuda" else config.devices.split(",")
    names = [name.strip() for name in names]
    if len(names) != workers or not all(name.startswith("cuda:") for name in names):
        raise ConfigError(
            f"devices are {config.devices!r}: a plan is for GPUs, name one for each of {workers} workers (cuda:0,...)"
        )
    return names[: topology.targets], names[topology.targets :]


def sizes_of(config: RunConfig, target: Any) -> Sizes:
    """Count parameters on the meta device. `target` is the target's configuration of transformers."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(target)
        mask = 0 if config.target.mask_token_id is None else config.target.mask_token_id
        shape = DrafterShape.from_target(text_config(model), config.drafter, mask)
        drafter_parameters = sum(p.numel() for p in Drafter(shape).parameters())
    decoder = text_decoder(model)
    layers = decoder.layers if config.loss.kind == "kl" else decoder.layers[: shape.target_layer_ids[-1] + 1]
    run = [*decoder.embed_tokens.parameters(), *(p for layer in layers for p in layer.parameters())]
    return Sizes(
        shape=shape,
        drafter_parameters=drafter_parameters,
        target_parameters=sum(p.numel() for p in run),
        target_layers=len(layers),
        tied=bool(getattr(text_config(model), "tie_word_embeddings", False)),
    )


def work_of(config: RunConfig, sizes: Sizes, text: Any) -> dict[str, float]:
    """Useful TFLOP of one micro-batch in each stage."""
    data = config.data
    block = sizes.shape.block_size
    pairs = data.num_anchors * block * (data.sequence_length // 2 + block)
    step = drafter_step_tflop(sizes.shape, context=data.sequence_length, anchors=data.num_anchors, visible_pairs=pairs)
    forward = target_forward_tflop(text, layers=sizes.target_layers, tokens=data.sequence_length)
    return {"target": data.rows_per_batch * forward, "drafter": data.rows_per_batch * step}


def _advice(config: RunConfig, sizes: Sizes, gpu_memory_gib: float) -> str | None:
    """Whether drafters that share their parameters would fit; None where they already do share them."""
    if config.fully_shard:
        return None
    try:
        sharded = dataclasses.replace(config, engine="processes", devices="cuda", fully_shard=True)
        memory = memory_of(sharded, sizes, *devices_of(sharded))
    except ConfigError as error:
        return f"not tried with --engine processes --fully-shard: {error}"
    fullest = max(sum(parts.values()) for parts in memory.values()) / GIB
    fits = "fits" if fullest <= gpu_memory_gib else "is not enough"
    return f"--engine processes --devices cuda --fully-shard {fits}: the fullest device needs {fullest:.1f} GiB"


def text_config_of(target: Any) -> Any:
    """The decoder's part of a configuration of transformers."""
    return target.get_text_config(decoder=True)


def _target_config(config: TargetConfig) -> Any:
    if config.path.startswith("random:"):
        name = config.path.removeprefix("random:")
        if name not in RANDOM_TARGETS:
            raise ConfigError(f"target.path is {config.path!r}: known random targets are {', '.join(RANDOM_TARGETS)}")
        return RANDOM_TARGETS[name]()
    source = {} if config.gguf_file is None else {"gguf_file": config.gguf_file}
    try:
        return AutoConfig.from_pretrained(config.path, **source)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"no configuration of the target at {config.path!r} ({type(error).__name__}: {error}): expected a directory or hub "
            f"name with config.json"
        ) from error
