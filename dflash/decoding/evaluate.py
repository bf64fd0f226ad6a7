"""`python -m dflash evaluate RUN`: how much faster do held-out prompts decode with this drafter, and are the tokens the same?

Prompts are the held-out examples up to their first supervised token, in the order of the prepared data. Every prompt is
decoded speculatively and, unless `baseline` is off, plainly by the same code, in alternating order so that a drift of the
machine meets both; a short warm-up of each comes before. Lossless is a comparison, never an assumption: the token ids of
both are equal or the prompt is listed. That holds for sampling too, which is keyed by (seed, prompt number, position).

The drafter runs in the target's dtype, as it would be served. One prompt at a time; see `dflash.decoding.chain`.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import transformers
from rich.console import Console
from rich.progress import Progress

from dflash.batch import Example
from dflash.checkpoint import CheckpointError, load_drafter
from dflash.config import ConfigError, EvaluateConfig, RunConfig
from dflash.data.examples import DataError, Meta, check_matches, load_examples, load_meta
from dflash.decoding.chain import plain, speculate
from dflash.decoding.summary import Result, show, summarise
from dflash.device import parse_device
from dflash.files import write_whole
from dflash.modeling.drafter import Drafter, DrafterShape
from dflash.modeling.target import FrozenEnds, load_target, text_config

PROGRESS_AFTER_SECONDS = 2.0

Prompt = tuple[str, list[int]]  # sample id, token ids [P]
Skipped = tuple[str, str]  # sample id, reason


@dataclass(frozen=True)
class Loaded:
    """What an evaluation runs on: parts that fit each other."""

    model: Any
    ends: FrozenEnds
    drafter: Drafter
    run: RunConfig
    meta: Meta
    data: Path
    prompts: list[Prompt]
    skipped: list[Skipped]
    step: int  # of the checkpoint


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Decode held-out prompts, write RUN/evaluate-CHECKPOINT.json, show a table on stderr, return what was written.

    Raises ConfigError, DataError or CheckpointError when run, checkpoint, target and data do not fit each other.
    """
    started = time.perf_counter()
    loaded = _load(config)
    summary = _describe(config, loaded) | summarise(list(_decode(loaded, config)), seed=config.seed)
    summary["seconds"]["total"] = time.perf_counter() - started
    _write(config.run / f"evaluate-{config.checkpoint}.json", summary)
    show(f"{config.checkpoint} of {config.run}", summary)
    return summary


def check_fit(shape: DrafterShape, text: Any, checkpoint: str, target: str) -> None:
    """Raise CheckpointError unless the drafter was made for a target of this text configuration."""
    for what, found, expected in (
        ("a hidden size", shape.hidden_size, text.hidden_size),
        ("a vocabulary", shape.vocab_size, text.vocab_size),
        ("a number of target layers", shape.num_target_layers, text.num_hidden_layers),
    ):
        if found != expected:
            raise CheckpointError(
                f"{checkpoint} was trained for {what} of {found}, the target {target!r} has {expected}: "
                f"evaluate the drafter with the target it was trained for"
            )


def select_prompts(
    examples: Sequence[Example], config: EvaluateConfig, max_positions: int | None
) -> tuple[list[Prompt], list[Skipped]]:
    """The first `max_prompts` examples that can be decoded, and those before the last of them that cannot."""
    prompts: list[Prompt] = []
    skipped: list[Skipped] = []
    for example in examples:
        if len(prompts) == config.max_prompts:
            break
        count = int(example.loss_mask.argmax())
        if not example.loss_mask.any():
            skipped.append((example.sample_id, "no supervised token"))
        elif count == 0:
            skipped.append((example.sample_id, "no token before its first supervised one"))
        elif max_positions is not None and count + config.max_new_tokens > max_positions:
            reason = f"{count} prompt and {config.max_new_tokens} new tokens exceed the target's {max_positions} positions"
            skipped.append((example.sample_id, reason))
        else:
            prompts.append((example.sample_id, example.ids[:count].tolist()))
    return prompts, skipped


def _load(config: EvaluateConfig) -> Loaded:
    if Path(config.checkpoint).name != config.checkpoint:
        raise ConfigError(
            f"checkpoint {config.checkpoint!r} is a path: name one of the run's checkpoints, for example best or last"
        )
    device = parse_device(config.device)
    drafter, run, state = load_drafter(config.run, config.checkpoint, device)
    data = config.data if config.data is not None else run.data.path
    meta, examples = load_meta(data), load_examples(data, "heldout")
    run = dataclasses.replace(run, target=dataclasses.replace(run.target, dtype=config.dtype or run.target.dtype))
    model, _ = load_target(run.target, device=device)
    text = text_config(model)
    check_fit(drafter.shape, text, f"checkpoint {config.checkpoint} of {config.run}", run.target.path)
    check_matches(meta, vocab_size=drafter.shape.vocab_size, mask_token_id=drafter.shape.mask_token_id)
    prompts, skipped = select_prompts(examples, config, getattr(text, "max_position_embeddings", None))
    if not prompts:
        reasons = "; ".join(f"{sample_id}: {reason}" for sample_id, reason in skipped[:3]) or "the split is empty"
        raise DataError(
            f"{data} has no held-out prompt that can be decoded ({reasons}): prepare with a larger --heldout-fraction"
        )
    dtype = getattr(torch, run.target.dtype)
    ends = FrozenEnds.from_model(model, device, dtype)
    return Loaded(model, ends, drafter.to(dtype).eval(), run, meta, data, prompts, skipped, state.step)


def _describe(config: EvaluateConfig, loaded: Loaded) -> dict[str, Any]:
    return {
        "run": str(config.run),
        "checkpoint": config.checkpoint,
        "step": loaded.step,
        "target": loaded.run.target.path,
        "data": str(loaded.data),
        "device": config.device,
        "dtype": loaded.run.target.dtype,
        "temperature": config.temperature,
        "seed": config.seed,
        "max_new_tokens": config.max_new_tokens,
        "eos_token_ids": list(loaded.meta.eos_token_ids),
        "block_size": loaded.drafter.shape.block_size,
        "prompts_skipped": [{"sample_id": sample_id, "reason": reason} for sample_id, reason in loaded.skipped],
        "versions": {"torch": str(torch.__version__), "transformers": str(transformers.__version__)},
    }


def _decode(loaded: Loaded, config: EvaluateConfig) -> Iterator[Result]:
    def decode(number: int, max_new_tokens: int) -> Result:
        sample_id, ids = loaded.prompts[number]
        settings: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "temperature": config.temperature,
            "eos_ids": loaded.meta.eos_token_ids,
            "seed": config.seed,
            "request": number,
        }
        plain_first = number % 2 == 0
        baseline = plain(loaded.model, ids, **settings) if config.baseline and plain_first else None
        speculative = speculate(loaded.model, loaded.ends, loaded.drafter, ids, **settings)
        if config.baseline and not plain_first:
            baseline = plain(loaded.model, ids, **settings)
        return Result(sample_id, speculative, baseline)

    with _LateProgress("decoding prompts", len(loaded.prompts)) as progress:
        decode(0, min(config.max_new_tokens, 2 * loaded.drafter.shape.block_size))  # warm-up
        for number in range(len(loaded.prompts)):
            yield decode(number, config.max_new_tokens)
            progress.advance()


def _write(path: Path, summary: dict[str, Any]) -> None:
    write_whole(path, json.dumps(summary, indent=2).encode() + b"\n")


class _LateProgress:
    """A progress bar on stderr that appears only when the work takes longer than PROGRESS_AFTER_SECONDS."""

    def __init__(self, description: str, total: int) -> None:
        self._progress = Progress(console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(description, total=total)
        self._started = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def advance(self) -> None:
        self._progress.advance(self._task)
        if time.perf_counter() - self._started > PROGRESS_AFTER_SECONDS:
            self._progress.start()
