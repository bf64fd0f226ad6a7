"""The configurations of the commands beside `train`: the fields are their flags, checked where they are built."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from dflash.config import TargetConfig, check_budget, require


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """`python -m dflash prepare`: prompts in, conversations answered by the target out."""

    prompts: str = ""  # file, directory, pattern or URL of JSONL or Parquet; saved data set; hub name (dflash.data.sources)
    output: Path
    audit: bool = False  # look at the prepared data (dflash.data.audit), also when it is there already
    target: TargetConfig = field(default_factory=TargetConfig)
    prompt_field: str | None = None  # column of text or messages; None: recognised by its name (dflash.data.layouts)
    split: str = "train"  # only for data sets
    turns: Literal["last", "each"] = "last"  # each: every user turn of a conversation is answered, after the turns before it
    limit: int | None = None
    max_prompt_tokens: int = 2048  # longer prompts are skipped, counted and listed
    max_new_tokens: int = 1024
    temperature: float = 0.0  # 0: greedy
    batch_size: int = 32  # prompts that are answered together
    batch_tokens: int | None = None  # and at most so many tokens: rows x (longest prompt + max_new_tokens); None: no bound
    heldout_fraction: float = 0.05  # of the prompts, chosen by a hash of the prompt
    enable_thinking: bool = False  # passed to the chat template
    device: str = "cpu"
    cpu_threads: int = 1  # intra-op threads when the device is a CPU; many are slower than one where other programs run
    seed: int = 0
    server: str | None = None  # root of an OpenAI-compatible API that runs the target, http://HOST:8000/v1; None: this process
    server_model: str | None = None  # its name there; None: the only one that the server has
    server_api: Literal["completions", "chat"] = "completions"  # completions: asked in tokens, which no template there can change
    server_extras: bool = True  # ask for token ids and plain sampling in vLLM's and SGLang's words; off: OpenAI's words only
    server_concurrency: int = 32  # requests under way at one time
    server_requests_per_second: float | None = None
    server_timeout_seconds: float = 600.0  # of one request
    server_retries: int = 6  # of one question, after the first try
    server_backoff_seconds: float = 1.0  # before the first retry; doubles each time, at most 60
    server_max_unanswered: float = 0.01  # of the questions; with more nothing is published
    server_key_variable: str | None = None  # name of the environment variable that holds the API key

    def __post_init__(self) -> None:
        self._check_server()
        require(0 <= self.heldout_fraction < 1, f"heldout-fraction is {self.heldout_fraction}: use a number in [0, 1)")
        require(self.limit is None or self.limit >= 1, f"limit is {self.limit}: use at least 1, or leave it out")
        require(self.batch_size >= 1 and self.max_new_tokens >= 1, "batch-size and max-new-tokens must be at least 1")
        require(
            self.batch_tokens is None or self.batch_tokens >= 1,
            f"batch-tokens is {self.batch_tokens}: use at least 1, or leave it out for no bound",
        )
        require(self.cpu_threads >= 1, f"cpu-threads is {self.cpu_threads}: use at least 1")
        require(0 <= self.temperature < math.inf, f"temperature is {self.temperature}: use 0 (greedy) or a positive number")

    def _check_server(self) -> None:
        require(
            self.server is None or re.match(r"https?://[^/]", self.server) is not None,
            f"server is {self.server!r}: use the root of its API, for example http://localhost:8000/v1",
        )
        changed = [
            f.name for f in dataclasses.fields(self) if f.name.startswith("server_") and getattr(self, f.name) != f.default
        ]
        require(
            self.server is not None or not changed,
            f"{''.join(changed[:1]).replace('_', '-')} has no meaning without --server: add it",
        )
        require(self.server_concurrency >= 1, f"server-concurrency is {self.server_concurrency}: use at least 1")
        require(self.server_retries >= 0, f"server-retries is {self.server_retries}: use 0 for none")
        rate = self.server_requests_per_second
        require(rate is None or 0 < rate < math.inf, f"server-requests-per-second is {rate}: use a positive number")
        for name in ("server_timeout_seconds", "server_backoff_seconds"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"{name.replace('_', '-')} is {value}: use a positive number")
        share = self.server_max_unanswered
        require(0 <= share <= 1, f"server-max-unanswered is {share}: use a number in [0, 1]")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """`python -m dflash evaluate RUN`: speculative decoding of held-out prompts."""

    run: tyro.conf.Positional[Path]  # directory of a training run
    checkpoint: str = "best"  # "best", "last", or a name such as step-000000
    data: Path | None = None  # prepared data; None: the run's
    max_prompts: int = 32
    max_new_tokens: int = 256
    temperature: float = 0.0
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] | None = None  # None: the run's target.dtype; float32 shows exact equality
    seed: int = 0
    baseline: bool = True  # also decode plainly, for the wall-clock ratio and the lossless check
    budgets: tuple[int, ...] = ()  # nodes of the draft trees (DDTree) that are tried beside the chain of drafts
    tree_attention: Literal["sdpa", "flex"] = "sdpa"  # by which the target verifies trees; flex is compiled, for GPUs
    batch: int = 1  # prompts that are decoded together
    cpu_threads: int = 1  # intra-op threads when the device is a CPU; many are slower than one where other programs run
    against: Path | None = None  # evaluate-CHECKPOINT.json of another drafter: tells the difference of τ, prompt by prompt

    def __post_init__(self) -> None:
        require(self.max_prompts >= 1 and self.max_new_tokens >= 1, "max-prompts and max-new-tokens must be at least 1")
        require(0 <= self.temperature < math.inf, f"temperature is {self.temperature}: use 0 (greedy) or a positive number")
        require(self.batch >= 1, f"batch is {self.batch}: use at least 1")
        require(self.cpu_threads >= 1, f"cpu-threads is {self.cpu_threads}: use at least 1")
        for budget in self.budgets:
            check_budget(budget)
        require(len(set(self.budgets)) == len(self.budgets), f"budgets are {list(self.budgets)}: name each one once")
        if self.tree_attention == "flex":
            require(bool(self.budgets), "tree-attention is flex, but no tree is decoded: name --budgets")
            require(
                self.device.startswith("cuda"),
                f"tree-attention is flex, which is compiled for GPUs only, and device is {self.device}: "
                f"use --tree-attention sdpa or --device cuda",
            )
