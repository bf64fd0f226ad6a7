"""What a run needs and what it could give, worked out before anything is loaded: `python -m dflash plan --preset P [fields]`.

Memory is counted by parts: what stays (weights, gradients, moments, frozen ends, features in the queue) and what a step adds at
its peak. Useful work is that of `dflash.modeling.work`. Tokens per second follow from work and rates, and rates are measured,
never assumed: `--rates FILE` reads what `python -m regression.bench drafter_step target_forward --json FILE` found on such a GPU.

The counts are of one micro-batch under bf16 with flex attention. A device's load is the time of the workers on it; the fullest
device sets the pace, as if the queue never ran dry. Anchors are taken to lie evenly in rows of one document: a block sees half of
its row.

Known limits: GPUs only. Experts of a mixture, and layers without attention, count as if they were dense. Fragmentation, CUDA's
own context (about 0.5 GiB) and the compiler's scratch are left out. Against two runs that were measured on one H200 (42.0 and
3.4 GiB) memory is right within 15 % (tests/test_plan.py); tokens per second have not been compared with a measurement yet.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dflash import simulation
from dflash.config import ConfigError, RunConfig, TargetConfig, Topology
from dflash.modeling.anatomy import text_config, text_decoder
from dflash.modeling.drafter import Drafter
from dflash.modeling.loss import chunks
from dflash.modeling.random_targets import RANDOM_TARGETS
from dflash.modeling.shape import DrafterShape
from dflash.modeling.work import drafter_step_tflop, target_forward_tflop

GIB = 2**30
_FP8, _BF16, _FP32 = 1, 2, 4


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one GPU was measured to do."""

    drafter_tflops: float  # useful TFLOP/s of forward, loss and backward
    target_tflops: float  # useful TFLOP/s of the target's forward
    update_seconds_per_parameter: float  # of the optimizer step


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The numbers that everything is worked out from."""

    shape: DrafterShape
    drafter_parameters: int
    target_parameters: int  # embedding and layers that run
    target_layers: int  # that run
    tied: bool  # the target's head is its embedding


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


def memory_of(config: RunConfig, sizes: Sizes, targets: Sequence[str], drafters: Sequence[str]) -> dict[str, dict[str, int]]:
    """Bytes on every device by part."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    queued = -(-config.telemetry.queue_items // len(targets)) * _features(config, sizes)
    for device in targets:
        for name, size in {**_of_target(config, sizes), "features in the queue": queued}.items():
            found[device][name] += size
    for number, device in enumerate(drafters):
        for name, size in _of_drafter(config, sizes, leads=number == 0).items():
            found[device][name] += size
        if device not in targets:
            found[device]["features of a micro-batch"] += _features(config, sizes)
    return {device: dict(parts) for device, parts in found.items()}


def speed_of(
    config: RunConfig, sizes: Sizes, work: dict[str, float], rates: Rates, targets: Sequence[str], drafters: Sequence[str]
) -> dict[str, Any]:
    """Tokens per second, and what each device and stage takes of a micro-batch in the mean."""
    forward = work["target"] / rates.target_tflops
    step = work["drafter"] / rates.drafter_tflops
    update = rates.update_seconds_per_parameter * sizes.drafter_parameters / config.optim.batches_per_step
    loads: dict[str, float] = defaultdict(float)
    for device in targets:
        loads[device] += forward / len(targets)
    for device in drafters:
        loads[device] += step / len(drafters)
    for device in set(drafters):
        loads[device] += update  # the leader updates while all drafters wait
    fullest = max(loads, key=lambda device: loads[device])
    tokens = config.data.rows_per_batch * config.data.sequence_length
    return {
        "tokens_per_second": tokens / loads[fullest],
        "fullest_device": fullest,
        "milliseconds_of_a_micro_batch": {"target": forward * 1e3, "drafter": step * 1e3, "update": update * 1e3},
        "load": {device: load / loads[fullest] for device, load in loads.items()},
    }


def read_rates(path: Path) -> Rates:
    """The rates in a file that `regression.bench --json` wrote. Raises ConfigError where a figure is missing or of a CPU."""
    try:
        results = json.loads(path.read_text())["results"]
        figures = {
            name: {row["name"]: row["value"] for row in results[name]["figures"]} for name in ("drafter_step", "target_forward")
        }
        _require_gpus({results[name]["device"] for name in figures})
        return Rates(
            drafter_tflops=float(figures["drafter_step"]["useful work"]),
            target_tflops=float(figures["target_forward"]["useful work"]),
            update_seconds_per_parameter=float(figures["drafter_step"]["optimizer step"])
            / 1e3
            / int(results["drafter_step"]["details"]["parameters"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no rates ({type(error).__name__}: {error}): write it on such a GPU with "
            f"python -m regression.bench drafter_step target_forward --json {path}"
        ) from error


def _require_gpus(places: set[str]) -> None:
    if not all(place.startswith("cuda") for place in places):
        raise ValueError(f"measured on {', '.join(sorted(places))}")


def options(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The plan's own options, and the rest: those of `train`."""
    parser = argparse.ArgumentParser(prog="python -m dflash plan", add_help=False, allow_abbrev=False)
    parser.add_argument("--rates", type=Path, help="figures of regression.bench, measured on such a GPU")
    parser.add_argument("--gpu-memory-gib", type=float, help="what a GPU has: exit code 1 where a device needs more")
    parser.add_argument("--simulate", type=Path, nargs="+", metavar="RUN", help="foretell larger runs by the stage times of runs")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 512, 1024], help="--simulate: how many (8 64 512 1024)")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="--simulate: of a machine (8)")
    parser.add_argument("--link-gb-per-second", type=float, default=400.0, help="--simulate: inside a machine (400)")
    parser.add_argument("--network-gb-per-second", type=float, default=50.0, help="--simulate: a GPU to another machine (50)")
    parser.add_argument("--states-gb", type=float, default=0.0, help="--simulate: target states of a micro-batch (0)")
    parser.add_argument("--gradients-gb", type=float, default=0.0, help="--simulate: gradients of a drafter (0)")
    parser.add_argument("--spread", type=float, default=0.05, help="--simulate: of stage times, a share of the mean (0.05)")
    return parser.parse_known_args(arguments)


def simulated(own: argparse.Namespace) -> dict[str, Any]:
    """What `--simulate` asks for. Raises ConfigError."""
    positive = (own.gpus_per_node, own.link_gb_per_second, own.network_gb_per_second)
    if min(positive) <= 0 or min(own.states_gb, own.gradients_gb, own.spread) < 0:
        raise ConfigError("--simulate: machines and links must be above 0, sizes and spread 0 or more")
    fleet = simulation.Fleet(
        gpus_per_node=own.gpus_per_node,
        link_gb_per_second=own.link_gb_per_second,
        network_gb_per_second=own.network_gb_per_second,
        states_bytes=own.states_gb * 1e9,
        gradient_bytes=own.gradients_gb * 1e9,
    )
    return simulation.report(own.simulate, own.gpus, fleet, spread=own.spread)


def _of_target(config: RunConfig, sizes: Sizes) -> dict[str, int]:
    shape, tokens = sizes.shape, config.data.rows_per_batch * config.data.sequence_length
    width = 3 * shape.intermediate_size + 6 * shape.hidden_size  # of one layer: gate, up, product; norms, residuals, attention
    made = _features(config, sizes)
    value: int = getattr(torch, config.target.dtype).itemsize
    return {"target: weights": value * sizes.target_parameters, "target: a forward pass": value * tokens * width + made}


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
    context = data.rows_per_batch * data.sequence_length
    block = data.rows_per_batch * data.num_anchors * shape.block_size
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    # Of a block token in a layer: input and its norm, residual and its norm; q before and after its norm, what attention gives;
    # k and v likewise; gate, up and their product. Context tokens have keys and values only.
    of_block = 4 * shape.hidden_size + 3 * queries + 4 * keys + 3 * shape.intermediate_size
    activations: int = _BF16 * shape.num_layers * (block * of_block + context * 4 * keys)
    drafts = data.rows_per_batch * data.num_anchors * (shape.block_size - 1)
    part = chunks(drafts, config.loss.chunk_tokens)[0]
    # Logits and gradient; or logits and two fp32 copies.
    of_logit = _BF16 + (_FP8 if config.loss.fp8_head else _BF16) if config.compile.loss else _BF16 + 2 * _FP32
    logits: int = (part.stop - part.start) * shape.vocab_size * of_logit * (2 if config.loss.kind == "kl" else 1)
    rows = 3 * _BF16 * drafts * shape.hidden_size  # the head's input, its gradient, and the drafter's output
    gradients = 0 if config.fully_shard else (_BF16 if config.optim.bf16_copies else _FP32) * sizes.drafter_parameters
    return max(activations + logits + rows, gradients)


def _features(config: RunConfig, sizes: Sizes) -> int:
    """Bytes of the target states of one micro-batch."""
    width = sizes.shape.num_features + (1 if config.loss.kind == "kl" else 0)
    value: int = getattr(torch, config.target.dtype).itemsize
    tokens: int = config.data.rows_per_batch * config.data.sequence_length
    return value * tokens * width * sizes.shape.hidden_size


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
