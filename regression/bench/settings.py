"""The shapes that are measured, as configurations of the trainer, and the options that every bench has."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dflash.batch import PackedBatch, Position
from dflash.config import CompileConfig, ConfigError, DataConfig, DrafterConfig, RunConfig, TargetConfig, TelemetryConfig
from dflash.device import parse_device
from dflash.engine.devices import check_abilities
from dflash.modeling.masks import BlockLayout
from dflash.modeling.random_targets import RANDOM_TARGETS
from dflash.modeling.shape import DrafterShape
from dflash.presets import qwen3_8b
from regression.bench.figures import Result

SHAPES = ("qwen3-8b", "tiny")
LEVERS = {  # flags of the trainer
    "loss": "--compile.loss",
    "target": "--compile.target",
    "copies": "--optim.bf16-copies",
    "fp8": "--loss.fp8-head",
    "memory": "--compile.activation-memory=0.75",
}
CPU_BACKEND = "aot_eager"  # compiles in a second: on a CPU a bench shows that it runs, not how fast


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """One bench on one device."""

    shape: str
    device: torch.device
    rounds: int
    levers: tuple[str, ...] = ()  # of LEVERS: what the trainer has off by default
    specforge: Path | None = None  # directory that holds the package `specforge`

    @property
    def is_real(self) -> bool:
        """Whether the goals of the project apply: the Qwen3-8B shape on a GPU."""
        return self.shape == "qwen3-8b" and self.device.type == "cuda"

    def goal(self, value: float) -> float | None:
        """`value` where goals apply, else None."""
        return value if self.is_real else None

    @property
    def run_seconds(self) -> float:
        """Length of a segment of a whole run."""
        return 5.0 if self.device.type == "cuda" else 1.0

    def config(self) -> RunConfig:
        """The trainer's configuration of this shape: random weights, random tokens."""
        base = qwen3_8b() if self.shape == "qwen3-8b" else _tiny()
        base = self._with_levers(base)
        on_gpu = self.device.type == "cuda"
        devices = f"{self.device},{self.device}" if on_gpu else "cpu"
        if on_gpu:
            return dataclasses.replace(base, devices=devices)
        return dataclasses.replace(
            base,
            devices=devices,
            target=dataclasses.replace(base.target, dtype="float32"),
            drafter=dataclasses.replace(base.drafter, attention="sdpa"),
            compile=dataclasses.replace(base.compile, backend=CPU_BACKEND),
        )

    def train_flags(self) -> list[str]:
        """Flags of `python -m dflash train` for the same workload."""
        config = self.config()
        values = {
            "--preset": "qwen3-8b",
            "--devices": config.devices,
            "--target.path": config.target.path,
            "--target.dtype": config.target.dtype,
            "--target.mask-token-id": str(config.target.mask_token_id),
            "--drafter.block-size": str(config.drafter.block_size),
            "--drafter.num-layers": str(config.drafter.num_layers),
            "--drafter.num-features": str(config.drafter.num_features),
            "--drafter.attention": config.drafter.attention,
            "--data.path": str(config.data.path),
            "--data.sequence-length": str(config.data.sequence_length),
            "--data.num-anchors": str(config.data.num_anchors),
            "--loss.kind": config.loss.kind,
            "--compile.backend": config.compile.backend,
            "--telemetry.wandb": "off",
        }
        flags = [part for pair in values.items() for part in pair]
        off = [f"--compile.no-{name}" for name in ("loss", "target") if name not in self.levers]  # which the preset may have on
        return [*flags, *off, *(LEVERS[lever] for lever in self.levers)]

    def _with_levers(self, config: RunConfig) -> RunConfig:
        compiling = dataclasses.replace(
            config.compile,
            loss="loss" in self.levers,
            target="target" in self.levers,
            activation_memory=0.75 if "memory" in self.levers else 1.0,
        )
        updating = dataclasses.replace(config.optim, bf16_copies="copies" in self.levers)
        losing = dataclasses.replace(config.loss, kind="ce", fp8_head="fp8" in self.levers)  # what SpecForge computes
        return dataclasses.replace(config, compile=compiling, optim=updating, loss=losing)


def _tiny() -> RunConfig:
    return RunConfig(
        preset="tiny",
        target=TargetConfig(path="random:qwen3", mask_token_id=511),
        drafter=DrafterConfig(block_size=8, num_layers=2, num_features=3),
        data=DataConfig(path=Path("synthetic:64"), sequence_length=128, num_anchors=16),
        compile=CompileConfig(),
        telemetry=TelemetryConfig(queue_items=2),
    )


def drafter_shape(config: RunConfig) -> DrafterShape:
    """The drafter's shape for the random target of a configuration, without building the target."""
    mask_token_id = config.target.mask_token_id
    assert mask_token_id is not None
    return DrafterShape.from_target(RANDOM_TARGETS[config.target.path.removeprefix("random:")](), config.drafter, mask_token_id)


def random_batch(config: RunConfig, vocab_size: int, *, seed: int = 0) -> PackedBatch:
    """One row with one document of random tokens, all supervised, and a full set of anchors anywhere in it, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    length, anchors = config.data.sequence_length, config.data.num_anchors
    chosen = torch.randperm(length - 1, generator=generator)[:anchors].sort().values
    return PackedBatch(
        input_ids=torch.randint(0, vocab_size, (1, length), generator=generator),
        positions=torch.arange(length)[None],
        document_ids=torch.zeros(1, length, dtype=torch.int64),
        loss_mask=torch.ones(1, length, dtype=torch.bool),
        anchors=chosen[None],
        anchor_valid=torch.ones(1, anchors, dtype=torch.bool),
        sample_ids=(("random",),),
        index=0,
        position=Position(epoch=0, batch=0),
        num_tokens=length,
    )


def visible_pairs(layout: BlockLayout) -> int:
    """Pairs of queries and keys that see each other, where every row is one document and every slot is used."""
    slots = layout.anchors.numel()
    return int(layout.anchors.sum()) * layout.block_size + slots * layout.block_size**2


def main(bench: str, measure: Callable[[Settings], Result], arguments: Sequence[str] | None, doc: str | None) -> int:
    """The command of one bench: measure, print one JSON line. Exit code 2 for what cannot be run here."""
    parser = argparse.ArgumentParser(
        prog=f"python -m regression.bench.{bench}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    options = parser.parse_args(arguments)
    try:
        settings = from_options(options)
    except ConfigError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that child processes are ended, too
    sys.stdout.write(json.dumps(measure(settings).to_dict()) + "\n")
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that the front and every bench share."""
    where = "cuda:0" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--shape", choices=SHAPES, help="default: qwen3-8b on a GPU, tiny on a CPU")
    parser.add_argument("--device", default=where, help=f"cpu or cuda:INDEX (here: {where})")
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of a figure (default 10)")
    parser.add_argument(
        "--levers", default="", metavar="NAMES", help=f"of the trainer, comma-separated: {', '.join(LEVERS)} (default: none)"
    )
    parser.add_argument("--specforge", type=Path, metavar="DIR", help="directory that holds the package specforge")


def from_options(options: argparse.Namespace) -> Settings:
    """Raises ConfigError on what cannot be run here."""
    device = parse_device(options.device)
    if options.rounds < 1:
        raise ConfigError(f"--rounds {options.rounds}: use at least 1")
    if options.specforge and not (options.specforge / "specforge").is_dir():
        raise ConfigError(f"--specforge {options.specforge} holds no package specforge: pip install --no-deps --target it there")
    levers = tuple(filter(None, options.levers.split(",")))
    for lever in levers:
        if lever not in LEVERS:
            raise ConfigError(f"--levers names {lever!r}: known are {', '.join(LEVERS)}, with commas between them")
    shape = options.shape or ("qwen3-8b" if device.type == "cuda" else "tiny")
    settings = Settings(shape=shape, device=device, rounds=options.rounds, levers=levers, specforge=options.specforge)
    check_abilities(settings.config(), [device])
    return settings
