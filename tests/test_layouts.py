"""Laws of recognising prompts among the columns of a data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers_data import write_jsonl

from dflash.command_config import PrepareConfig
from dflash.data.layouts import read_conversation
from dflash.data.meta import DataError
from dflash.data.prompts import PromptList, load_prompts

ASKED = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "1"}, {"role": "user", "content": "Two?"}]
GIVEN = [{"role": "assistant", "content": "2"}]
SHAREGPT = [{"from": who, "value": text} for who, text in (("human", "One?"), ("gpt", "1"), ("human", "Two?"), ("gpt", "2"))]


def load(directory: Path, rows: list[Any], **changes: Any) -> PromptList:
    source = str(write_jsonl(directory / "prompts.jsonl", rows))
    return load_prompts(PrepareConfig(prompts=source, output=directory / "out", **changes))


@pytest.mark.parametrize(
    "row",
    [
        {"messages": ASKED + GIVEN},
        {"messages": [{**message, "tool_calls": None, "name": None} for message in ASKED + GIVEN]},
        {"messages": [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in ASKED + GIVEN]},
        {"conversations": SHAREGPT},
        {"conversation": SHAREGPT, "model": "x"},
        {"conversations": ASKED + GIVEN},
        {"prompt": ASKED, "response": "2"},
        {"prompt": ASKED, "completion": GIVEN},
    ],
)
def test_one_conversation_is_the_same_in_every_layout(tmp_path: Path, row: dict[str, Any]) -> None:
    loaded = load(tmp_path, [row])
    (prompt,) = loaded.prompts
    assert list(prompt.messages) == ASKED
    assert list(prompt.given) == GIVEN
    assert loaded.field in row
    assert prompt.sample_id == next(iter(load(tmp_path, [{"prompt": ASKED}]).prompts)).sample_id


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"prompt": "a", "response": "b"}, "a", "b"),
        ({"question": "a", "answer": "b"}, "a", "b"),
        ({"query": "a", "completion": "b"}, "a", "b"),
        ({"instruction": "a", "input": "b", "output": "c"}, "a\n\nb", "c"),
        ({"instruction": "a", "input": "", "output": "c"}, "a", "c"),
    ],
)
def test_a_prompt_and_its_response_are_told_apart(tmp_path: Path, row: dict[str, Any], prompt: str, answer: str) -> None:
    (found,) = load(tmp_path, [row]).prompts
    assert [message["content"] for message in (*found.messages, *found.given)] == [prompt, answer]


def test_a_system_column_comes_first_unless_the_conversation_has_one(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Short."}
    rows = [{"conversations": SHAREGPT, "system": "Short."}, {"conversations": [system, *ASKED[:1]], "system": "Long."}]
    assert [list(prompt.messages) for prompt in load(tmp_path, rows).prompts] == [[system, *ASKED], [system, *ASKED[:1]]]


def test_tool_calls_reach_the_template_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": None}}]
    row = {
        "messages": [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_call_id": "1"},
        ],
        "tools": tools,
    }
    read = read_conversation(row, "messages")
    called = {**call, "function": {"name": "add", "arguments": {"a": 1}}}
    assert read.messages[1] == {"role": "assistant", "content": "", "tool_calls": [called]}
    assert read.messages[2]["role"] == "tool"
    assert read.tools == ({"type": "function", "function": {"name": "add"}},)
    assert read_conversation({**row, "tools": '[{"type": "function", "function": {"name": "add"}}]'}, "messages") == read


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"from": "nobody", "value": "a"}], "a turn from 'nobody', which is neither user, assistant, system nor tool"),
        ([{"from": "human", "value": None}], "a message without text role and content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a message with a part that is not text (image_url)"),
        (GIVEN, "messages do not end with a user turn"),
        ([*ASKED, {"role": "system", "content": "x"}], "messages do not end with a user turn"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}], "a tool call without the name of a function"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "a tool call whose arguments are no JSON object",
        ),
        (["a"], "a message without text role and content"),
        ([{"role": "user", "content": "a\ud800"}], "a lone surrogate, which is no text"),
    ],
)
def test_what_is_no_conversation_is_listed_with_the_reason(tmp_path: Path, messages: Any, reason: str) -> None:
    loaded = load(tmp_path, [{"id": "bad", "messages": messages}, {"messages": ASKED}])
    assert loaded.skipped == [("bad", reason)]
    assert len(loaded.prompts) == 1


def test_unknown_columns_are_refused_with_those_found_and_those_expected(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"has the columns label, text; expected one of messages .*name the right one with --prompt"
    ):
        load(tmp_path, [{"text": "a", "label": 1}] * 200)


def test_columns_that_fit_two_layouts_are_refused_until_one_is_named(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "messages": ASKED}]
    with pytest.raises(
        DataError, match="the columns messages and prompt could each hold the prompt: choose one with --prompt-field"
    ):
        load(tmp_path, rows)
    assert list(next(iter(load(tmp_path, rows, prompt_field="messages").prompts)).messages) == ASKED


def test_rows_before_the_first_known_column_are_listed(tmp_path: Path) -> None:
    loaded = load(tmp_path, [{"id": "first", "text": "a"}, {"prompt": "b"}])
    assert loaded.skipped == [("first", "no field 'prompt'")]
    assert len(loaded.prompts) == 1


def test_equal_prompts_are_asked_once_whatever_their_ids(tmp_path: Path) -> None:
    loaded = load(tmp_path, [{"id": "a", "prompt": "same"}, {"id": "b", "prompt": "same"}, {"id": "a", "prompt": "other"}])
    assert [prompt.sample_id for prompt in loaded.prompts] == ["a"]
    assert loaded.skipped == [("b", "repeated prompt"), ("a", "id of another prompt")]


def test_each_turn_of_a_conversation_is_asked_as_a_server_would_be(tmp_path: Path) -> None:
    rows = [{"id": "a", "conversations": SHAREGPT}, {"id": "b", "prompt": "single", "conversations": None}]
    loaded = load(tmp_path, rows[:1], turns="each", heldout_fraction=0.5)
    assert [(p.sample_id, list(p.messages), list(p.given)) for p in loaded.prompts] == [
        ("a#1", ASKED[:1], ASKED[1:2]),
        ("a#2", ASKED, GIVEN),
    ]
    assert [p.sample_id for p in load(tmp_path, rows[1:], turns="each").prompts] == ["b"]
    many = [{"messages": [*ASKED[:2], {"role": "user", "content": str(number)}]} for number in range(30)]
    sides: dict[str, set[str]] = {}
    for prompt in load(tmp_path, many, turns="each", heldout_fraction=0.5).prompts:
        sides.setdefault(prompt.sample_id.partition("#")[0], set()).add(prompt.split)
    assert all(len(side) == 1 for side in sides.values())
    assert {next(iter(side)) for side in sides.values()} == {"train", "heldout"}
