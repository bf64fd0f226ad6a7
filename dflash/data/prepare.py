"""`prepare`: prompts in, conversations answered by the target out.

A drafter learns to guess what its target writes, so the answers of the training data are written by the target itself, to
prompts rendered by the template and with the thinking mode that will be served. The tokens of an example are exactly what
the target was given and what it wrote (nothing is decoded and tokenized again); supervised is what it wrote, its end token
included. Assistant turns inside a prompt are context: somebody else wrote them.

Nothing is dropped without a trace: skipped prompts are counted by reason in meta.json and listed in skipped.jsonl.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash import events
from dflash.batch import Example
from dflash.config import ConfigError, PrepareConfig, to_dict
from dflash.data import chat
from dflash.data.examples import require_unpublished, write_examples
from dflash.data.generate import Question, Sampling, answer, in_batches
from dflash.data.journal import AnswerJournal
from dflash.data.meta import SPLITS, DataError, Meta
from dflash.data.progress import GenerationProgress
from dflash.data.prompts import Prompt, load_prompts
from dflash.device import parse_device
from dflash.modeling.target import load_target, resolve_mask_token_id, text_config

PROBE_ANSWER = "ok"  # finishes a conversation, to see whether the template keeps the prompt law
_TOOLS = ("torch", "transformers", "tokenizers", "pyarrow", "numpy")


@dataclass(frozen=True, kw_only=True)
class _Target:
    model: Any
    tokenizer: Any
    vocab_size: int
    mask_token_id: int
    pad_token_id: int
    end_token_ids: tuple[int, ...]


def prepare(config: PrepareConfig) -> dict[str, Any]:
    """Answer the prompts of `config.prompts` and publish the examples as `config.output`; return a JSON-ready summary.

    Raises DataError for prompts, templates and disks that cannot be used, ConfigError for settings and targets.
    """
    started = time.monotonic()
    require_unpublished(config.output)
    loaded = load_prompts(config)
    prompts, skipped = loaded.prompts, list(loaded.skipped)
    with events.span("prepare.load_target"):
        target = _load(config)
    questions, refused = _ask(config, target, prompts)
    skipped += refused
    if not questions:
        listed = "; ".join(f"{reason}: {count}" for reason, count in Counter(r for _, r in skipped).most_common(5))
        raise DataError(f"{config.prompts}: every prompt was skipped ({listed}); nothing was written")
    with AnswerJournal(config.output, _fingerprint(config, target)) as journal:
        with _cpu_threads(config):
            answers, generation = _answer_all(config, target, list(questions.values()), journal)
        splits: dict[str, list[Example]] = {split: [] for split in SPLITS}
        for prompt in prompts:
            if prompt.sample_id in questions:
                splits[prompt.split].append(_example(questions[prompt.sample_id], answers[prompt.sample_id]))
        meta = write_examples(config.output, splits, _meta(config, target, loaded.field, answers), skipped=skipped)
        journal.remove()
    return {
        "output": str(config.output),
        "target": meta.target,
        "examples": meta.examples,
        "skipped": meta.skipped,
        "truncated_answers": meta.truncated_answers,
        "answer_tokens": sum(len(tokens) for tokens in answers.values()),
        **generation,
        "seconds": time.monotonic() - started,
    }


def _load(config: PrepareConfig) -> _Target:
    device = parse_device(config.device)
    model, tokenizer = load_target(config.target, device=device)
    if tokenizer is None:
        raise ConfigError(f"{config.target.path!r} has no tokenizer: prepare needs a target with tokenizer and chat template")
    chat.chat_template(tokenizer)
    end_token_ids = _end_token_ids(model, tokenizer)
    pad_token_id = tokenizer.pad_token_id
    vocab_size = int(text_config(model).vocab_size)
    return _Target(
        model=model,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        mask_token_id=resolve_mask_token_id(config.target, tokenizer, vocab_size),
        pad_token_id=end_token_ids[0] if pad_token_id is None else int(pad_token_id),
        end_token_ids=end_token_ids,
    )


def _end_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends an answer, ascending: those of the generation config, the model config and the tokenizer."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), text_config(model), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found |= set(ids) if isinstance(ids, list | tuple) else set() if ids is None else {int(ids)}
    if not found:
        raise ConfigError("the target names no end token: set eos_token_id in its generation_config.json")
    return tuple(sorted(found))


def _ask(config: PrepareConfig, target: _Target, prompts: Sequence[Prompt]) -> tuple[dict[str, Question], list[tuple[str, str]]]:
    """Prompts in tokens, by sample id, and those that cannot be asked with the reason."""
    questions: dict[str, Question] = {}
    refused: list[tuple[str, str]] = []
    context = getattr(text_config(target.model), "max_position_embeddings", None)
    for prompt in prompts:
        try:
            ids = _prompt_ids(config, target, prompt)
        except chat.PromptError as error:
            refused.append((prompt.sample_id, str(error)))
            continue
        if len(ids) > config.max_prompt_tokens:
            refused.append((prompt.sample_id, f"more than {config.max_prompt_tokens} tokens"))
        elif context is not None and len(ids) + config.max_new_tokens > context:
            refused.append((prompt.sample_id, f"no room for {config.max_new_tokens} more tokens in the target's {context}"))
        else:
            questions[prompt.sample_id] = Question(sample_id=prompt.sample_id, ids=ids)
    return questions, refused


def _prompt_ids(config: PrepareConfig, target: _Target, prompt: Prompt) -> list[int]:
    try:
        rendered = chat.render(
            target.tokenizer,
            prompt.messages,
            PROBE_ANSWER,
            end_token_ids=target.end_token_ids,
            enable_thinking=config.enable_thinking,
            supervise="last",
            tools=prompt.tools,
        )
    except chat.PromptError:
        raise
    except DataError as error:
        raise DataError(f"{config.prompts}, prompt {prompt.sample_id!r}: {error}") from error
    return [int(token) for token in rendered.ids[: rendered.prompt_tokens]]


def _answer_all(
    config: PrepareConfig, target: _Target, questions: Sequence[Question], journal: AnswerJournal
) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Answers by sample id, and how they were made."""
    sampling = Sampling(
        max_new_tokens=config.max_new_tokens,
        end_token_ids=target.end_token_ids,
        temperature=config.temperature,
        seed=config.seed,
    )
    answers = {q.sample_id: found for q in questions if (found := journal.take(q)) is not None}
    resumed = len(answers)
    missing = [question for question in questions if question.sample_id not in answers]
    started = time.monotonic()
    with GenerationProgress(len(questions)) as progress:
        if resumed:
            progress.note(f"going on: {resumed} of {len(questions)} prompts were answered by an earlier go")
            progress.answered(resumed)
        for batch in in_batches(missing, config.batch_size):
            with events.span("prepare.answer", prompts=len(batch)):
                written = _answer_batch(config, target, batch, sampling, progress)
            journal.append(batch, written)
            answers.update({question.sample_id: tokens for question, tokens in zip(batch, written, strict=True)})
            progress.answered(len(batch))
    seconds = time.monotonic() - started
    rate = progress.num_tokens / seconds if progress.num_tokens else None
    return answers, {"resumed_answers": resumed, "generated_tokens_per_second": rate}


@contextlib.contextmanager
def _cpu_threads(config: PrepareConfig) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(config.cpu_threads if config.device == "cpu" else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _answer_batch(
    config: PrepareConfig, target: _Target, batch: Sequence[Question], sampling: Sampling, progress: GenerationProgress
) -> list[list[int]]:
    try:
        return answer(target.model, batch, sampling, on_token=progress.tokens)
    except torch.OutOfMemoryError as error:
        longest = max(len(question.ids) for question in batch)
        raise ConfigError(
            f"out of memory on {config.device} with {len(batch)} prompts of up to {longest} tokens and {config.max_new_tokens} "
            f"new ones: use a --batch-size below {config.batch_size}; the same command goes on where it stopped"
        ) from error


def _example(question: Question, answer_ids: Sequence[int]) -> Example:
    ids = np.array([*question.ids, *answer_ids], dtype=np.int32)
    return Example(sample_id=question.sample_id, ids=ids, loss_mask=np.arange(len(ids)) >= len(question.ids))


def _meta(config: PrepareConfig, target: _Target, field: str, answers: dict[str, list[int]]) -> Meta:
    return Meta(
        target=config.target.path,
        gguf_file=config.target.gguf_file,
        vocab_size=target.vocab_size,
        mask_token_id=target.mask_token_id,
        pad_token_id=target.pad_token_id,
        eos_token_ids=target.end_token_ids,
        chat_template_sha256=chat.template_sha256(target.tokenizer),
        enable_thinking=config.enable_thinking,
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        prompts=config.prompts,
        prompt_field=field,
        truncated_answers=sum(tokens[-1] not in target.end_token_ids for tokens in answers.values()),
        versions={tool: importlib.metadata.version(tool) for tool in _TOOLS},
    )


def _fingerprint(config: PrepareConfig, target: _Target) -> dict[str, Any]:
    """Everything that decides an answer, beside the prompt. Files of a local target are told apart by size and time."""
    directory = Path(config.target.path)
    files = sorted(directory.iterdir()) if directory.is_dir() else []
    return {
        "target": {key: value for key, value in to_dict(config.target).items() if key != "mask_token_id"},
        "target files": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files],
        "chat template": chat.template_sha256(target.tokenizer),
        "end tokens": list(target.end_token_ids),
        "enable-thinking": config.enable_thinking,
        "temperature": config.temperature,
        "max-new-tokens": config.max_new_tokens,
        "seed": config.seed,
    }
