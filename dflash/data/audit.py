"""`prepare --audit`: what is in prepared data, and whether a server would have asked the target in the same tokens.

Most drafters that train well and serve badly were trained on another template, thinking mode or mask than they meet. So this
shows the tokens: how many are supervised, how answers begin and end, how long examples are, where thinking stands; and it
renders the prompts again, as they will be served, and compares token by token. Exit code 1 when something is wrong.

Known limits: without the source of the prompts only the ending of each is compared, with the template's generation prompt;
that an answer is the target's own cannot be seen here (`check` measures it).
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.batch import Example
from dflash.command_config import PrepareConfig
from dflash.data import chat
from dflash.data.examples import iterate_examples, load_meta
from dflash.data.meta import SPLITS, DataError, Meta, Split
from dflash.data.prompts import load_prompts
from dflash.data.questions import TargetTokens
from dflash.data.shelf import PromptShelf

SHOWN = 4  # examples of each split whose first and last tokens are printed
TOKENS_SHOWN = 6
RENDERED_AGAIN = 512  # prompts of each split
_THINK = "<think>"
_LOOKED_AT = 64  # last tokens of a prompt, first of an answer, where a mark of thinking is looked for


@dataclass
class Census:
    """What one pass over the examples of a split counts."""

    examples: int = 0
    tokens: int = 0
    supervised: int = 0
    unsupervised_examples: int = 0
    one_token_answers: int = 0
    cut_answers: int = 0  # no end token
    thinking_answers: int = 0
    thinking_prompts: int = 0  # the prompt itself opens, or opens and closes, the thinking
    mask_tokens: int = 0
    repeated: int = 0  # the tokens of another example
    lengths: Counter[int] = field(default_factory=Counter)  # by the next power of two
    shown: list[dict[str, str]] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)


def audit(path: Path, target: TargetTokens) -> dict[str, Any]:
    """Look at the prepared data in `path` and print what is found to stderr; a JSON-ready summary, with what is wrong.

    Raises DataError when the data cannot be read, or belongs to another vocabulary.
    """
    meta = load_meta(path)
    if meta.vocab_size != target.vocab_size:
        raise DataError(
            f"{path} was prepared for {meta.target!r} with a vocabulary of {meta.vocab_size}, this target has "
            f"{target.vocab_size}: name the right one with --target.path"
        )
    prompts, unread = _prompts(meta)
    result: dict[str, Any] = {"splits": {}, "prompts_read_again": unread is None, "failed": []}
    for split in SPLITS:
        census, serving = _look(path, split, meta, target, prompts)
        if census.examples:
            result["splits"][split] = _summary(census, serving)
            result["failed"] += [f"{split}: {problem}" for problem in _problems(census, serving)]
            _print(split, census, serving, unread)
    template = chat.template_sha256(target.tokenizer)
    if meta.chat_template_sha256 not in ("", template):
        result["failed"].append(f"the data's template is {meta.chat_template_sha256[:12]}, the target's is {template[:12]}")
    for problem in result["failed"]:
        _say(f"WRONG  {problem}")
    return result


@dataclass
class _Serving:
    """Prompts against what a server would send: compared, and which differ."""

    compared: int = 0
    different: list[str] = field(default_factory=list)


def _look(path: Path, split: Split, meta: Meta, target: TargetTokens, prompts: PromptShelf | None) -> tuple[Census, _Serving]:
    census, serving = Census(), _Serving()
    for example in iterate_examples(path, split):
        _count(census, example, meta, target)
        if serving.compared < RENDERED_AGAIN:
            same = _as_served(example, meta, target, prompts)
            if same is not None:
                serving.compared += 1
                serving.different += [] if same else [example.sample_id]
    return census, serving


def _count(census: Census, example: Example, meta: Meta, target: TargetTokens) -> None:
    answer = example.ids[example.loss_mask]
    prompt = prompt_of(example)
    census.examples += 1
    census.tokens += len(example.ids)
    census.supervised += len(answer)
    census.unsupervised_examples += len(answer) == 0
    census.one_token_answers += len(answer) == 1
    census.cut_answers += bool(len(answer)) and int(answer[-1]) not in meta.eos_token_ids
    census.mask_tokens += int((example.ids == meta.mask_token_id).sum())
    census.lengths[1 << (len(example.ids) - 1).bit_length()] += 1
    decode = target.tokenizer.decode
    census.thinking_answers += _THINK in decode(answer[:_LOOKED_AT].tolist())
    census.thinking_prompts += _THINK in decode(prompt[-_LOOKED_AT:])
    digest = hash(example.ids.tobytes())
    census.repeated += digest in census.seen
    census.seen.add(digest)
    if len(census.shown) < SHOWN and len(answer):
        first, last = (decode(part.tolist()) for part in (answer[:TOKENS_SHOWN], answer[-TOKENS_SHOWN:]))
        census.shown.append({"sample_id": example.sample_id, "prompt_ends": decode(prompt[-8:]), "first": first, "last": last})


def prompt_of(example: Example) -> list[int]:
    """The tokens before the first supervised one."""
    count = int(example.loss_mask.argmax()) if example.loss_mask.any() else len(example.ids)
    return [int(token) for token in example.ids[:count]]


def _prompts(meta: Meta) -> tuple[PromptShelf | None, str | None]:
    """The prompts that the data was made from; or why they cannot be read again."""
    try:
        return load_prompts(prompts_config(meta)).prompts, None
    except DataError as error:
        return None, str(error)


def prompts_config(meta: Meta) -> PrepareConfig:
    """The configuration that reads the prompts of prepared data again; what that takes on disk is taken where files may be."""
    aside = Path(tempfile.gettempdir()) / "unused"
    return PrepareConfig(prompts=meta.prompts, prompt_field=meta.prompt_field, split=meta.split, turns=meta.turns, output=aside)


def _as_served(example: Example, meta: Meta, target: TargetTokens, prompts: PromptShelf | None) -> bool | None:
    """Whether the prompt's tokens are those that a server renders; None when that cannot be said."""
    trained, thinking = prompt_of(example), meta.enable_thinking
    if prompts is not None:
        asked = prompts.get(example.sample_id)
        if asked is None:
            return None
        now = chat.render_prompt(target.tokenizer, asked.messages, enable_thinking=thinking, tools=asked.tools)
        return now == trained
    ending = chat.generation_prompt(target.tokenizer, enable_thinking=thinking)
    return trained[len(trained) - len(ending) :] == ending if ending else None


def _problems(census: Census, serving: _Serving) -> Iterable[str]:
    if serving.different:
        count, name = len(serving.different), serving.different[0]
        yield f"{count} of {serving.compared} prompts differ from the serving render, for example {name!r}"
    if census.mask_tokens:
        yield f"the mask token occurs {census.mask_tokens} times in the text: drafting with it means something else there"
    if census.unsupervised_examples:
        yield f"{census.unsupervised_examples} examples have no supervised token"
    if census.supervised == census.tokens:
        yield "every token is supervised: prompts must not be"


def _summary(census: Census, serving: _Serving) -> dict[str, Any]:
    total = census.examples
    return {
        "examples": total,
        "tokens": census.tokens,
        "supervised_share": census.supervised / census.tokens,
        "think_share": census.thinking_answers / total,
        "think_in_prompt_share": census.thinking_prompts / total,
        "cut_answers": census.cut_answers,
        "one_token_answers": census.one_token_answers,
        "repeated_examples": census.repeated,
        "lengths": {str(top): census.lengths[top] for top in sorted(census.lengths)},
        "prefix_exact": {"compared": serving.compared, "different": len(serving.different)},
        "shown": census.shown,
    }


def _print(split: str, census: Census, serving: _Serving, unread: str | None) -> None:
    total = census.examples
    _say(f"{split}: {total:,} examples, {census.tokens:,} tokens, {100 * census.supervised / census.tokens:.1f} % supervised")
    _say(
        f"  {_THINK} in {100 * census.thinking_answers / total:.1f} % of answers and the ends of "
        f"{100 * census.thinking_prompts / total:.1f} % of prompts; {census.cut_answers:,} answers without end token, "
        f"{census.one_token_answers:,} of one token, {census.repeated:,} examples that repeat another"
    )
    for top in sorted(census.lengths):
        count = census.lengths[top]
        _say(f"  {top // 2 + 1 if top > 1 else 1:>8,} to {top:>8,} tokens {count:>10,}  {'#' * round(40 * count / total)}")
    for shown in census.shown:
        _say(f"  {shown['sample_id']}: ...{shown['prompt_ends']!r} | {shown['first']!r} ... {shown['last']!r}")
    alone = f"in their ends what asks for an answer; more cannot be said without the prompts ({unread})"
    how = "what will be served" if unread is None else alone
    same = serving.compared - len(serving.different)
    _say(f"  {same:,} of {serving.compared:,} prompts compared are token for token {how}")


def _say(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201 - the command's report
