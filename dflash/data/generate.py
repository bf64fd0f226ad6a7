"""Answers of the target to many prompts at once: left padding, KV cache, rows that have ended leave the batch.

Greedy decoding takes the arg-max of the raw logits: settings of the model's own generation config, such as a repetition
penalty, are not applied, because speculative decoding reproduces the raw model. Sampling draws each token from a uniform
number that is keyed by (seed, sample id, position in the answer). So an answer does not depend on which other prompts share
its batch, up to rounding: kernels may add in another order for another batch size, which matters for near ties in bfloat16.

Legend: R rows still running, P tokens of the padded prompts, V vocabulary.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import DynamicCache

from dflash.data.meta import DataError
from dflash.modeling.attention import decoding_kernels

_NOT_FINITE = -1


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt in tokens."""

    sample_id: str
    ids: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are decoded."""

    max_new_tokens: int
    end_token_ids: Collection[int]
    temperature: float = 0.0  # 0: greedy
    seed: int = 0


def in_batches(questions: Sequence[Question], batch_size: int) -> Iterator[list[Question]]:
    """Batches of similar length, the longest first: what does not fit into memory fails at once, not at the end."""
    ordered = sorted(questions, key=lambda question: (-len(question.ids), question.sample_id))
    for first in range(0, len(ordered), batch_size):
        yield ordered[first : first + batch_size]


@torch.inference_mode()
def answer(
    model: Any, questions: Sequence[Question], sampling: Sampling, *, on_token: Callable[[int], None] = lambda _rows: None
) -> list[list[int]]:
    """Answer one batch; each answer ends with its end token, or has `max_new_tokens` tokens without one.

    `on_token` is called after every forward with the number of rows that got a token. Raises DataError when the target's
    logits are not finite.
    """
    answers: list[list[int]] = [[] for _ in questions]
    uniforms = torch.from_numpy(np.stack([_uniforms(sampling, question.sample_id) for question in questions]))
    uniforms = uniforms.to(model.device)
    ends = torch.tensor(sorted(sampling.end_token_ids), dtype=torch.int64, device=model.device)
    rows = torch.arange(len(questions), device=model.device)  # [R] which questions are still running
    input_ids, attention_mask = _left_padded(questions, model.device)
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    arguments: dict[str, Any] = {_cache_argument(model): cache, "use_cache": True, "logits_to_keep": 1}
    for step in range(sampling.max_new_tokens):
        with decoding_kernels():
            output = model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **arguments)
        tokens = _choose(output.logits[:, -1], sampling.temperature, uniforms[rows, step])
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            if token == _NOT_FINITE:
                raise DataError(
                    f"the target's logits are not finite for {questions[row].sample_id!r}: check its weights and --target.dtype"
                )
            answers[row].append(token)
        on_token(len(rows))
        running = (~torch.isin(tokens, ends)).nonzero()[:, 0]
        if len(running) == 0:
            break
        if len(running) < len(rows):
            cache.reorder_cache(running)  # made for beam search; a shorter index drops the other rows
            rows, tokens, attention_mask, position_ids = (x[running] for x in (rows, tokens, attention_mask, position_ids))
        input_ids = tokens[:, None]
        attention_mask = torch.cat([attention_mask, attention_mask.new_ones(len(rows), 1)], dim=1)
        position_ids = position_ids[:, -1:] + 1
    return answers


def _left_padded(questions: Sequence[Question], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both [R, P] int64; what stands in the padding is never seen."""
    width = max(len(question.ids) for question in questions)
    ids = np.zeros((len(questions), width), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, question in enumerate(questions):
        ids[row, width - len(question.ids) :] = question.ids
        mask[row, width - len(question.ids) :] = 1
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)


def _choose(logits: Tensor, temperature: float, uniforms: Tensor) -> Tensor:
    """Next tokens [R] int64 from logits [R, V] and uniforms [R] float64 in [0, 1); `_NOT_FINITE` where a logit is."""
    if temperature == 0:
        tokens = logits.argmax(-1)
    else:
        distribution = (logits.double() / temperature).softmax(-1).cumsum(-1)
        drawn = uniforms[:, None] * distribution[:, -1:]
        tokens = torch.searchsorted(distribution, drawn, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return tokens.where(logits.isfinite().all(-1), _NOT_FINITE)


def _uniforms(sampling: Sampling, sample_id: str) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for every position of an answer [max_new_tokens]."""
    if sampling.temperature == 0:
        return np.zeros(sampling.max_new_tokens)
    text = f"{sampling.seed}\0{sample_id}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(text, digest_size=16, person=b"dflash-answers").digest()
    raw = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(sampling.max_new_tokens)
    return np.asarray(raw >> np.uint64(11), dtype=np.float64) * 2.0**-53


def _cache_argument(model: Any) -> str:
    """Name of the KV cache among the arguments of the model's forward; transformers renamed it within version 5."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
