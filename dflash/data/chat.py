"""Conversations to tokens, and which of these tokens are the assistant's.

The law that everything rests on: what the target is given when it is asked (the render with a generation prompt) is a
prefix of the render of the finished conversation, in text and in tokens. Then the assistant's tokens of a turn are those
after that prefix, up to and including the end token; what a template writes after the end token (a newline, say) nobody
generates, and it is not supervised.

For the last turn this law is always checked. For earlier turns a template with `{% generation %}` says itself which
tokens are the assistant's; without it they are derived from the same law, turn by turn. A template that rewrites earlier
turns (many drop the reasoning) breaks the law there, and is refused rather than guessed at: supervise the last turn only.

Known limit: needs a fast tokenizer, which can say which characters a token covers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jinja2
import numpy as np
import numpy.typing as npt

from dflash.data.meta import DataError

Message = dict[str, Any]  # role and content, both text; tool_calls, tool_call_id, name, reasoning_content where there are any
Tools = Sequence[dict[str, Any]]  # descriptions of functions, which the template renders

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class PromptError(DataError):
    """One prompt that cannot be used, while others may be: it is skipped, counted and listed."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A finished conversation as the target sees it."""

    ids: npt.NDArray[np.int32]  # [tokens]
    loss_mask: npt.NDArray[np.bool_]  # [tokens], True exactly on the supervised turns' tokens
    prompt_tokens: int  # tokens that were given before the last answer


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    text: str
    ids: list[int]
    spans: list[tuple[int, int]]  # characters that each token covers


def chat_template(tokenizer: Any) -> str:
    """The tokenizer's chat template. Raises DataError when it has none."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise DataError("the target's tokenizer has no chat template: add a chat_template.jinja file to the target's directory")
    return str(template)


def template_sha256(tokenizer: Any) -> str:
    """Digest of the chat template: data belongs to the template that it was rendered with."""
    return hashlib.sha256(chat_template(tokenizer).encode()).hexdigest()


def render_prompt(tokenizer: Any, messages: Sequence[Message], *, enable_thinking: bool = False, tools: Tools = ()) -> list[int]:
    """Tokens that the target is given when it is asked to answer `messages`.

    Raises PromptError when the template refuses the messages.
    """
    text = _render_text(tokenizer, messages, tools, enable_thinking=enable_thinking, generation_prompt=True)
    return _tokenize(tokenizer, text).ids


def generation_prompt(tokenizer: Any, *, enable_thinking: bool = False) -> list[int]:
    """Tokens that the template writes after the last message to ask for an answer; empty where it changes earlier ones.

    Raises PromptError when the template refuses a single user message.
    """
    messages = [{"role": "user", "content": "x"}]
    told = _tokenize(tokenizer, _render_text(tokenizer, messages, (), enable_thinking=enable_thinking)).ids
    asked = render_prompt(tokenizer, messages, enable_thinking=enable_thinking)
    return asked[len(told) :] if asked[: len(told)] == told else []


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    answer: str | Message,
    *,
    end_token_ids: Collection[int],
    enable_thinking: bool = False,
    supervise: Literal["all", "last"] = "all",
    tools: Tools = (),
) -> Rendered:
    """Render `messages` with `answer` as the assistant's last turn; supervise every assistant turn, or only the last.

    Raises PromptError when the template refuses the messages, DataError when it breaks the prefix law (module docstring).
    """
    last = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
    conversation = [*messages, last]
    full = _tokenize(tokenizer, _render_text(tokenizer, conversation, tools, enable_thinking=enable_thinking))
    turns = [i for i, message in enumerate(conversation) if message["role"] == "assistant"]
    marked = supervise == "all" and _GENERATION_BLOCK.search(chat_template(tokenizer)) is not None
    if marked or supervise == "last":
        turns = turns[-1:]
    first = 0
    loss_mask = np.zeros(len(full.ids), dtype=np.bool_)
    for turn in turns:
        first, stop = _turn_tokens(
            tokenizer, conversation, turn, full, end_token_ids, enable_thinking=enable_thinking, tools=tools
        )
        loss_mask[first:stop] = True
    if marked:
        spans = _marked_by_template(tokenizer, conversation, full, end_token_ids, enable_thinking=enable_thinking, tools=tools)
        for start, stop in spans:
            if stop < first:  # a block that reaches `first` belongs to the last turn, which is known already
                loss_mask[start:stop] = True
    return Rendered(ids=np.array(full.ids, dtype=np.int32), loss_mask=loss_mask, prompt_tokens=first)


def _render_text(
    tokenizer: Any, messages: Sequence[Message], tools: Tools, *, enable_thinking: bool, generation_prompt: bool = False
) -> str:
    chat_template(tokenizer)
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            enable_thinking=enable_thinking,
        )
    except jinja2.TemplateError as error:
        raise PromptError(f"the chat template refuses it: {error}") from error
    return str(text)


def _tokenize(tokenizer: Any, text: str) -> _Tokens:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return _Tokens(text=text, ids=list(encoded["input_ids"]), spans=[tuple(span) for span in encoded["offset_mapping"]])


def _turn_tokens(
    tokenizer: Any,
    conversation: Sequence[Message],
    turn: int,
    full: _Tokens,
    end_token_ids: Collection[int],
    *,
    enable_thinking: bool,
    tools: Tools,
) -> tuple[int, int]:
    """First and one past the last token that the assistant generates in `turn`."""
    asked = _render_text(tokenizer, conversation[:turn], tools, enable_thinking=enable_thinking, generation_prompt=True)
    prompt_ids = _tokenize(tokenizer, asked).ids
    if not full.text.startswith(asked):
        raise DataError(_rewritten(asked, full.text, turn, last=turn == len(conversation) - 1))
    first = len(prompt_ids)
    if full.ids[:first] != prompt_ids:
        raise DataError(
            f"turn {turn}: the tokens of the prompt are not the first tokens of the conversation, because a token reaches over "
            "the end of the generation prompt: end the template's generation prompt with a special token or a newline"
        )
    if turn == len(conversation) - 1:
        end = len(full.text)
    else:
        answered = _render_text(tokenizer, conversation[: turn + 1], tools, enable_thinking=enable_thinking)
        if not full.text.startswith(answered):
            raise DataError(_rewritten(answered, full.text, turn, last=False))
        end = len(answered)
    stop = first
    while stop < len(full.ids) and full.spans[stop][1] <= end:
        stop += 1
    is_end = np.isin(full.ids, list(end_token_ids))
    return first, _after_end_token(is_end, first, stop)


def _rewritten(rendered: str, full: str, turn: int, *, last: bool) -> str:
    same = next((i for i, (a, b) in enumerate(zip(rendered, full, strict=False)) if a != b), min(len(rendered), len(full)))
    what = "what the target is asked is not how the finished conversation begins" if last else "it rewrites earlier turns"
    edit = "use the template that the target is served with, " + ("fixed" if last else "or supervise the last turn only")
    return (
        f"the chat template cannot be trained on: {what} (turn {turn}, character {same}: "
        f"{rendered[same : same + 40]!r} became {full[same : same + 40]!r}); {edit}"
    )


def _marked_by_template(
    tokenizer: Any,
    conversation: Sequence[Message],
    full: _Tokens,
    end_token_ids: Collection[int],
    *,
    enable_thinking: bool,
    tools: Tools,
) -> list[tuple[int, int]]:
    """First and one past the last token of every `{% generation %}` block; a block that has an end token ends with it."""
    encoded = tokenizer.apply_chat_template(
        list(conversation),
        tools=list(tools) or None,
        return_dict=True,
        return_assistant_tokens_mask=True,
        enable_thinking=enable_thinking,
    )
    if list(encoded["input_ids"]) != full.ids:
        raise DataError("the chat template renders differently each time: remove dates and random choices from it")
    mask = np.array(encoded["assistant_masks"], dtype=np.bool_)
    is_end = np.isin(full.ids, list(end_token_ids))
    for i in range(1, len(mask)):
        # A character of several bytes is several tokens, of which tokenizers before 0.23 find only the first.
        same_character = full.spans[i] == full.spans[i - 1]
        if mask[i - 1] and (same_character or (is_end[i] and not is_end[i - 1])):
            mask[i] = True
    return [(start, _after_end_token(is_end, start, stop)) for start, stop in _runs(mask)]


def _after_end_token(is_end: npt.NDArray[np.bool_], start: int, stop: int) -> int:
    """One past the last end token within [start, stop), or `stop` when there is none."""
    ends = np.flatnonzero(is_end[start:stop])
    return start + int(ends[-1]) + 1 if len(ends) else stop


def _runs(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """First and one past the last index of every run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
