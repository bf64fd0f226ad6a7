"""The configuration of a run: frozen, keyword-only, checked once, where it is built.

A preset (`dflash.presets`) is a function that returns a `RunConfig`; the command line overrides its fields by name
(`--optim.learning-rate 1e-3`). A value that cannot work raises `ConfigError` with the edit that fixes it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tyro


class ConfigError(ValueError):
    """A configuration that cannot work; the message says what to change. Commands exit with 2."""


MAX_BUDGET = 4096  # nodes of a draft tree; verifying M of them attends from M+1 tokens to M+1 tokens


def check_budget(budget: int) -> None:
    """Raise ConfigError unless a draft tree can have so many nodes."""
    require(1 <= budget <= MAX_BUDGET, f"a tree budget is {budget}: use 1 to {MAX_BUDGET} nodes, or no budget for a chain")


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with `message` unless the condition holds."""
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """The frozen model."""

    path: str = ""  # directory, hub name, "package:NAME" (installed), "random:NAME" (dflash.modeling.target.RANDOM_TARGETS)
    gguf_file: str | None = None  # file inside `path` for weights in GGUF format
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    mask_token_id: int | None = None  # None: the tokenizer's mask token, which must then exist
    seed: int = 0  # only for random weights
    tensor_parallel: int = 1  # processes: ranks, each with a device, that hold one target together

    def __post_init__(self) -> None:
        require(self.tensor_parallel >= 1, f"target.tensor-parallel is {self.tensor_parallel}: use at least 1")


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """The trained model. Sizes left None are the target's."""

    block_size: int = 16  # B, the anchor included
    num_layers: int = 5
    num_features: int = 5  # K, for the default rule of target layers
    target_layer_ids: tuple[int, ...] | None = None  # 0-based, ascending; None: the rule
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    attention: Literal["flex", "sdpa"] = "flex"
    init: Literal["random", "target"] = "random"  # "target": copies of its first layers (dflash.modeling.warm_start)

    def __post_init__(self) -> None:
        require(
            self.block_size >= 2, f"drafter.block_size is {self.block_size}: a block needs an anchor and a mask, use at least 2"
        )
        require(self.num_layers >= 1, f"drafter.num_layers is {self.num_layers}: use at least 1")
        require(self.num_features >= 1, f"drafter.num_features is {self.num_features}: use at least 1")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prepared examples and the one shape they are packed to."""

    path: Path = Path("data")  # directory written by `python -m dflash prepare`
    spool: Path | None = None  # directory for flat copies of data larger than memory (dflash.data.spool); None: read it whole
    sequence_length: int = 4096  # S
    rows_per_batch: int = 1  # R
    num_anchors: int = 512  # N slots of a row
    packing: Literal["documents", "none"] = "documents"  # "none": one document a row
    min_supervised_tokens: int = 2  # examples with fewer are skipped, counted and listed
    validation_batches: int = 2  # held-out micro-batches measured at every checkpoint; 0: none
    features: Path | None = None  # directory written by `python -m dflash capture`: no targets run, topology 0t+Md

    def __post_init__(self) -> None:
        for name in ("sequence_length", "rows_per_batch", "num_anchors", "min_supervised_tokens"):
            require(getattr(self, name) >= 1, f"data.{name.replace('_', '-')} is {getattr(self, name)}: use at least 1")
        require(self.validation_batches >= 0, "data.validation-batches is negative: use 0 for none")


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The objective (reference: DFlash paper, D-PACE arXiv 2605.18810)."""

    kind: Literal["ce", "dpace", "kl"] = "dpace"  # fixtures/README.md has the comparison
    gamma: float | None = None  # decay of the position weights of ce and kl; None: 7, 5, 4 for B = 16, 10, 8, else B/2
    dpace_alpha: float = 0.5
    chunk_tokens: int = 2048  # block tokens whose logits exist at one time
    fp8_head: bool = False  # GPUs: train through the frozen head in fp8 (dflash.modeling.fp8_head)

    def __post_init__(self) -> None:
        require(self.gamma is None or self.gamma > 0, f"loss.gamma is {self.gamma}: use a positive number or None")
        require(
            self.gamma is None or self.kind != "dpace",
            f"loss.gamma is {self.gamma}, but dpace weighs positions itself: leave it out, or use --loss.kind ce or kl",
        )
        require(0 < self.dpace_alpha <= 1, f"loss.dpace-alpha is {self.dpace_alpha}: use a number in (0, 1]")
        require(self.chunk_tokens >= 1, f"loss.chunk-tokens is {self.chunk_tokens}: use at least 1")
        require(not (self.fp8_head and self.kind == "kl"), "loss.fp8-head works with ce and dpace, not with kl: leave one out")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW on fp32 master weights."""

    steps: int = 1000
    batches_per_step: int = 1  # micro-batches of one optimizer step, over all drafters: independent of their number
    learning_rate: float = 6e-4
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup_fraction: float = 0.04
    decay_fraction: float = 0.2  # only wsd: the last part of the run
    final_fraction: float = 0.0  # learning rate at the end, as a part of the peak
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0  # on matrices only
    clip: float = 1.0
    bf16_copies: bool = False  # GPUs: multiply by bf16 copies of the matrices, made once a step (dflash.flat)

    def __post_init__(self) -> None:
        require(self.steps >= 1, f"optim.steps is {self.steps}: use at least 1")
        require(self.batches_per_step >= 1, f"optim.batches-per-step is {self.batches_per_step}: use at least 1")
        for name in ("learning_rate", "clip"):
            value = getattr(self, name)
            require(math.isfinite(value) and value > 0, f"optim.{name.replace('_', '-')} is {value}: use a positive number")
        require(0 <= self.weight_decay < math.inf, f"optim.weight-decay is {self.weight_decay}: use 0 or a positive number")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"optim.{name} is {getattr(self, name)}: use a number in [0, 1)")
        for name in ("warmup_fraction", "decay_fraction", "final_fraction"):
            require(
                0 <= getattr(self, name) <= 1, f"optim.{name.replace('_', '-')} is {getattr(self, name)}: use a number in [0, 1]"
            )


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """Who may compile what, when."""

    policy: Literal["prewarm", "isolate", "lock", "force", "none", "eager"] = "prewarm"  # see dflash/compile_policy.py
    backend: str = "inductor"
    target: bool = False  # compile the target's layers, too (dflash.modeling.runner)
    loss: bool = False  # compile the scoring of logits, too (dflash.modeling.head_scores)
    activation_memory: float = 1.0  # of drafters: 1 keeps what is fastest for backward, 0 as little as can be (torch's budget)
    allow_recompiles: tuple[str, ...] = ()  # names of functions that may compile after warm-up
    cache: Path | None = None  # directory for compiled code, see dflash/compile_cache.py; None: torch's own place

    def __post_init__(self) -> None:
        share = self.activation_memory
        require(0 <= share <= 1, f"compile.activation-memory is {share}: use a number from 0 to 1")
        require(
            share == 1 or self.policy != "eager",
            "compile.activation-memory is of compiled drafters, compile.policy is eager: leave one out",
        )
        off = " ".join(f"--compile.no-{name}" for name in ("target", "loss") if getattr(self, name))
        require(
            not off or self.policy != "eager",
            f"compile.policy is eager, under which nothing is compiled: use {off}, or another policy",
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save and what to keep."""

    every_steps: int = 500
    keep_last: int = 2
    keep_untrained: bool = True  # save step 0, so that evaluation can show the start
    keep_best: bool = True  # by held-out teacher-forced acceptance, or by loss without validation

    def __post_init__(self) -> None:
        require(self.every_steps >= 1, f"checkpoint.every-steps is {self.every_steps}: use at least 1")
        require(self.keep_last >= 1, f"checkpoint.keep-last is {self.keep_last}: use at least 1")


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Where numbers go. Events are always written to events.jsonl."""

    wandb: Literal["auto", "online", "offline", "off"] = "auto"  # auto: online with a key, else offline
    log_every_steps: int = 10
    queue_items: int = 4  # capacity of the queue between target and drafters

    def __post_init__(self) -> None:
        for name in ("log_every_steps", "queue_items"):
            require(getattr(self, name) >= 1, f"telemetry.{name.replace('_', '-')} is {getattr(self, name)}: use at least 1")


@dataclass(frozen=True, kw_only=True)
class AcceptanceConfig:
    """Acceptance while training (`dflash.live_acceptance`): estimated from training blocks, and by really decoding."""

    estimate_every_steps: int = 50  # 0: never
    estimate_blocks: int = 64  # of each micro-batch of such a step
    budgets: tuple[int, ...] = (16, 64)  # nodes of the draft trees that are estimated beside the chain
    decode_every_steps: int = 0  # 0: never; needs held-out prompts and room for the whole target on the leading drafter's device
    decode_prompts: int = 4
    decode_tokens: int = 64  # of each prompt

    def __post_init__(self) -> None:
        for name in ("estimate_every_steps", "decode_every_steps"):
            require(getattr(self, name) >= 0, f"acceptance.{name.replace('_', '-')} is negative: use 0 for never")
        for name in ("estimate_blocks", "decode_prompts", "decode_tokens"):
            require(getattr(self, name) >= 1, f"acceptance.{name.replace('_', '-')} is {getattr(self, name)}: use at least 1")
        for budget in self.budgets:
            check_budget(budget)


@dataclass(frozen=True, kw_only=True)
class TransportConfig:
    """How target states travel between processes (engine `processes`)."""

    checksums: bool = False  # compare a CRC-32 of every tensor at both ends: for finding broken memory, drivers, networks


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """Timing of steady running (`dflash.measuring`). Such a run saves no checkpoint and ends after its segments."""

    on: Annotated[bool, tyro.conf.arg(name="")] = False  # the flag --measure
    segments: int = 3
    segment_seconds: float | None = None  # None: 60 on GPUs, 5 on CPUs
    warmup_segments: float = 10.0  # a run that is not steady after so many lengths of a segment ends unmeasured
    burn_share: float = 0.0  # a planted slowdown: this part of the time is burned, to see that it is noticed

    def __post_init__(self) -> None:
        require(self.segments >= 1, f"measure.segments is {self.segments}: use at least 1")
        seconds = self.segment_seconds
        require(seconds is None or 0 < seconds < math.inf, f"measure.segment-seconds is {seconds}: use a positive number")
        require(0 < self.warmup_segments < math.inf, f"measure.warmup-segments is {self.warmup_segments}: use a positive number")
        require(0 <= self.burn_share <= 0.9, f"measure.burn-share is {self.burn_share}: use a number from 0 to 0.9")
        changed = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        require(
            self.on or not changed, f"measure.{''.join(changed[:1]).replace('_', '-')} has no meaning without --measure: add it"
        )


@dataclass(frozen=True)
class Topology:
    """N target and M drafter workers, written `Nt+Md`."""

    targets: int
    drafters: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `5t+3d`; `0t+3d` reads features from disk. Raises ConfigError on anything else."""
        match = re.fullmatch(r"(\d+)t\+(\d+)d", text)
        require(match is not None, f"topology {text!r} is not of the form Nt+Md, for example 1t+2d")
        assert match is not None
        topology = cls(int(match[1]), int(match[2]))
        require(topology.drafters >= 1, f"topology {text!r} needs at least one drafter")
        return topology

    def __str__(self) -> str:
        return f"{self.targets}t+{self.drafters}d"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides a training run."""

    preset: str = "custom"
    output: Path = Path("run")
    seed: int = 0
    engine: Literal["threads", "processes"] = "threads"  # processes: start them with torchrun, one a worker
    engine_timeout_seconds: float = 60.0  # processes: no micro-batch and no step takes so long; who does is held to hang
    topology: str = "1t+1d"
    devices: str = "cuda"  # "cpu", "cuda" (one GPU a worker), or a list, targets first: "cuda:0,cuda:0"
    fully_shard: bool = False  # processes: each drafter holds a part of weights, gradients, moments (FSDP2, dflash.sharded)
    cpu_threads: int = 1  # intra-op threads of each worker when devices are CPUs
    resume: bool = False
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)

    def __post_init__(self) -> None:
        targets = Topology.parse(self.topology).targets
        require(
            targets >= 1 or self.data.features is not None,
            f"topology {self.topology!r} needs at least 1t, or --data.features with what `python -m dflash capture` wrote",
        )
        require(
            targets == 0 or self.data.features is None,
            f"topology {self.topology!r} has targets that --data.features leaves without work: use 0t+Md, or leave it out",
        )
        require(
            targets >= 1 or not self.compile.target,
            f"compile.target has no meaning with topology {self.topology!r}, in which no target runs: leave it out",
        )
        require(
            self.data.sequence_length > self.drafter.block_size,
            f"data.sequence-length {self.data.sequence_length} is too short for a block of {self.drafter.block_size}",
        )
        require(self.cpu_threads >= 1, f"cpu-threads is {self.cpu_threads}: use at least 1")
        seconds = self.engine_timeout_seconds
        require(0 < seconds < math.inf, f"engine-timeout-seconds is {seconds}: use a positive number")
        if self.engine == "processes":
            require(
                self.devices in ("cpu", "cuda"),
                f"devices is {self.devices!r}: every process of --engine processes has one device of its own, use cpu or cuda",
            )
        if self.target.tensor_parallel > 1:
            self._check_tensor_parallel()
        if self.fully_shard:
            self._check_fully_shard()

    def _check_tensor_parallel(self) -> None:
        ways = f"target.tensor-parallel {self.target.tensor_parallel}"
        require(self.engine == "processes", f"{ways} is for --engine processes: a rank for each part of a target")
        require(self.data.features is None, f"{ways} has no meaning with --data.features: no target runs")
        require(not self.compile.target, f"{ways}: a target in parts is not compiled, leave --compile.target out")

    def _check_fully_shard(self) -> None:
        drafters, per_step = Topology.parse(self.topology).drafters, self.optim.batches_per_step
        require(self.engine == "processes", "--fully-shard is for --engine processes, threads of a process have no FSDP2")
        require(
            drafters >= 2, f"--fully-shard with topology {self.topology!r}: one drafter has nobody to share with, leave it out"
        )
        require(
            per_step % drafters == 0,
            f"--fully-shard with {drafters} drafters and optim.batches-per-step {per_step}: they work on micro-batches at one "
            f"time, use a multiple of {drafters}",
        )
        require(not self.optim.bf16_copies, "--fully-shard gathers weights in bf16 itself: leave --optim.bf16-copies out")
        require(
            self.acceptance.decode_every_steps == 0,
            "--fully-shard leaves no drafter whole to decode with: use --acceptance.decode-every-steps 0, and evaluate later",
        )
        require(
            self.compile.policy in ("prewarm", "eager"),
            f"--fully-shard with compile.policy {self.compile.policy!r}: its drafters compile together, use prewarm or eager",
        )


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as JSON values."""

    def plain(value: Any) -> Any:
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return value

    result: dict[str, Any] = plain(dataclasses.asdict(config))
    return result


def run_config_from_dict(values: dict[str, Any]) -> RunConfig:
    """Read back what `to_dict` wrote. Raises ConfigError on an unknown key."""
    nested = {f.name: f.default_factory for f in dataclasses.fields(RunConfig) if f.default_factory is not dataclasses.MISSING}
    arguments = {key: _build(nested[key], value, prefix=f"{key}.") if key in nested else value for key, value in values.items()}
    config: RunConfig = _build(RunConfig, arguments, prefix="")
    return config


def _build(kind: Any, values: dict[str, Any], *, prefix: str) -> Any:
    known = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted(set(values) - set(known))
    require(not unknown, f"unknown key {prefix}{unknown[0] if unknown else ''}: known are {', '.join(known)}")
    converted: dict[str, Any] = {}
    for key, value in values.items():
        if "Path" in str(known[key].type) and value is not None:
            converted[key] = Path(value)
        else:
            converted[key] = tuple(value) if isinstance(value, list) else value
    return kind(**converted)
