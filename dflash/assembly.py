"""From a configuration to the parts of a run: data, targets, drafters - checked against each other before anything runs."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from dflash import events
from dflash.batch import Example, PackedBatch, TargetStates
from dflash.compile_policy import CompilePolicy
from dflash.config import RunConfig, TargetConfig
from dflash.data.examples import DataError, Meta, check_matches, load_examples, load_meta
from dflash.data.meta import Split
from dflash.data.packing import PackedStream
from dflash.data.spool import open_spool
from dflash.data.synthetic import is_synthetic, synthetic_examples
from dflash.engine.devices import Placement
from dflash.engine.loops import TargetWorker
from dflash.features import Belongs, FeatureReader, FeatureStore
from dflash.modeling.shape import DrafterShape
from dflash.modeling.target import (
    RANDOM_PREFIX,
    FrozenEnds,
    TargetRunner,
    drafter_shape,
    load_target,
    resolve_mask_token_id,
    text_config,
)
from dflash.modeling.tensor_parallel import plan_of
from dflash.modeling.tiles import tile_lists
from dflash.modeling.warm_start import start_from_target
from dflash.worker import DrafterModelWorker, TargetModelWorker, check_packing


class StatesWorker(TargetWorker, Protocol):
    """Makes or reads target states: TargetModelWorker or FeatureReader."""

    def run(self, batch: PackedBatch) -> TargetStates:
        """The states of a held-out batch."""


SHOWN = 5  # skipped examples named in the notice; all are in skipped.jsonl


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything that runs, each on its device."""

    shape: DrafterShape
    stream: PackedStream
    heldout: PackedStream | None
    targets: tuple[StatesWorker, ...]  # or one reader of features
    drafters: tuple[DrafterModelWorker, ...]
    skipped_examples: int
    validation_batches: int
    tiles_of: int | None = None  # the drafter's block size where its mask is flex
    tp_plan: dict[str, str] | None = None  # how ranks hold a target together, not done yet

    def packed(self, number: int) -> PackedBatch:
        """A training micro-batch on the CPU as a drafter takes it that gets its target states from elsewhere."""
        batch = self.stream.batch(number)
        return batch if self.tiles_of is None else dataclasses.replace(batch, tiles=tile_lists(batch, self.tiles_of))

    def validation_states(self) -> list[TargetStates]:
        """Target states of the held-out micro-batches, on the leading drafter's device."""
        leader = self.drafters[0].device
        return [self.targets[0].run(batch).to(leader) for batch in self.heldout_batches()]

    def heldout_batches(self) -> list[PackedBatch]:
        """The held-out micro-batches that are measured at every checkpoint, on the CPU."""
        if self.heldout is None:
            return []
        count = min(self.validation_batches, self.heldout.batches_per_epoch(0))
        return [self.heldout.batch(number) for number in range(count)]


def build(config: RunConfig, placement: Placement, policy: CompilePolicy, *, leads: bool = True) -> Parts:
    """Load and connect everything that runs in this process. Raises ConfigError or DataError where two parts do not fit.

    A process without targets still loads one for its shape and ends; only the one that leads lists what is skipped.
    """
    models = []
    for number, device in enumerate(placement.targets):
        events.record("phase", text=f"loading target {number + 1} of {len(placement.targets)} on {device}")
        models.append(load_target(config.target, device=device if config.target.tensor_parallel == 1 else "cpu"))
    model, tokenizer = models[0] if models else load_target(config.target, device=_ends_device(config.target, placement))
    settings = text_config(model)
    mask_token_id = resolve_mask_token_id(config.target, tokenizer, settings.vocab_size)
    shape = drafter_shape(model, config.drafter, mask_token_id)
    check_packing(config, model)
    ways = config.target.tensor_parallel
    tp_plan = plan_of(model, ways) if ways > 1 else None
    stream, heldout, meta = streams_of(config, settings, mask_token_id)
    if leads:
        _report_skipped(config, {"train": stream, "heldout": heldout})
    drafters = []
    events.record("phase", text=f"building {len(placement.drafters)} drafters")
    for number, device in enumerate(placement.drafters, placement.first_drafter):
        ends = FrozenEnds.from_model(model, device=device, dtype=_ends_dtype(device))
        # The leader's weights are copied to all before the first step.
        start = functools.partial(start_from_target, model=model) if config.drafter.init == "target" and number == 0 else None
        drafters.append(DrafterModelWorker(f"drafter-{number}", config, shape, ends, device, policy, start=start))
    targets: list[StatesWorker] = []
    tiles_of = shape.block_size if config.drafter.attention == "flex" else None
    if config.data.features is not None:
        store = FeatureStore(config.data.features)
        store.check(Belongs.of(config, model, shape, meta, placement.drafters[0]), {"train": stream, "heldout": heldout})
        final_hidden = config.loss.kind == "kl"
        targets.append(FeatureReader("reader-0", store, stream, final_hidden=final_hidden, tiles_of=tiles_of))
    for number, ((target, _), device) in enumerate(zip(models, placement.targets, strict=True), placement.first_target):
        compiled = policy.compiled if config.compile.target else None
        runner = TargetRunner(target, shape.target_layer_ids, keep_final_hidden=config.loss.kind == "kl", compiled=compiled)
        targets.append(TargetModelWorker(f"target-{number}", runner, stream, device, policy, tiles_of=tiles_of))
    if not models and model.device.type == "cuda":  # its memory is the drafter's again, and no part of the run's peak
        device, model = model.device, None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return Parts(
        shape=shape,
        stream=stream,
        heldout=heldout,
        targets=tuple(targets),
        drafters=tuple(drafters),
        skipped_examples=len(stream.skipped),
        validation_batches=config.data.validation_batches,
        tiles_of=tiles_of,
        tp_plan=tp_plan,
    )


def _ends_device(target: TargetConfig, placement: Placement) -> torch.device:
    """Where a process without targets loads one: files to the CPU, random weights where targets draw theirs.

    A CPU draws other numbers from the same seed, and takes minutes for billions of them.
    """
    is_drawn = target.path.startswith(RANDOM_PREFIX) and target.tensor_parallel == 1
    return placement.drafters[0] if is_drawn else torch.device("cpu")


def _ends_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def streams_of(config: RunConfig, settings: Any, mask_token_id: int) -> tuple[PackedStream, PackedStream | None, Meta | None]:
    """Training and held-out data, and the meta of prepared data. Raises DataError where they are not this target's."""
    if is_synthetic(config.data.path):
        examples = synthetic_examples(config.data.path, config.data, vocab_size=settings.vocab_size, seed=config.seed)
        return PackedStream(examples, config.data, seed=config.seed, pad_token_id=0), None, None
    path = Path(config.data.path)
    meta = load_meta(path)
    check_matches(meta, vocab_size=settings.vocab_size, mask_token_id=mask_token_id)
    stream = PackedStream(_examples(config, "train"), config.data, seed=config.seed, pad_token_id=meta.pad_token_id)
    held = _examples(config, "heldout") if config.data.validation_batches else []
    if not held:
        if config.data.validation_batches:
            events.record("notice", text=f"{path} has no held-out examples: checkpoints are ordered by training loss")
        return stream, None, meta
    try:
        return stream, PackedStream(held, config.data, seed=config.seed, pad_token_id=meta.pad_token_id), meta
    except DataError as error:
        events.record(
            "notice", text=f"no validation, checkpoints are ordered by training loss: of the held-out examples, {error}"
        )
        return stream, None, meta


def _examples(config: RunConfig, split: Split) -> Sequence[Example]:
    if config.data.spool is None:
        return load_examples(Path(config.data.path), split)
    return open_spool(Path(config.data.path), split, config.data.spool)


def _report_skipped(config: RunConfig, streams: dict[str, PackedStream | None]) -> None:
    for split, stream in streams.items():
        if stream is not None and stream.truncated:
            count, length = len(stream.truncated), config.data.sequence_length
            events.record("notice", text=f"{count} {split} examples are longer than {length} tokens and were cut")
    skipped = [(split, *skip) for split, stream in streams.items() if stream is not None for skip in stream.skipped]
    if not skipped:
        return
    listing = config.output / "skipped.jsonl"
    lines = [json.dumps({"split": split, "sample_id": sample, "reason": reason}) + "\n" for split, sample, reason in skipped]
    listing.write_text("".join(lines), encoding="utf-8")
    shown = "; ".join(f"{sample}: {reason}" for _, sample, reason in skipped[:SHOWN])
    events.record("notice", text=f"{len(skipped)} examples skipped, all listed in {listing}: {shown}")
