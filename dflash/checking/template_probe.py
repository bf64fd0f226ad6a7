"""Is the text that was trained on the text that will be served? The tokenizer's chat template against the prepared data.

A drafter learns the target's answers to prompts as the training data renders them. Served with another template or thinking
mode, the same target writes other text, and acceptance falls with nothing to see in the loss. What is compared are tokens:
every prepared prompt with what the template writes now, where the prompts can be read again, else its last tokens with the
template's generation prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dflash.batch import Example
from dflash.checking.settings import Check, judged, unobserved
from dflash.checking.subject import Subject
from dflash.data import chat
from dflash.data.audit import prompt_of, prompts_config
from dflash.data.examples import DataError, Meta, load_examples
from dflash.data.meta import SPLITS
from dflash.data.prompts import load_prompts

EXAMPLES = 64  # looked at
MOST_SUPERVISED = 0.98  # a larger share means that prompts are trained on as well
_CONVERSATION = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4."},
    {"role": "user", "content": "And 3 + 3?"},
]
_FIX = "prepare the data again with the template and thinking mode that will be served, then train again"


def probe(subject: Subject) -> Iterator[Check]:
    """The template's own law, then template, thinking mode and supervision of the data."""
    names = ("template.same", "template.render", "template.thinking", "template.supervision")
    tokenizer = subject.tokenizer
    if tokenizer is None:
        why = "the target has no tokenizer" if subject.model is not None else "no target: neither given nor recorded"
        yield unobserved("template.prefix", why)
        yield from (unobserved(name, why) for name in names)
        return
    try:
        chat.chat_template(tokenizer)
    except DataError as error:
        yield unobserved("template.prefix", str(error))
        yield from (unobserved(name, "the tokenizer has no chat template") for name in names)
        return
    yield _prefix(tokenizer, thinking=_served(subject))
    if subject.meta is None or subject.data is None:
        yield from (unobserved(name, subject.no_data, "give --data") for name in names)
        return
    examples = [example for split in SPLITS for example in load_examples(subject.data, split)[: EXAMPLES // 2]]
    yield _same(tokenizer, subject.meta)
    yield _render(subject, subject.meta, examples)
    yield _thinking(subject, subject.meta, examples)
    yield _supervision(tokenizer, subject.meta, examples)


def _served(subject: Subject) -> bool:
    """Whether thinking will be on: as asked, else as the data says."""
    if subject.config.thinking is not None:
        return subject.config.thinking == "on"
    return subject.meta is not None and subject.meta.enable_thinking


def _prefix(tokenizer: Any, *, thinking: bool) -> Check:
    """What the target is asked must be how the finished conversation begins, in tokens."""
    ends = {tokenizer.eos_token_id} - {None}
    try:
        done = chat.render(
            tokenizer, _CONVERSATION, "6.", end_token_ids=ends, enable_thinking=thinking, supervise="last"
        )  # raises where the law is broken
    except DataError as error:
        return judged("template.prefix", good=False, found=str(error), fix="use a template whose prompt is not rewritten later")
    found = f"the {done.prompt_tokens} tokens of a prompt are the first of the finished conversation"
    return judged("template.prefix", good=True, found=found, fix="")


def _same(tokenizer: Any, meta: Meta) -> Check:
    if not meta.chat_template_sha256:
        return unobserved("template.same", "the data does not say which template it was rendered with")
    now = chat.template_sha256(tokenizer)
    good = now == meta.chat_template_sha256
    found = f"template {now[:12]} in the tokenizer, {meta.chat_template_sha256[:12]} in the data"
    return judged("template.same", good, found, _FIX)


def _render(subject: Subject, meta: Meta, examples: list[Example]) -> Check:
    """Prompts of the data, in tokens, against what the template writes for them in the mode the data claims."""
    if Path(meta.prompts).is_file():
        return _rendered_again(subject, meta, examples)
    endings = [chat.generation_prompt(subject.tokenizer, enable_thinking=mode) for mode in (False, True)]
    if not all(endings):
        return unobserved("template.render", f"{meta.prompts} cannot be read again, and the template has no fixed ending")
    other = [example.sample_id for example in examples if not any(_ends_with(prompt_of(example), ending) for ending in endings)]
    found = f"{len(examples) - len(other)} of {len(examples)} prompts end as the template asks for an answer"
    found += f", for example not {other[0]}" if other else f"; {meta.prompts or 'the prompts'} cannot be read again"
    return judged("template.render", not other, found, _FIX)


def _rendered_again(subject: Subject, meta: Meta, examples: list[Example]) -> Check:
    loaded = load_prompts(prompts_config(meta))
    known = [(example, asked) for example in examples if (asked := loaded.prompts.get(example.sample_id)) is not None]
    if not known:
        return unobserved("template.render", f"{meta.prompts} holds none of the data's prompts")
    different = []
    for example, asked in known:
        now = chat.render_prompt(subject.tokenizer, asked.messages, enable_thinking=meta.enable_thinking, tools=asked.tools)
        if now != prompt_of(example):
            different.append(example.sample_id)
    found = f"{len(known) - len(different)} of {len(known)} prompts of {meta.prompts} render to the data's tokens again"
    found += f", for example not {different[0]}" if different else ""
    return judged("template.render", not different, found, _FIX)


def _thinking(subject: Subject, meta: Meta, examples: list[Example]) -> Check:
    """The mode that will be served against the mode that the prompts were rendered with."""
    name, served = "template.thinking", _served(subject)
    on, off = (chat.generation_prompt(subject.tokenizer, enable_thinking=mode) for mode in (True, False))
    if on == off:
        return judged(name, good=True, found="the template asks for an answer alike in both thinking modes", fix="")
    mine, other = (on, off) if served else (off, on)
    longer_is_other = len(other) > len(mine)  # one ending may be the end of the other: the longer one decides
    wrong = 0
    for example in examples:
        is_mine, is_other = (_ends_with(prompt_of(example), ending) for ending in (mine, other))
        wrong += is_other and (longer_is_other or not is_mine)
    word = {True: "on", False: "off"}
    found = f"{wrong} of {len(examples)} prompts were rendered with thinking {word[not served]}, served is {word[served]}"
    if wrong == 0 and meta.enable_thinking != served:
        found = f"the data says thinking {word[meta.enable_thinking]}, served is {word[served]}"
    return judged(name, not wrong and meta.enable_thinking == served, found, f"serve with the mode of the data, or {_FIX}")


def _supervision(tokenizer: Any, meta: Meta, examples: list[Example]) -> Check:
    total, supervised = sum(len(e.ids) for e in examples), sum(int(e.loss_mask.sum()) for e in examples)
    share = supervised / total if total else 0.0
    unfinished = sum(not np.isin(e.ids[e.loss_mask][-1:], meta.eos_token_ids).any() for e in examples)
    problems = []
    if not 0 < share <= MOST_SUPERVISED:
        problems.append(f"expected more than 0 and at most {100 * MOST_SUPERVISED:.0f} %: answers only")
    if unfinished > meta.truncated_answers:
        problems.append(f"{unfinished} answers do not end with an end token, {meta.truncated_answers} were cut")
    found = f"{100 * share:.1f} % of {total} tokens in {len(examples)} examples are supervised"
    first = next((e for e in examples if e.loss_mask.any()), None)
    if first is not None:
        answer = first.ids[first.loss_mask].tolist()
        found += f", from {tokenizer.decode(answer[:4])!r} to {tokenizer.decode(answer[-2:])!r} in the first"
    return judged("template.supervision", not problems, "; ".join([found, *problems]), "supervise what the target wrote, only")


def _ends_with(ids: list[int], ending: list[int]) -> bool:
    return ids[len(ids) - len(ending) :] == ending if len(ids) >= len(ending) else False
