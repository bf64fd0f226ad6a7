"""`prepare`: prompts in, conversations answered by the target out.

A drafter learns to guess what its target writes, so the answers of the training data are written by the target itself, here
or by a server that runs it (`--server`), to prompts rendered by the template and with the thinking mode that will be served.
The tokens of an example are exactly what the target was given and what it wrote; only where a server gives no token ids is
its text tokenized again, and counted. Supervised is what the target wrote, its end token included. Assistant turns inside a
prompt are context: somebody else wrote them.

Nothing is dropped without a trace: skipped prompts, and those that a server did not answer, are counted by reason in
meta.json and listed in skipped.jsonl.

Prompts and answers stand on disk (`dflash.data.shelf`, `dflash.data.journal`), so that memory holds a batch of them, what was
skipped by id and reason, and at the end the ids of all examples.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dflash import events
from dflash.batch import Example
from dflash.command_config import PrepareConfig
from dflash.config import ConfigError, TargetConfig
from dflash.data import chat
from dflash.data.answers import Answer, Unanswered, to_example
from dflash.data.asking import Keep, Tally, ask_all, model_name
from dflash.data.audit import audit
from dflash.data.examples import require_unpublished, write_examples
from dflash.data.generate import Question, Sampling, answer, in_batches
from dflash.data.journal import AnswerJournal
from dflash.data.meta import MARKER_FILE, SPLITS, DataError, PrepareFailed, Split
from dflash.data.progress import GenerationProgress
from dflash.data.prompts import load_prompts
from dflash.data.provenance import Totals, fingerprint, meta_of
from dflash.data.questions import TargetTokens, to_questions
from dflash.data.server import Served
from dflash.data.shelf import PromptShelf
from dflash.device import intra_op_threads, parse_device
from dflash.modeling.target import describe_target, load_target, resolve_mask_token_id, text_config


@dataclass(frozen=True, kw_only=True)
class _Target:
    model: Any  # None: a server runs it
    tokens: TargetTokens


def prepare(config: PrepareConfig) -> dict[str, Any]:
    """Answer the prompts of `config.prompts` and publish the examples as `config.output`; return a JSON-ready summary.

    With `config.audit` the published data is looked at; data that is there already is not prepared again.
    Raises DataError for prompts, templates and disks that cannot be used, ConfigError for settings and targets, PrepareFailed
    when a server is gone.
    """
    if config.audit and (config.output / MARKER_FILE).is_file():
        if config.prompts:
            events.record(
                "notice", text=f"{config.output} is prepared: it is audited as it is, --prompts {config.prompts} is not read"
            )
        return {"output": str(config.output), **_audited(config)}
    if not config.prompts:
        there = f"{config.output} holds no prepared data, and there are " if config.audit else ""
        raise ConfigError(f"{there}no prompts: name a file, a directory, a URL or a data set with --prompts")
    summary = _prepare(config)
    return {**summary, **_audited(config)} if config.audit else summary


def _audited(config: PrepareConfig) -> dict[str, Any]:
    found = audit(config.output, _tokens(config.target, *describe_target(config.target)))
    return {"audit": found, "failed": found["failed"]}


def _prepare(config: PrepareConfig) -> dict[str, Any]:
    started = time.monotonic()
    require_unpublished(config.output)
    loaded = load_prompts(config)
    prompts, skipped = loaded.prompts, loaded.skipped
    with events.span("prepare.load_target"):
        target = _load(config)
    skipped += to_questions(config, target.tokens, prompts)
    if not prompts.num_questions():
        raise DataError(f"{config.prompts}: every prompt was skipped ({_reasons(skipped)}); nothing was written")
    if config.server is not None:  # answers of one model are not gone on with by another
        config = dataclasses.replace(config, server_model=model_name(config, _served(target)))
    with AnswerJournal(config.output, fingerprint(config, target.tokens)) as journal:
        with intra_op_threads(config.device, config.cpu_threads):
            generation, unanswered = _answer_all(config, target, prompts, journal)
        skipped += [(one.sample_id, f"not answered: {one.reason}") for one in unanswered]
        totals = Totals()
        for answer, given in _answered(prompts, journal):
            totals.add(answer, given=given)
        if not totals.answers:
            raise PrepareFailed(f"no prompt was answered ({_reasons(skipped)}); nothing was written")
        splits: dict[str, Iterator[Example]] = {split: _examples(prompts, journal, split) for split in SPLITS}
        meta = meta_of(config, target.tokens, loaded.field, totals)
        meta = write_examples(config.output, splits, meta, skipped=skipped, unanswered=unanswered)
        journal.remove()
    return {
        "output": str(config.output),
        "target": meta.target,
        "prompt_field": meta.prompt_field,
        "examples": meta.examples,
        "skipped": meta.skipped,
        "replaced_answers": totals.replaced,
        "truncated_answers": meta.truncated_answers,
        "one_token_answers": totals.one_token,
        "retokenized_answers": meta.retokenized_answers,
        "answer_tokens": totals.tokens,
        **generation,
        "seconds": time.monotonic() - started,
    }


def _answered(prompts: PromptShelf, journal: AnswerJournal) -> Iterator[tuple[Answer, bool]]:
    """Answers in the order of their prompts, and whether the source had another."""
    for question, given in prompts.questions():
        found = journal.take(question)
        if found is not None:
            yield found, given


def _examples(prompts: PromptShelf, journal: AnswerJournal, split: Split) -> Iterator[Example]:
    for question, _ in prompts.questions(split):
        found = journal.take(question)
        if found is not None:
            yield to_example(question, found)


def _reasons(skipped: Sequence[tuple[str, str]]) -> str:
    return "; ".join(f"{reason}: {count}" for reason, count in Counter(r for _, r in skipped).most_common(5))


def _load(config: PrepareConfig) -> _Target:
    if config.server is None:
        model, tokenizer = load_target(config.target, device=parse_device(config.device))
    else:
        model, tokenizer = describe_target(config.target)
    return _Target(model=None if config.server is not None else model, tokens=_tokens(config.target, model, tokenizer))


def _tokens(target: TargetConfig, model: Any, tokenizer: Any) -> TargetTokens:
    if tokenizer is None:
        raise ConfigError(f"{target.path!r} has no tokenizer: prepare needs a target with tokenizer and chat template")
    chat.chat_template(tokenizer)
    end_token_ids = _end_token_ids(model, tokenizer)
    settings, pad_token_id = text_config(model), tokenizer.pad_token_id
    vocab_size = int(settings.vocab_size)
    return TargetTokens(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        context_tokens=getattr(settings, "max_position_embeddings", None),
        mask_token_id=resolve_mask_token_id(target, tokenizer, vocab_size),
        pad_token_id=end_token_ids[0] if pad_token_id is None else int(pad_token_id),
        end_token_ids=end_token_ids,
    )


def _end_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends an answer, ascending: those of the generation config, the model config and the tokenizer."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), text_config(model), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found |= set(ids) if isinstance(ids, list | tuple) else set() if ids is None else {int(ids)}
    if not found:
        raise ConfigError("the target names no end token: set eos_token_id in its generation_config.json")
    return tuple(sorted(found))


def _answer_all(
    config: PrepareConfig, target: _Target, prompts: PromptShelf, journal: AnswerJournal
) -> tuple[dict[str, Any], list[Unanswered]]:
    """Answer into the journal what is not answered there; how that was done, and what a server did not answer."""
    count = prompts.num_questions()
    resumed = sum(journal.has(question) for question, _ in prompts.questions())
    started = time.monotonic()
    unanswered: list[Unanswered] = []
    served: dict[str, Any] = {}
    with GenerationProgress(count) as progress:
        if resumed:
            progress.note(f"going on: {resumed} of {count} prompts were answered by an earlier go")
            progress.answered(resumed)

        def keep(arrived: Sequence[tuple[Question, Answer]]) -> None:
            journal.append([question for question, _ in arrived], [answer for _, answer in arrived])
            progress.answered(len(arrived))

        if config.server is None:
            missing = (question for question in prompts.longest_first() if not journal.has(question))
            _answer_here(config, target, missing, keep, progress)
        else:
            unanswered, served = _answer_there(config, target, count - resumed, prompts, keep, progress, journal)
    seconds = time.monotonic() - started
    rate = progress.num_tokens / seconds if progress.num_tokens else None
    return {"resumed_answers": resumed, "generated_tokens_per_second": rate, **served}, unanswered


def _answer_here(
    config: PrepareConfig, target: _Target, missing: Iterable[Question], keep: Keep, progress: GenerationProgress
) -> None:
    ends = target.tokens.end_token_ids
    sampling = Sampling(
        max_new_tokens=config.max_new_tokens, end_token_ids=ends, temperature=config.temperature, seed=config.seed
    )
    batches = in_batches(missing, config.batch_size, max_new_tokens=config.max_new_tokens, batch_tokens=config.batch_tokens)
    for batch in batches:
        with events.span("prepare.answer", prompts=len(batch)):
            written = _answer_batch(config, target, batch, sampling, progress)
        keep([(question, Answer.of(ids, ends)) for question, ids in zip(batch, written, strict=True)])


def _answer_there(
    config: PrepareConfig,
    target: _Target,
    num_missing: int,
    prompts: PromptShelf,
    keep: Keep,
    progress: GenerationProgress,
    journal: AnswerJournal,
) -> tuple[list[Unanswered], dict[str, Any]]:
    """Ask the server; raises PrepareFailed when it is gone or leaves too much unanswered."""
    tally = Tally()

    def kept(arrived: Sequence[tuple[Question, Answer]]) -> None:
        progress.tokens(sum(len(answer.ids) for _, answer in arrived))
        keep(arrived)

    if num_missing:
        missing = (question for question, _ in prompts.questions() if not journal.has(question))
        try:
            ask_all(config, _served(target), missing, prompts, kept, tally)
        finally:
            listing = journal.list_unanswered(tally.unanswered)
        allowed = config.server_max_unanswered * num_missing
        if len(tally.unanswered) > allowed:
            reasons = _reasons([(one.sample_id, one.reason) for one in tally.unanswered])
            raise PrepareFailed(
                f"{len(tally.unanswered)} of {num_missing} questions were not answered ({reasons}), listed in {listing}; "
                f"nothing was published, because --server-max-unanswered is {config.server_max_unanswered:g}"
            )
    served_by = {"server": config.server, "server_requests": tally.requests, "server_retries": dict(tally.retries)}
    return tally.unanswered, {**served_by, "unanswered": len(tally.unanswered)}


def _served(target: _Target) -> Served:
    tokens = target.tokens
    return Served(tokenizer=tokens.tokenizer, vocab_size=tokens.vocab_size, end_token_ids=tokens.end_token_ids)


def _answer_batch(
    config: PrepareConfig, target: _Target, batch: Sequence[Question], sampling: Sampling, progress: GenerationProgress
) -> list[list[int]]:
    try:
        return answer(target.model, batch, sampling, on_token=progress.tokens)
    except torch.OutOfMemoryError as error:
        longest = max(len(question.ids) for question in batch)
        raise ConfigError(
            f"out of memory on {config.device} with {len(batch)} prompts of up to {longest} tokens and {config.max_new_tokens} "
            f"new ones: use a --batch-size below {config.batch_size} or a bound --batch-tokens; the same command goes on there"
        ) from error
