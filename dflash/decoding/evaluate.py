"""`python -m dflash evaluate RUN`: how much faster do held-out prompts decode with this drafter, and are the tokens the same?

Prompts are the held-out examples up to their first supervised token, in the order of the prepared data. Every prompt is
decoded with a chain of drafts, with a tree for each of `budgets`, and, unless `baseline` is off, plainly: by the same code,
`batch` prompts at a time, each way first in its turn so that a drift of the machine meets all; a short warm-up of each comes
before. Lossless is a comparison, never an assumption: the token ids equal those of plain decoding or the prompt is listed.
That holds for sampling too, which is keyed by (seed, prompt number, position).

Beside the numbers stand two pictures: acceptance by position, and τ by tree budget. The drafter runs in the target's dtype,
as it would be served. What is decoded how: `dflash.decoding.rounds`.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
import transformers
from rich.console import Console
from rich.progress import Progress

from dflash.batch import Example
from dflash.checkpoint import load_drafter
from dflash.command_config import EvaluateConfig
from dflash.config import ConfigError, RunConfig
from dflash.data.examples import DataError, Meta, check_matches, load_examples, load_meta
from dflash.decoding.comparing import check_comparable, compare, prompt_digests, read_evaluation
from dflash.decoding.plots import acceptance_svg, budget_svg
from dflash.decoding.rounds import Drafting, Generation, Wanted, decode
from dflash.decoding.summary import Result, show, summarise
from dflash.device import parse_device
from dflash.errors import CheckpointError
from dflash.files import write_whole
from dflash.modeling.drafter import Drafter, DrafterShape
from dflash.modeling.identity import model_digest
from dflash.modeling.shape import misfit
from dflash.modeling.target import FrozenEnds, load_target, text_config

PROGRESS_AFTER_SECONDS = 2.0

Prompt = tuple[str, list[int]]  # sample id, token ids [P]
Skipped = tuple[str, str]  # sample id, reason
Way = Literal["plain", "chain"] | int  # of decoding; a number is the budget of a tree


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
    """Decode held-out prompts, write RUN/evaluate-CHECKPOINT.json and its pictures, show a table on stderr, return the numbers.

    Raises ConfigError, DataError or CheckpointError when run, checkpoint, target and data do not fit each other.
    """
    started = time.perf_counter()
    other = None if config.against is None else read_evaluation(config.against)
    loaded = _load(config)
    settings, caution = _describe(config, loaded), None
    if other is not None:
        assert config.against is not None
        caution = check_comparable(other, settings, config.against)
    done = _decode(loaded, config)
    ways: tuple[Way, ...] = ("chain", *config.budgets)
    parts = {way: summarise(_results(loaded, done, way), seed=config.seed) for way in ways}
    summary = settings | parts["chain"]
    summary["trees"] = [{"budget": budget, **parts[budget]} for budget in config.budgets]
    if other is not None:
        summary["against"] = {"file": str(config.against), "caution": caution, **compare(summary, other, seed=config.seed)}
    pictures = {"acceptance": acceptance_svg(summary)} | ({"budgets": budget_svg(summary)} if config.budgets else {})
    files = {config.run / f"evaluate-{config.checkpoint}-{name}.svg": picture for name, picture in pictures.items()}
    summary["pictures"] = [str(path) for path in files]
    summary["seconds"]["total"] = time.perf_counter() - started
    write_whole(config.run / f"evaluate-{config.checkpoint}.json", json.dumps(summary, indent=2).encode() + b"\n")
    if not config.budgets:
        (config.run / f"evaluate-{config.checkpoint}-budgets.svg").unlink(missing_ok=True)  # of an earlier evaluation
    for path, picture in files.items():
        write_whole(path, picture.encode())
    show(f"{config.checkpoint} of {config.run}", summary)
    return summary


def check_fit(shape: DrafterShape, text: Any, checkpoint: str, target: str) -> None:
    """Raise CheckpointError unless the drafter was made for a target of this text configuration."""
    if problem := misfit(shape, text):
        what, _, has = problem.partition(", the target has ")
        raise CheckpointError(
            f"{checkpoint} was trained for {what}, the target {target!r} has {has}: "
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
        "target_digest": model_digest(loaded.model),
        "data": str(loaded.data),
        "device": config.device,
        "dtype": loaded.run.target.dtype,
        "temperature": config.temperature,
        "seed": config.seed,
        "max_new_tokens": config.max_new_tokens,
        "batch": config.batch,
        "tree_attention": config.tree_attention,
        "eos_token_ids": list(loaded.meta.eos_token_ids),
        "block_size": loaded.drafter.shape.block_size,
        "prompt_digests": prompt_digests(loaded.prompts),
        "prompts_skipped": [{"sample_id": sample_id, "reason": reason} for sample_id, reason in loaded.skipped],
        "versions": {"torch": str(torch.__version__), "transformers": str(transformers.__version__)},
    }


def _decode(loaded: Loaded, config: EvaluateConfig) -> dict[Way, list[Generation]]:
    """What every way of decoding gave, in the order of the prompts."""
    baseline: tuple[Way, ...] = ("plain",) if config.baseline else ()
    ways: tuple[Way, ...] = (*baseline, "chain", *config.budgets)
    done: dict[Way, list[Generation]] = {way: [] for way in ways}
    warm_up = dataclasses.replace(config, max_new_tokens=min(config.max_new_tokens, 2 * loaded.drafter.shape.block_size))
    with _LateProgress("decoding prompts", len(loaded.prompts)) as progress:
        for way in ways:
            _decode_batch(loaded, warm_up, way, 0)
        for turn, first in enumerate(range(0, len(loaded.prompts), config.batch)):
            start = turn % len(ways)
            for way in (*ways[start:], *ways[:start]):
                done[way] += _decode_batch(loaded, config, way, first)
            progress.advance(config.batch)
    return done


def _decode_batch(loaded: Loaded, config: EvaluateConfig, way: Way, first: int) -> list[Generation]:
    """The prompts from number `first` on, as many as are decoded together."""
    prompts = [ids for _, ids in loaded.prompts[first : first + config.batch]]
    wanted = Wanted(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        eos_ids=loaded.meta.eos_token_ids,
        seed=config.seed,
    )
    budget = way if isinstance(way, int) else None
    drafting = Drafting(
        drafter=loaded.drafter, ends=loaded.ends, budget=budget, tree_attention=config.tree_attention if budget else "sdpa"
    )
    requests = range(first, first + len(prompts))
    return decode(loaded.model, prompts, wanted, drafting=None if way == "plain" else drafting, requests=requests)


def _results(loaded: Loaded, done: dict[Way, list[Generation]], way: Way) -> list[Result]:
    baselines = done.get("plain", [None] * len(loaded.prompts))
    return [
        Result(sample_id, speculative, baseline)
        for (sample_id, _), speculative, baseline in zip(loaded.prompts, done[way], baselines, strict=True)
    ]


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

    def advance(self, prompts: int) -> None:
        self._progress.advance(self._task, prompts)
        if time.perf_counter() - self._started > PROGRESS_AFTER_SECONDS:
            self._progress.start()
