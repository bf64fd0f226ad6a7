"""Laws of rendering conversations and of the mask of the assistant's tokens."""

from __future__ import annotations

from typing import Any

import pytest
from helpers_data import (
    END_OUTSIDE_BLOCK,
    NEWLINE_INSIDE_BLOCK,
    REWRITES_EARLIER,
    REWRITES_PROMPT,
    THINKING,
    WITH_GENERATION,
    WITHOUT_GENERATION,
    byte_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from dflash.data.chat import Message, PromptError, Rendered, render, render_prompt, template_sha256
from dflash.data.examples import DataError

USER: list[Message] = [{"role": "user", "content": "Why?"}]
DIALOGUE: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "first#1"},
    {"role": "user", "content": "Two?"},
]
MASKING_TEMPLATES = {
    "generation block": WITH_GENERATION,
    "no generation block": WITHOUT_GENERATION,
    "end token outside the block": END_OUTSIDE_BLOCK,
    "newline inside the block": NEWLINE_INSIDE_BLOCK,
}
TOKENIZERS = {name: byte_tokenizer(template) for name, template in MASKING_TEMPLATES.items()}
END = next(iter(TOKENIZERS.values())).eos_token_id


def supervised(tokenizer: Any, rendered: Rendered) -> list[str]:
    """The text of every run of supervised tokens."""
    runs: list[list[int]] = []
    for i, flag in enumerate(rendered.loss_mask):
        if flag:
            if i == 0 or not rendered.loss_mask[i - 1]:
                runs.append([])
            runs[-1].append(int(rendered.ids[i]))
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("name", MASKING_TEMPLATES)
def test_the_mask_covers_exactly_the_assistants_tokens_with_the_end_token(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    rendered = render(tokenizer, DIALOGUE, "second", end_token_ids={END})
    assert supervised(tokenizer, rendered) == ["first#1<|end|>", "second<|end|>"]


@pytest.mark.parametrize("name", MASKING_TEMPLATES)
def test_only_the_last_turn_may_be_supervised(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    rendered = render(tokenizer, DIALOGUE, "second", end_token_ids={END}, supervise="last")
    assert supervised(tokenizer, rendered) == ["second<|end|>"]


text = st.text(st.characters(codec="utf-8", exclude_characters="<>"), max_size=12)
answers = text.filter(bool)  # a block around nothing marks nothing


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(MASKING_TEMPLATES)), st.lists(st.tuples(text, answers), max_size=3), text, text)
def test_any_text_is_masked_exactly_and_the_prompt_is_a_prefix(
    name: str, before: list[tuple[str, str]], question: str, answer: str
) -> None:
    tokenizer = TOKENIZERS[name]
    messages: list[Message] = []
    for asked, answered in before:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    messages.append({"role": "user", "content": question})
    rendered = render(tokenizer, messages, answer, end_token_ids={END})
    assert supervised(tokenizer, rendered) == [f"{a}<|end|>" for _, a in before] + [f"{answer}<|end|>"]
    prompt = render_prompt(tokenizer, messages)
    assert rendered.ids[: rendered.prompt_tokens].tolist() == prompt
    assert rendered.loss_mask[rendered.prompt_tokens]


@pytest.mark.parametrize("template", [WITH_GENERATION, WITHOUT_GENERATION])
def test_a_template_without_end_token_supervises_the_answer_alone(template: str) -> None:
    tokenizer = byte_tokenizer(template.replace("<|end|>", ""))
    assert supervised(tokenizer, render(tokenizer, USER, "só", end_token_ids={END}))[0].strip("\n") == "só"


def test_a_generation_block_that_ends_in_a_character_of_several_bytes_is_covered_whole() -> None:
    tokenizer = byte_tokenizer(WITH_GENERATION.replace("<|end|>", ""))
    rendered = render(tokenizer, [*USER, {"role": "assistant", "content": "sí é"}, *USER], "x", end_token_ids={END})
    assert supervised(tokenizer, rendered)[0] == "sí é"


def test_the_thinking_mode_reaches_the_template_and_what_the_prompt_gives_is_not_supervised() -> None:
    tokenizer = byte_tokenizer(THINKING)
    quiet = render(tokenizer, USER, "no", end_token_ids={END}, enable_thinking=False)
    loud = render(tokenizer, USER, "no", end_token_ids={END}, enable_thinking=True)
    assert "<think></think>" in tokenizer.decode(quiet.ids[: quiet.prompt_tokens])
    assert "<think>" not in tokenizer.decode(loud.ids)
    assert supervised(tokenizer, quiet) == supervised(tokenizer, loud) == ["no<|end|>"]


def test_tokens_that_the_template_marks_but_the_prompt_gives_are_not_supervised() -> None:
    template = WITH_GENERATION.replace("{% generation %}", "{% generation %}{% if loop.last %}<think></think>{% endif %}")
    template = template.replace(
        "{% if add_generation_prompt %}<|assistant|>\n", "{% if add_generation_prompt %}<|assistant|>\n<think></think>"
    )
    tokenizer = byte_tokenizer(template)
    rendered = render(tokenizer, DIALOGUE, "second", end_token_ids={END})
    assert supervised(tokenizer, rendered) == ["first#1<|end|>", "second<|end|>"]


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_place() -> None:
    tokenizer = byte_tokenizer(REWRITES_EARLIER)
    with pytest.raises(DataError, match=r"rewrites earlier turns \(turn 2, character \d+: 'first#1.*became '1"):
        render(tokenizer, DIALOGUE, "second", end_token_ids={END})


def test_a_template_that_rewrites_earlier_turns_can_still_supervise_the_last() -> None:
    tokenizer = byte_tokenizer(REWRITES_EARLIER)
    rendered = render(tokenizer, DIALOGUE, "second", end_token_ids={END}, supervise="last")
    assert supervised(tokenizer, rendered) == ["second<|end|>"]
    assert rendered.ids[: rendered.prompt_tokens].tolist() == render_prompt(tokenizer, DIALOGUE)


@pytest.mark.parametrize("supervise", ["all", "last"])
def test_a_prompt_that_is_no_prefix_of_the_finished_conversation_is_refused(supervise: Any) -> None:
    tokenizer = byte_tokenizer(REWRITES_PROMPT)
    with pytest.raises(DataError, match=r"what the target is asked is not how the finished conversation begins \(turn 1"):
        render(tokenizer, USER, "because", end_token_ids={END}, supervise=supervise)


def test_a_token_over_the_end_of_the_prompt_is_refused() -> None:
    tokenizer = merging_tokenizer()
    with pytest.raises(DataError, match="a token reaches over the end of the generation prompt"):
        render(tokenizer, USER, "b", end_token_ids={END})
    assert supervised(tokenizer, render(tokenizer, USER, "c", end_token_ids={END})) == ["c<|end|>"]


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Has one token for "ab", and a template whose generation prompt ends with "a"."""
    tokenizer = byte_tokenizer(WITHOUT_GENERATION.replace("<|assistant|>\n", "<|assistant|>a"))
    tokenizer.add_tokens(["ab"])
    return tokenizer


def test_a_template_that_refuses_a_prompt_is_an_error_of_that_prompt() -> None:
    tokenizer = byte_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(PromptError, match="the chat template refuses it: roles must alternate"):
        render_prompt(tokenizer, USER)


def test_a_tokenizer_without_template_is_refused() -> None:
    tokenizer = byte_tokenizer(None)
    with pytest.raises(DataError, match=r"no chat template: add a chat_template\.jinja"):
        render_prompt(tokenizer, USER)


def test_the_digest_tells_templates_apart() -> None:
    digests = {template_sha256(tokenizer) for tokenizer in TOKENIZERS.values()}
    assert len(digests) == len(TOKENIZERS)
    assert template_sha256(byte_tokenizer(WITH_GENERATION)) in digests
