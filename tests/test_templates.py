"""Laws of masks over the templates of real families: what is supervised is what the target writes when it is asked."""

from __future__ import annotations

from typing import Any

import pytest
from helpers_data import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data.chat import Message, render, render_prompt
from dflash.data.examples import DataError

TOOLS = [{"type": "function", "function": {"name": "add"}}]

# In the manner of ChatML; its assistant turns are marked.
PLAIN = (
    "{% for m in messages %}<|{{ m.role if m.role != 'tool' else 'user' }}|>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# In the manner of Qwen3: reasoning is kept in the turns after the last user turn only, thinking off is an empty block that the
# prompt writes, tools stand in the system turn, tool calls in the assistant's.
REASONS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% if tools %}<|system|>{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n"
    "{% set thought = m.reasoning_content if m.reasoning_content else '' %}"
    "{% set said = m.content %}{% if '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought.strip('\\n') }}\n</think>\n\n{% endif %}"
    "{{ said }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}</call>{% endfor %}"
    "<|end|>\n{% elif m.role == 'tool' %}<|user|>\n<result>{{ m.content }}</result><|end|>\n"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# In the manner of Llama 3: a header with two newlines, contents trimmed.
TRIMS = (
    "{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>\n\n{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n\n{% endif %}"
)
# In the manner of Gemma: the system turn is put before the first user turn.
MERGES = (
    "{% set first = messages[0].content + '\\n' if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}<|{{ 'user' if m.role == 'tool' else m.role }}|>\n"
    "{{ first if loop.first else '' }}{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TOKENIZERS = {name: byte_tokenizer(globals()[name]) for name in ("PLAIN", "REASONS", "TRIMS", "MERGES")}
END = TOKENIZERS["PLAIN"].eos_token_id

text = st.text(st.sampled_from("ab é\n#"), min_size=1, max_size=8)
thoughts = st.one_of(st.just(""), text.map(lambda t: f"<think>\n{t}\n</think>\n\n"))
answered = st.tuples(text, thoughts, text, st.booleans())


def conversation(turns: list[tuple[str, str, str, bool]], system: bool) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": "Be brief."}] if system else []
    for asked, thought, said, with_tool in turns:
        messages.append({"role": "user", "content": asked})
        if with_tool:
            call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": "2"})
        messages.append({"role": "assistant", "content": thought + said})
    return messages


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=25, deadline=None)
@given(st.lists(answered, min_size=1, max_size=3), st.booleans(), st.booleans(), st.booleans())
def test_what_is_supervised_is_what_stands_between_the_question_and_the_end_token(
    name: str, turns: list[tuple[str, str, str, bool]], system: bool, thinking: bool, tools: bool
) -> None:
    tokenizer, messages = TOKENIZERS[name], conversation(turns, system)
    keep: dict[str, Any] = {"enable_thinking": thinking, "tools": TOOLS if tools else ()}
    try:
        last = render(tokenizer, messages[:-1], messages[-1], end_token_ids={END}, supervise="last", **keep)
    except DataError:  # thinking is off, and yet the answer thinks: the target was never asked so
        assert name == "REASONS"
        assert not thinking
        assert "<think>" in messages[-1]["content"]
        return
    asked = render_prompt(tokenizer, messages[:-1], **keep)
    assert last.ids[: last.prompt_tokens].tolist() == asked
    written = last.ids[last.loss_mask].tolist()
    assert last.ids[: len(asked) + len(written)].tolist() == asked + written
    assert written[-1] == END
    assert written.count(END) == 1
    thought, said = turns[-1][1], turns[-1][2]
    if name == "REASONS":
        assert tokenizer.decode(written).endswith(said.lstrip("\n") + "<|end|>")
        assert ("<think>" in tokenizer.decode(written)) is thinking
    else:
        whole = thought + said
        assert tokenizer.decode(written) == (whole if name == "PLAIN" else whole.strip()) + "<|end|>"


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=25, deadline=None)
@given(st.lists(answered, min_size=2, max_size=3), st.booleans())
def test_each_supervised_turn_is_an_answer_to_what_was_asked_or_the_conversation_is_refused(
    name: str, turns: list[tuple[str, str, str, bool]], thinking: bool
) -> None:
    tokenizer, messages = TOKENIZERS[name], conversation(turns, system=False)
    positions = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    prompts = [render_prompt(tokenizer, messages[:i], enable_thinking=thinking) for i in positions]
    try:
        rendered = render(tokenizer, messages[:-1], messages[-1], end_token_ids={END}, enable_thinking=thinking)
    except DataError:
        assert name == "REASONS"  # the only one that rewrites: an earlier turn is no answer to its question any more
        return
    ids, mask = rendered.ids.tolist(), rendered.loss_mask.tolist()
    for prompt in prompts:
        assert ids[: len(prompt)] == prompt
    starts = [i for i in range(1, len(ids)) if mask[i] and not mask[i - 1]]
    stops = [i for i in range(len(ids)) if mask[i] and not [*mask, False][i + 1]]
    assert starts == [len(prompt) for prompt in prompts]
    assert [ids[stop] for stop in stops] == [END] * len(prompts)


def test_reasoning_of_earlier_turns_that_the_template_drops_is_refused_for_all_and_fine_for_the_last() -> None:
    tokenizer = TOKENIZERS["REASONS"]
    messages = conversation([("One?", "<think>\nhm\n</think>\n\n", "1", False), ("Two?", "", "2", False)], system=False)
    with pytest.raises(DataError, match="it rewrites earlier turns"):
        render(tokenizer, messages[:-1], messages[-1], end_token_ids={END}, enable_thinking=True)
    last = render(tokenizer, messages[:-1], messages[-1], end_token_ids={END}, enable_thinking=True, supervise="last")
    assert "hm" not in tokenizer.decode(last.ids)
    assert tokenizer.decode(last.ids[last.loss_mask]) == "<think>\n\n</think>\n\n2<|end|>"


def test_tools_and_tool_calls_are_rendered_as_the_template_writes_them() -> None:
    tokenizer = TOKENIZERS["REASONS"]
    messages = conversation([("1+1?", "", "2", True)], system=False)
    done = render(tokenizer, messages[:-1], messages[-1], end_token_ids={END}, supervise="last", tools=TOOLS)
    assert '<|system|>[{"type": "function"' in tokenizer.decode(done.ids)
    called = render(tokenizer, messages[:1], messages[1], end_token_ids={END}, supervise="last", tools=TOOLS)
    assert tokenizer.decode(called.ids[called.loss_mask]) == '<call>add{"a": 1}</call><|end|>'
