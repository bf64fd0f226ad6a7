"""What is checked: a checkpoint as it lies on disk, and the models that can be built from it.

Reading tells three kinds of trouble apart. What is no checkpoint, half-written, or of another target is bad input
(CheckpointError, ConfigError). What can be read but would be misread by servers is a finding of the contract probe; then
there is no drafter to run and the other probes say so. What is not there (data, tokenizer, record) is not observed.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from dflash import checkpoint
from dflash.checking.settings import CheckConfig
from dflash.compile_policy import CompilePolicy
from dflash.config import CompileConfig, DrafterConfig, RunConfig, TargetConfig
from dflash.data.examples import Meta, load_meta
from dflash.data.meta import DataError
from dflash.data.synthetic import is_synthetic
from dflash.decoding.evaluate import check_fit
from dflash.device import parse_device
from dflash.errors import CheckpointError
from dflash.modeling import contract
from dflash.modeling.drafter import Drafter, DrafterShape
from dflash.modeling.target import FrozenEnds, TargetRunner, load_target, supports_packing, text_config
from dflash.worker import DrafterModelWorker


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A checkpoint as it lies on disk."""

    kind: str  # "checkpoint" of a run, or "export"
    directory: Path
    values: dict[str, Any]  # contents of config.json
    weights: dict[str, Tensor]  # on the CPU
    trained: dict[str, Any] | None  # what training wrote down as config.json; None: nobody did
    alignment: str | None  # the label convention that is stated; None: none
    target: TargetConfig | None
    data: Path | None

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are stored in."""
        return torch.float32 if self.kind == "checkpoint" else torch.bfloat16


def read(config: CheckConfig) -> Stored:
    """Read what lies at `config.path`. Raises CheckpointError on what is no checkpoint or not whole."""
    path = config.path
    if checkpoint.checkpoint_dir(path).is_dir():
        return _of_run(checkpoint.resolve(path, config.checkpoint))
    if (path / checkpoint.FILES[2]).is_file() or (path / checkpoint.FILES[0]).is_file():
        return _of_run(path.absolute())
    if (path / "config.json").is_file() or (path / "model.safetensors").is_file():
        return _of_export(path)
    raise CheckpointError(
        f"{path} is no training run (it would hold checkpoints/), no checkpoint (state.json) and no exported drafter "
        f"(config.json and model.safetensors): name one of these"
    )


def _of_run(directory: Path) -> Stored:
    state = checkpoint.load(directory)
    return Stored(
        kind="checkpoint",
        directory=directory,
        values=state.shape,
        weights=state.weights,
        trained=state.shape,
        alignment=contract.ALIGNMENT,
        target=state.config.target,
        data=None if is_synthetic(state.config.data.path) else Path(state.config.data.path),
    )


def _of_export(directory: Path) -> Stored:
    try:
        values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        weights = contract.read_weights(directory / "model.safetensors")
        record = directory / contract.RECORD
        known = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{directory} is not a whole exported drafter ({type(error).__name__}: {error}): export or download it again"
        ) from error
    if not isinstance(values, dict) or not isinstance(known, dict):
        raise CheckpointError(f"{directory}: config.json and {contract.RECORD} must hold JSON objects: export it again")
    if known and known.get("format") != contract.RECORD_FORMAT:
        raise CheckpointError(
            f"{directory / contract.RECORD} has format {known.get('format')!r}, expected {contract.RECORD_FORMAT!r}: export again"
        )
    data = known.get("data")
    return Stored(
        kind="export",
        directory=directory,
        values=values,
        weights=weights,
        trained=known.get("shape"),
        alignment=known.get("alignment"),
        target=TargetConfig(**known["target"]) if "target" in known else None,
        data=None if data is None or is_synthetic(Path(data)) else Path(data),
    )


class Subject:
    """A stored checkpoint, its target and its data. Models are built once, when first asked for."""

    def __init__(self, config: CheckConfig, stored: Stored) -> None:
        """Raises ConfigError where the target cannot be loaded, CheckpointError where it is another's, DataError on --data."""
        self.config = config
        self.stored = stored
        self.device = parse_device(config.device)
        self.target = _target_of(config, stored)
        self.shape = _shape(stored)
        self.problems = contract.config_problems(stored.values) + contract.weight_problems(
            stored.values, stored.weights, stored.dtype
        )
        loaded: tuple[Any, Any] = load_target(self.target, device=self.device) if self.target else (None, None)
        self.model, self.tokenizer = loaded
        if self.model is not None and self.shape is not None:
            check_fit(self.shape, text_config(self.model), str(stored.directory), self.target.path if self.target else "")
        self.data = config.data or stored.data
        self.meta, self.no_data = self._read_meta()

    @property
    def missing(self) -> str:
        """Why no model can be run; empty when it can."""
        if self.model is None:
            return "no target: neither given nor recorded"
        if self.shape is None or any(topic in ("names", "shapes") for topic, _ in self.problems):
            return "the drafter cannot be built: see what failed in contract"
        return ""

    @property
    def dtype(self) -> torch.dtype:
        """What target and served drafter compute in."""
        assert self.target is not None
        dtype: torch.dtype = getattr(torch, self.target.dtype)
        return dtype

    @cached_property
    def worker(self) -> DrafterModelWorker:
        """The drafter inside the trainer's own worker: training's path from a batch to hidden states and loss."""
        assert self.shape is not None
        config = RunConfig(
            target=self.target or TargetConfig(),
            drafter=DrafterConfig(block_size=self.shape.block_size, attention="sdpa"),
            compile=CompileConfig(policy="eager"),
            devices=str(self.device),
        )
        policy = CompilePolicy(config.compile, num_drafters=1)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32  # as the trainer's
        ends = FrozenEnds.from_model(self.model, device=self.device, dtype=dtype)
        worker = DrafterModelWorker("check", config, self.shape, ends, self.device, policy)
        worker.drafter.load_state_dict({name: weight.float() for name, weight in self.stored.weights.items()})
        worker.drafter.eval()
        return worker

    @cached_property
    def served(self) -> tuple[Drafter, FrozenEnds]:
        """The drafter as decoding takes it: cast to the target's dtype."""
        assert self.shape is not None
        drafter = Drafter(self.shape)
        drafter.load_state_dict({name: weight.float() for name, weight in self.stored.weights.items()})
        ends = FrozenEnds.from_model(self.model, device=self.device, dtype=self.dtype)
        return drafter.to(self.device).to(self.dtype).eval(), ends

    @cached_property
    def bfloat16_frequencies(self) -> Tensor:
        """Rotary frequencies [d/2] of the drafter after a cast to bfloat16."""
        assert self.shape is not None
        return Drafter(self.shape).to(torch.bfloat16).rotary.inv_freq

    @cached_property
    def runner(self) -> TargetRunner:
        """The target as the trainer runs it; no layer is taken off."""
        assert self.shape is not None
        return TargetRunner(self.model, self.shape.target_layer_ids, keep_final_hidden=True)

    @cached_property
    def packs(self) -> bool:
        """Whether documents may share a row."""
        return supports_packing(self.model)

    def _read_meta(self) -> tuple[Meta | None, str]:
        """The meta of the prepared data, and why there is none."""
        if self.data is None:
            return None, "no prepared data: neither given nor recorded"
        try:
            return load_meta(self.data), ""
        except DataError as error:
            if self.config.data is not None:
                raise
            return None, f"the recorded data cannot be used ({error})"


def _target_of(config: CheckConfig, stored: Stored) -> TargetConfig | None:
    recorded = stored.target
    if config.target is not None:
        target = TargetConfig(path=config.target, gguf_file=config.gguf_file, dtype="float32")
        if recorded is not None:
            target = dataclasses.replace(target, dtype=recorded.dtype, seed=recorded.seed)
    elif recorded is not None:
        target = recorded
    else:
        return None
    return dataclasses.replace(target, dtype=config.dtype or target.dtype)


def _shape(stored: Stored) -> DrafterShape | None:
    """None where config.json cannot be read as a drafter; the contract probe tells why."""
    try:
        return DrafterShape.from_zlab_config(stored.values)
    except (ValueError, TypeError, AttributeError):  # a ConfigError is a ValueError
        return None
