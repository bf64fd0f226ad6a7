"""Prompts in the target's tokens, and which of them cannot be asked.

A prompt is refused, with a reason that is counted and listed, when the template refuses it, when it is too long for the limit
or for the target's context, or when its text holds a special token of the target: such text was rendered by some template
before, and the tokenizer would take its markup for the real one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from dflash.command_config import PrepareConfig
from dflash.data import chat
from dflash.data.layouts import texts
from dflash.data.meta import DataError
from dflash.data.shelf import Prompt, PromptShelf

PROBE_ANSWER = "ok"  # finishes a conversation, to see whether the template keeps the prompt law


@dataclass(frozen=True, kw_only=True)
class TargetTokens:
    """What the target's tokens mean. Filled by `prepare`."""

    tokenizer: Any
    vocab_size: int
    context_tokens: int | None  # None: the target names no limit
    mask_token_id: int
    pad_token_id: int
    end_token_ids: tuple[int, ...]


def to_questions(config: PrepareConfig, target: TargetTokens, prompts: PromptShelf) -> list[tuple[str, str]]:
    """Put the tokens of all prompts that can be asked on the shelf; (sample id, reason) of the others.

    Raises DataError when the template cannot be trained on.
    """
    refused: list[tuple[str, str]] = []
    special = special_tokens(target.tokenizer)
    for prompt in prompts:
        try:
            require_plain(prompt.messages, special)
            ids = _prompt_ids(config, target, prompt)
        except chat.PromptError as error:
            refused.append((prompt.sample_id, str(error)))
            continue
        context = target.context_tokens
        if len(ids) > config.max_prompt_tokens:
            refused.append((prompt.sample_id, f"more than {config.max_prompt_tokens} tokens"))
        elif context is not None and len(ids) + config.max_new_tokens > context:
            refused.append((prompt.sample_id, f"no room for {config.max_new_tokens} more tokens in the target's {context}"))
        else:
            prompts.put_question(prompt.sample_id, ids)
    return refused


def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Texts that the tokenizer takes for special tokens wherever they stand."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return tuple(sorted(token.content for token in added.values() if token.special and token.content.strip()))


def require_plain(messages: Sequence[chat.Message], special: Collection[str]) -> None:
    """Raise PromptError when some text holds a special token."""
    for text in texts(messages):
        found = next((token for token in special if token in text), None)
        if found is not None:
            raise chat.PromptError(f"the text holds the special token {found}: it was rendered by a template before")


def _prompt_ids(config: PrepareConfig, target: TargetTokens, prompt: Prompt) -> list[int]:
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
