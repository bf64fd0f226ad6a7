"""Which columns hold the prompt: the layouts that data sets of conversations come in, recognised by the names of columns.

    OpenAI messages    messages: [{role, content}], with tool calls and a column `tools`
    ShareGPT           conversations or conversation: [{from, value}], or messages as above
    prompt, response   prompt, question or query, or instruction with input; the response is optional

A prompt ends where the target is to answer: after the last user turn or tool result. Assistant turns behind it are what
somebody else answered; they are set aside. A column `system` is put before a conversation that has no system turn.

Known limits: text only; images and other parts are refused, row by row. A row whose columns fit several layouts is not
guessed at: the source is refused, and --prompt-field decides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from dflash.data.chat import Message, PromptError
from dflash.data.meta import DataError

EXPECTED = (
    "messages (OpenAI: a list of {role, content}), conversations (ShareGPT: a list of {from, value}), "
    "prompt, question, query or instruction (text)"
)
_CONVERSATIONS = ("messages", "conversations", "conversation")
_PROMPTS = ("prompt", "question", "query", "instruction")
_RESPONSES = ("response", "completion", "answer", "output")
_SPEAKERS = {
    "human": "user",
    "observation": "tool",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **{role: role for role in ("user", "assistant", "system", "tool")},
}
_KEPT_KEYS = ("tool_calls", "tool_call_id", "name", "reasoning_content")
LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What the target is asked, and what somebody else answered."""

    messages: tuple[Message, ...]  # ends with a user turn or a tool result
    tools: tuple[dict[str, Any], ...] = ()
    given: tuple[Message, ...] = ()  # assistant turns behind it


def recognise(columns: Collection[str]) -> str | None:
    """The column that holds the prompt, None where no layout is known. Raises DataError when several fit."""
    found = [name for name in (*_CONVERSATIONS, *_PROMPTS) if name in columns]
    if len(found) > 1:
        raise DataError(f"the columns {' and '.join(found)} could each hold the prompt: choose one with --prompt-field")
    return found[0] if found else None


def read_conversation(row: dict[str, Any], field: str) -> Conversation:
    """The conversation whose prompt stands in the column `field`. Raises PromptError when it is none."""
    if field not in row:
        raise PromptError(f"no field {field!r}")
    messages = _messages(_with_input(row, field))
    messages += _response(row, field) if messages else []
    asked = len(messages)
    while asked and messages[asked - 1]["role"] == "assistant":
        asked -= 1
    _require_prompt(messages[:asked], empty=not messages)
    system = row.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
        asked += 1
    if any(LONE_SURROGATE.search(text) for text in texts(messages)):
        raise PromptError("a lone surrogate, which is no text")
    return Conversation(messages=tuple(messages[:asked]), tools=_tools(row), given=tuple(messages[asked:]))


def texts(messages: Iterable[Message]) -> list[str]:
    """All text of some messages, reasoning and tool calls included."""
    found = []
    for message in messages:
        found += [message["content"], message.get("reasoning_content", "")]
        found += [json.dumps(message["tool_calls"], ensure_ascii=False)] if "tool_calls" in message else []
    return found


def _with_input(row: dict[str, Any], field: str) -> Any:
    value, more = row[field], row.get("input")
    if field == "instruction" and isinstance(value, str) and isinstance(more, str) and more.strip():
        return f"{value}\n\n{more}"
    return value


def _response(row: dict[str, Any], field: str) -> list[Message]:
    """The response of another column; only beside a prompt that is no conversation by its name."""
    if field not in _PROMPTS:
        return []
    value = next((row[name] for name in _RESPONSES if row.get(name)), None)
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    return _messages(value) if isinstance(value, list) else []


def _messages(value: Any) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise PromptError(f"prompt is neither text nor messages but {type(value).__name__}")
    return [_message(item) for item in value]


def _message(item: Any) -> Message:
    if not isinstance(item, dict):
        raise PromptError("a message without text role and content")
    if isinstance(item.get("from"), str) and "role" not in item:
        role, content = _SPEAKERS.get(item["from"].lower()), item.get("value")
        if role is None:
            raise PromptError(f"a turn from {item['from']!r}, which is neither user, assistant, system nor tool")
    else:
        role, content = item.get("role"), item.get("content")
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        content = _joined(content)
    if content is None and item.get("tool_calls"):
        content = ""
    if not isinstance(role, str) or not isinstance(content, str):
        raise PromptError("a message without text role and content")
    kept = {key: item[key] for key in _KEPT_KEYS if item.get(key)}
    if "tool_calls" in kept:
        kept["tool_calls"] = [_tool_call(call) for call in kept["tool_calls"]]
    return {"role": role, "content": content, **kept}


def _joined(parts: list[dict[str, Any]]) -> str | None:
    """The text of the parts of a message; None when a text part has none."""
    other = next((part.get("type") for part in parts if part.get("type") != "text"), None)
    if other is not None:
        raise PromptError(f"a message with a part that is not text ({other})")
    pieces = [part.get("text") for part in parts]
    return "".join(str(piece) for piece in pieces) if all(isinstance(piece, str) for piece in pieces) else None


def _tool_call(call: Any) -> dict[str, Any]:
    """A tool call as servers give it to templates: the arguments as an object, not as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise PromptError("a tool call without the name of a function")
    return {**_without_none(call), "function": {"name": function["name"], "arguments": _object(function.get("arguments") or {})}}


def _object(value: Any) -> dict[str, Any]:
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise PromptError("a tool call whose arguments are no JSON object")
    return value


def _tools(row: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    value = row.get("tools")
    try:
        value = json.loads(value) if isinstance(value, str) and value.strip() else value or []
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise PromptError("tools are no list of objects")
    return tuple(_without_none(tool) for tool in value)


def _without_none(value: Any) -> Any:
    """Without the fields that a table fills up with None."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _require_prompt(asked: list[Message], *, empty: bool) -> None:
    if empty:
        raise PromptError("empty prompt")
    if not asked or asked[-1]["role"] not in ("user", "tool"):
        raise PromptError("messages do not end with a user turn")
    if asked[-1]["role"] == "user" and not asked[-1]["content"].strip():
        raise PromptError("empty prompt")
