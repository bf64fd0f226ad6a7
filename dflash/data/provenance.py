"""What prepared data says of where it comes from, and what must be equal for an unfinished `prepare` to go on."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.command_config import PrepareConfig
from dflash.config import to_dict
from dflash.data import chat
from dflash.data.answers import Answer
from dflash.data.meta import Meta
from dflash.data.questions import TargetTokens

_TOOLS = ("torch", "transformers", "tokenizers", "pyarrow", "numpy")


@dataclass
class Totals:
    """What answers come to; filled one by one."""

    answers: int = 0
    tokens: int = 0
    one_token: int = 0
    retokenized: int = 0
    replaced: int = 0  # where the source had an answer
    finish_reasons: Counter[str] = field(default_factory=Counter)

    def add(self, answer: Answer, *, given: bool) -> None:
        """Count one; `given` says that the source had an answer."""
        self.answers += 1
        self.tokens += len(answer.ids)
        self.one_token += len(answer.ids) == 1
        self.retokenized += not answer.exact
        self.replaced += given
        self.finish_reasons[answer.finish] += 1


def meta_of(config: PrepareConfig, target: TargetTokens, prompt_field: str, totals: Totals) -> Meta:
    """The meta of examples of which these are the totals."""
    return Meta(
        target=config.target.path,
        gguf_file=config.target.gguf_file,
        vocab_size=target.vocab_size,
        mask_token_id=target.mask_token_id,
        pad_token_id=target.pad_token_id,
        eos_token_ids=target.end_token_ids,
        chat_template_sha256=chat.template_sha256(target.tokenizer),
        enable_thinking=config.enable_thinking,
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        prompts=config.prompts,
        prompt_field=prompt_field,
        split=config.split,
        turns=config.turns,
        server=_answered_by(config),
        finish_reasons=dict(totals.finish_reasons.most_common()),
        truncated_answers=totals.finish_reasons["length"],
        retokenized_answers=totals.retokenized,
        versions={tool: importlib.metadata.version(tool) for tool in _TOOLS},
    )


def _answered_by(config: PrepareConfig) -> str | None:
    if config.server is None:
        return None
    words = "" if config.server_extras else ", OpenAI's words only"
    return f"{config.server_model} through {config.server_api}{words}"


def fingerprint(config: PrepareConfig, target: TargetTokens) -> dict[str, Any]:
    """Everything that decides an answer, beside the prompt. Files of a local target are told apart by size and time."""
    directory = Path(config.target.path)
    files = sorted(directory.iterdir()) if directory.is_dir() else []
    return {
        "target": {key: value for key, value in to_dict(config.target).items() if key != "mask_token_id"},
        "target files": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files],
        "chat template": chat.template_sha256(target.tokenizer),
        "end tokens": list(target.end_token_ids),
        "server": _answered_by(config),
        "enable-thinking": config.enable_thinking,
        "temperature": config.temperature,
        "max-new-tokens": config.max_new_tokens,
        "seed": config.seed,
    }
