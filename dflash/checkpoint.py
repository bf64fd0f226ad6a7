"""Checkpoints that survive a crash: written aside, fsynced, completed by a marker, renamed.

A checkpoint is a directory `RUN/checkpoints/step-000500/`:
- `drafter.safetensors` fp32 weights under z-lab's names, `optimizer.safetensors` the flat AdamW moments,
- `state.json` step, next micro-batch, metrics and the run's configuration,
- `COMPLETE` a JSON marker with the size and SHA-256 of each file, written last.
A directory without a marker, or whose files differ from it, is never loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.config import RunConfig, run_config_from_dict, to_dict
from dflash.errors import CheckpointError
from dflash.files import as_others_are, sync
from dflash.modeling.drafter import Drafter, DrafterShape

FORMAT = "dflash-harness checkpoint 1"
MARKER = "COMPLETE"
EARLIER = "use an earlier one: remove this directory, and --resume goes on from the one before"
FILES = ("drafter.safetensors", "optimizer.safetensors", "state.json")


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """What a run needs to go on: nothing in it depends on the number of workers."""

    step: int  # optimizer steps done
    weights: dict[str, Tensor]  # fp32, z-lab's names
    moments: dict[str, Tensor]  # flat exp_avg, exp_avg_sq, and step
    shape: dict[str, Any]  # the drafter's z-lab configuration
    config: RunConfig
    metrics: dict[str, float]

    @property
    def next_batch(self) -> int:
        """Number of the first micro-batch that no optimizer step has consumed."""
        return self.step * self.config.optim.batches_per_step


def checkpoint_dir(run: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run / "checkpoints"


def step_name(step: int) -> str:
    """Directory name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:06d}"


def save(run: Path, state: TrainState) -> Path:
    """Write one checkpoint; returns its directory. Raises CheckpointError when the disk refuses; older ones stay untouched."""
    final = checkpoint_dir(run) / step_name(state.step)
    aside = final.with_name(f".{final.name}.{os.getpid()}.partial")
    try:
        aside.mkdir(parents=True, exist_ok=True)
        save_file({k: v.detach().cpu().contiguous() for k, v in state.weights.items()}, aside / FILES[0])
        save_file({k: v.detach().cpu().contiguous() for k, v in state.moments.items()}, aside / FILES[1])
        for name in FILES[:2]:
            as_others_are(aside / name)
        document = {
            "format": FORMAT,
            "step": state.step,
            "shape": state.shape,
            "config": to_dict(state.config),
            "metrics": state.metrics,
        }
        (aside / FILES[2]).write_text(json.dumps(document, indent=1))
        marker = {name: {"bytes": (aside / name).stat().st_size, "sha256": _sha256(aside / name)} for name in FILES}
        (aside / MARKER).write_text(json.dumps(marker, indent=1))
        for name in (*FILES, MARKER):
            sync(aside / name)
        sync(aside)
        replaced = final.with_name(f".{final.name}.{os.getpid()}.replaced.partial")
        if final.exists():
            final.rename(replaced)
        aside.rename(final)
        sync(final.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(
            f"cannot write checkpoint {final}: {error}. Earlier ones are untouched: free disk space, go on with --resume"
        ) from error
    return final


def prune(run: Path, *, keep_last: int, keep: frozenset[str] = frozenset()) -> list[str]:
    """Delete all complete checkpoints but the first (step 0), the last `keep_last` and those named in `keep`."""
    names = list_complete(run)
    kept = {step_name(0), *names[-keep_last:], *keep}
    removed = [name for name in names if name not in kept]
    for name in removed:
        (checkpoint_dir(run) / name / MARKER).unlink()
        shutil.rmtree(checkpoint_dir(run) / name)
    for leftover in checkpoint_dir(run).glob(".step-*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    return removed


def list_complete(run: Path) -> list[str]:
    """Names of the checkpoints with a marker, oldest first."""
    names = [p.parent.name for p in checkpoint_dir(run).glob(f"step-*/{MARKER}")]
    return sorted(names, key=lambda name: int(name.removeprefix("step-")))


def resolve(run: Path, name: str) -> Path:
    """Directory of checkpoint `best`, `last` or `step-NNNNNN`. Raises CheckpointError when there is none."""
    names = list_complete(run)
    if not names:
        raise CheckpointError(f"{run} holds no complete checkpoint: train with --output {run} first")
    if name == "last":
        name = names[-1]
    elif name == "best":
        name = max(names, key=lambda n: (read_state(checkpoint_dir(run) / n)["metrics"].get("score", float("-inf")), n))
    if name not in names:
        raise CheckpointError(f"{run} has no complete checkpoint {name!r}: found {', '.join(names)}")
    return checkpoint_dir(run) / name


def set_aside_damaged(run: Path) -> list[str]:
    """Rename damaged checkpoints, newest first, until one is whole, to `damaged-step-NNNNNN`. Returns what was done, told."""
    told = []
    for name in reversed(list_complete(run)):
        directory = checkpoint_dir(run) / name
        try:
            _verify(directory)
            break
        except CheckpointError as error:
            aside = directory.with_name(f"damaged-{name}")
            shutil.rmtree(aside, ignore_errors=True)
            directory.rename(aside)
            told.append(f"set aside as {aside.name}, going on from an earlier one: {str(error).removesuffix(f'; {EARLIER}')}")
    return told


def read_state(directory: Path) -> dict[str, Any]:
    """The contents of `state.json`. Raises CheckpointError on a foreign or unreadable file."""
    try:
        document: dict[str, Any] = json.loads((directory / FILES[2]).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory / FILES[2]} is not readable: {error}") from error
    if document.get("format") != FORMAT:
        raise CheckpointError(
            f"{directory} is not a checkpoint of this program: format {document.get('format')!r}, expected {FORMAT!r}"
        )
    return document


def load(directory: Path) -> TrainState:
    """Read a checkpoint after verifying every byte of it. Raises CheckpointError on any difference from its marker."""
    _verify(directory)
    document = read_state(directory)
    return TrainState(
        step=document["step"],
        weights=load_file(directory / FILES[0]),
        moments=load_file(directory / FILES[1]),
        shape=document["shape"],
        config=run_config_from_dict(document["config"]),
        metrics=document["metrics"],
    )


def load_drafter(run: Path, name: str, device: torch.device) -> tuple[Drafter, RunConfig, TrainState]:
    """The drafter of a run's checkpoint (`best`, `last`, `step-NNNNNN`) in fp32 on `device`, with its run's configuration."""
    state = load(resolve(run, name))
    drafter = Drafter(shape_of(state))
    drafter.load_state_dict(state.weights)
    return drafter.to(device).eval(), state.config, state


def shape_of(state: TrainState) -> DrafterShape:
    """The shape of the drafter in a checkpoint."""
    return DrafterShape.from_zlab_config(state.shape)


def check_resumable(state: TrainState, config: RunConfig, shape: DrafterShape) -> None:
    """Raise CheckpointError where going on with `config` would not be the same training."""
    saved, wanted = shape_of(state), shape
    for field in dataclasses.fields(DrafterShape):
        old, new = getattr(saved, field.name), getattr(wanted, field.name)
        if old != new:
            raise CheckpointError(
                f"the checkpoint's drafter has {field.name} {old!r}, this run asks for {new!r}: use the same, or another --output"
            )
    sections = (
        ("seed", state.config.seed, config.seed),
        ("data.path", state.config.data.path, config.data.path),
        *(
            (f"target.{n}", getattr(state.config.target, n), getattr(config.target, n))
            for n in ("path", "gguf_file", "dtype", "seed")
        ),
        *_differences(state.config, config),
    )
    for key, old, new in sections:
        if old != new:
            raise CheckpointError(
                f"the checkpoint was trained with {key} {old!r}, this run asks for {new!r}: resume with the same value"
            )


def _differences(saved: RunConfig, wanted: RunConfig) -> list[tuple[str, Any, Any]]:
    data = ("sequence_length", "rows_per_batch", "num_anchors", "packing", "min_supervised_tokens")
    result = [(f"data.{n.replace('_', '-')}", getattr(saved.data, n), getattr(wanted.data, n)) for n in data]
    result += [
        (f"loss.{f.name}", getattr(saved.loss, f.name), getattr(wanted.loss, f.name)) for f in dataclasses.fields(saved.loss)
    ]
    result += [
        (f"optim.{f.name.replace('_', '-')}", getattr(saved.optim, f.name), getattr(wanted.optim, f.name))
        for f in dataclasses.fields(saved.optim)
    ]
    return [row for row in result if row[0] != "loss.chunk_tokens"]


def _verify(directory: Path) -> None:
    if not re.fullmatch(r"step-\d{6,}", directory.name) or not directory.is_dir():
        raise CheckpointError(f"{directory} is not a checkpoint directory (step-NNNNNN)")
    try:
        marker = json.loads((directory / MARKER).read_text())
        for name in FILES:
            expected = marker[name]
            found = (directory / name).stat().st_size
            if found != expected["bytes"]:
                raise CheckpointError(
                    f"{directory / name} has {found} bytes, its marker says {expected['bytes']}: it is truncated or was "
                    f"changed; {EARLIER}"
                )
            if _sha256(directory / name) != expected["sha256"]:
                raise CheckpointError(f"{directory / name} does not match its marker: it was changed; {EARLIER}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory} is not a complete checkpoint ({type(error).__name__}: {error}); {EARLIER}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
