"""Texts of the target for the probes that need some: prepared held-out examples, else what the target writes to a few prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dflash.batch import Example, PackedBatch
from dflash.checking.subject import Subject
from dflash.config import DataConfig
from dflash.data import chat
from dflash.data.examples import load_examples
from dflash.data.generate import Question, Sampling, answer
from dflash.data.meta import SPLITS, DataError, Split
from dflash.data.packing import PackedStream
from dflash.modeling.target import text_config

ANCHORS = 32  # of each text
NEW_TOKENS = 96  # that the target writes to a prompt
PROMPTS = (
    "Write a function that reverses a list.",
    "Explain why the sky is blue.",
    "List the first ten prime numbers.",
    "Tell a short story about a lighthouse.",
)
RANDOM_PROMPT_TOKENS = 12


@dataclass(frozen=True)
class Texts:
    """What the target wrote, and where it comes from."""

    examples: list[Example]
    source: str

    def batches(self) -> Iterator[PackedBatch]:
        """One text a batch, with anchors as the trainer draws them."""
        longest = max(len(example.ids) for example in self.examples)
        config = DataConfig(sequence_length=longest, rows_per_batch=1, num_anchors=ANCHORS, packing="none")
        stream = PackedStream(self.examples, config, seed=0, pad_token_id=0)
        yield from (stream.batch(number) for number in range(stream.batches_per_epoch()))


def collect(subject: Subject) -> Texts:
    """Prepared examples that fit the drafter, else generated text; the source says which, and why."""
    reason = subject.no_data
    if subject.meta is not None and subject.shape is not None:
        if subject.meta.vocab_size != subject.shape.vocab_size:
            reason = f"the data has a vocabulary of {subject.meta.vocab_size}, the drafter of {subject.shape.vocab_size}"
        else:
            for split in reversed(SPLITS):
                found = _prepared(subject, split)
                if found:
                    return Texts(found, f"{len(found)} {split} examples of {subject.data}")
            reason = f"{subject.data} has no example with two supervised tokens in its first {subject.config.max_tokens}"
    examples, what = _generated(subject)
    return Texts(examples, f"{len(examples)} texts that the target wrote to {what}, because {reason}")


def _prepared(subject: Subject, split: Split) -> list[Example]:
    assert subject.data is not None
    try:
        examples = load_examples(subject.data, split)
    except DataError:
        if subject.config.data is not None:
            raise
        return []
    limit = subject.config.max_tokens
    cut = (Example(sample_id=e.sample_id, ids=e.ids[:limit], loss_mask=e.loss_mask[:limit]) for e in examples)
    return [example for example in cut if _usable(example)][: subject.config.examples]


def _usable(example: Example) -> bool:
    return bool((example.loss_mask[:-1] & example.loss_mask[1:]).any())


def _generated(subject: Subject) -> tuple[list[Example], str]:
    prompts, what = _prompts(subject)
    questions = [Question(sample_id=f"generated-{number}", ids=ids) for number, ids in enumerate(prompts)]
    # Greedy, as drafters are served; a target without tokenizer has random weights, whose greedy answers are loops.
    sampling = Sampling(
        max_new_tokens=min(NEW_TOKENS, subject.config.max_tokens),
        end_token_ids=_ends(subject),
        temperature=0.0 if subject.tokenizer is not None else 1.0,
    )
    written = answer(subject.model, questions, sampling)
    examples = []
    for question, tokens in zip(questions, written, strict=True):
        ids = np.array([*question.ids, *tokens], dtype=np.int32)
        examples.append(Example(sample_id=question.sample_id, ids=ids, loss_mask=np.arange(len(ids)) >= len(question.ids)))
    usable = [example for example in examples if _usable(example)]
    if not usable:
        raise DataError("the target ends every answer at once: give --data with prepared examples")
    return usable, what


def _prompts(subject: Subject) -> tuple[list[list[int]], str]:
    tokenizer: Any = subject.tokenizer
    if tokenizer is None:
        vocabulary = int(text_config(subject.model).vocab_size)
        random = torch.randint(0, vocabulary, (len(PROMPTS), RANDOM_PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
        return random.tolist(), f"{len(PROMPTS)} prompts of random tokens"
    try:
        thinking = subject.config.thinking == "on"
        rendered = [
            chat.render_prompt(tokenizer, [{"role": "user", "content": text}], enable_thinking=thinking) for text in PROMPTS
        ]
    except DataError:
        return [list(tokenizer(text)["input_ids"]) for text in PROMPTS], f"{len(PROMPTS)} built-in prompts without a template"
    return rendered, f"{len(PROMPTS)} built-in prompts"


def _ends(subject: Subject) -> set[int]:
    found = getattr(text_config(subject.model), "eos_token_id", None)
    return set(found) if isinstance(found, list | tuple) else set() if found is None else {int(found)}
