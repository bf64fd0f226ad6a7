"""Answers of the target to many prompts at once: left padding, a KV cache written in place, ended rows leave by the piece.

Greedy decoding takes the arg-max of the raw logits: settings of the model's own generation config, such as a repetition
penalty, are not applied, because speculative decoding reproduces the raw model. Sampling draws each token from a uniform
number that is keyed by (seed, sample id, position in the answer). So an answer does not depend on which other prompts share
its batch, up to rounding: kernels may add in another order for another batch size, which matters for near ties in bfloat16.

Rows that have ended leave when a quarter of them has, because every leaving copies the cache; until then they compute what
nobody reads. On a GPU the tokens are looked at every few forwards only, so that it is not waited for in between.

Legend: R rows of the batch (running or ended), P tokens of the padded prompts, V vocabulary.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dflash.data.meta import DataError
from dflash.modeling.attention import decoding_kernels
from dflash.modeling.growing_cache import growing_cache
from dflash.modeling.padded_attention import padded_attention

LOOK_EVERY = 8  # forwards, on a GPU; on a CPU there is nothing to wait for
_LEAVE_SHARE = 4  # ended rows leave when they are one in four
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


def in_batches(
    questions: Iterable[Question], batch_size: int, *, max_new_tokens: int = 0, batch_tokens: int | None = None
) -> Iterator[list[Question]]:
    """Batches of questions that come longest first: what does not fit into memory fails at once, not at the end.

    A batch has at most `batch_size` rows, and at most `batch_tokens` tokens: rows x (longest prompt + `max_new_tokens`). One
    row that has more is a batch of its own. One batch is in memory.
    """
    waiting = iter(questions)
    for longest in waiting:
        rows = batch_size
        if batch_tokens is not None:
            rows = min(rows, max(1, batch_tokens // (len(longest.ids) + max_new_tokens)))
        yield [longest, *itertools.islice(waiting, rows - 1)]


@torch.inference_mode()
def answer(
    model: Any,
    questions: Sequence[Question],
    sampling: Sampling,
    *,
    on_token: Callable[[int], None] = lambda _tokens: None,
    look_every: int | None = None,
) -> list[list[int]]:
    """Answer one batch; each answer ends with its end token, or has `max_new_tokens` tokens without one.

    The tokens are looked at every `look_every` forwards (None: 1 on a CPU, else `LOOK_EVERY`), and `on_token` is called then
    with the number of those that belong to answers. Raises DataError when the target's logits are not finite.
    """
    look_every = look_every or (1 if model.device.type == "cpu" else LOOK_EVERY)
    answers: list[list[int]] = [[] for _ in questions]
    rows = list(range(len(questions)))  # the question of each row
    ended: set[int] = set()
    end_token_ids = frozenset(sampling.end_token_ids)
    batch = _Batch(model, questions, sampling)
    with padded_attention(model):
        while batch.step < sampling.max_new_tokens:
            written = batch.decode(min(look_every, sampling.max_new_tokens - batch.step))
            before = sum(map(len, answers))
            for row, tokens in zip(rows, written, strict=True):
                if row not in ended and _ends(answers[row], tokens, end_token_ids, questions[row]):
                    ended.add(row)
            on_token(sum(map(len, answers)) - before)
            running = [place for place, row in enumerate(rows) if row not in ended]
            if not running:
                break
            if _LEAVE_SHARE * (len(rows) - len(running)) >= len(rows):
                batch.keep(running)
                rows = [rows[place] for place in running]
    return answers


class _Batch:
    """Rows that are decoded together, on the model's device: cache, mask and the next inputs."""

    def __init__(self, model: Any, questions: Sequence[Question], sampling: Sampling) -> None:
        self.step = 0  # forwards so far
        self._model = model
        self._temperature = sampling.temperature
        uniforms = np.stack([_uniforms(sampling, question.sample_id) for question in questions])
        self._uniforms = torch.from_numpy(uniforms).to(model.device)  # [R, max_new_tokens]
        self._input_ids, prompt_mask = _left_padded(questions, model.device)
        self._position_ids = (prompt_mask.cumsum(-1) - 1).clamp(min=0)
        self._width = prompt_mask.shape[1]
        # [R, P + max_new_tokens], or None: no row is padded, so that everything behind is visible
        padded = len({len(question.ids) for question in questions}) > 1
        answers = prompt_mask.new_ones(len(questions), sampling.max_new_tokens)
        self._mask = torch.cat([prompt_mask, answers], dim=1) if padded else None
        cache = growing_cache(model.config, self._width + sampling.max_new_tokens)
        self._cache = cache
        self._arguments: dict[str, Any] = {_cache_argument(model): cache, "use_cache": True, "logits_to_keep": 1}

    def decode(self, forwards: int) -> list[list[int]]:
        """The next tokens of every row; of a row that ends among them, and of one that has ended, the rest means nothing."""
        return torch.stack([self._forward() for _ in range(forwards)], dim=1).tolist()

    def keep(self, places: Sequence[int]) -> None:
        """Go on with some of the rows."""
        index = torch.tensor(places, device=self._model.device)
        self._cache.reorder_cache(index)  # made for beam search; a shorter index drops the other rows
        self._uniforms, self._input_ids, self._position_ids = (
            x[index] for x in (self._uniforms, self._input_ids, self._position_ids)
        )
        self._mask = None if self._mask is None else self._mask[index]

    def _forward(self) -> Tensor:
        """One token more for each row [R] int64; nothing here waits for the device."""
        mask = None if self._mask is None else self._mask[:, : self._width + self.step]
        with decoding_kernels():
            output = self._model(
                input_ids=self._input_ids, attention_mask=mask, position_ids=self._position_ids, **self._arguments
            )
        tokens = _choose(output.logits[:, -1], self._temperature, self._uniforms[:, self.step])
        self._input_ids = tokens.clamp(min=0)[:, None]
        self._position_ids = self._position_ids[:, -1:] + 1
        self.step += 1
        return tokens


def _ends(answer: list[int], tokens: Sequence[int], ends: Collection[int], question: Question) -> bool:
    """Append `tokens` to the answer, up to an end token; whether there was one."""
    for token in tokens:
        if token == _NOT_FINITE:
            raise DataError(
                f"the target's logits are not finite for {question.sample_id!r}: check its weights and --target.dtype"
            )
        answer.append(token)
        if token in ends:
            return True
    return False


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
    least, most = logits.aminmax(dim=-1)  # a NaN is both
    return tokens.where(least.isfinite() & most.isfinite(), _NOT_FINITE)


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
