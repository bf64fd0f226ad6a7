"""`python -m dflash check`: what is asked, and what a check answers. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from dflash.config import ConfigError

Probe = Literal["contract", "leak", "alignment", "parity", "template"]
PROBES: tuple[Probe, ...] = ("contract", "leak", "alignment", "parity", "template")
# What a checkpoint and its target suffice for: without --probes these must have been observed.
ALWAYS_REQUIRED = ("contract.names", "leak.context", "parity.logits")

PASS, FAIL, NOT_OBSERVED = "pass", "fail", "not observed"


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """`python -m dflash check CHECKPOINT`: is this drafter what a server will take it for?"""

    path: tyro.conf.Positional[Path]  # a training run, one of its checkpoints, or an exported folder
    checkpoint: str = "best"  # of a run: "best", "last", or a name such as step-000500
    target: str | None = None  # path of the target, as --target.path of train; None: what the checkpoint's record names
    gguf_file: str | None = None  # with --target: file in it
    data: Path | None = None  # prepared data; None: what the checkpoint's record names
    probes: tuple[Probe, ...] = ()  # only these run, and must observe everything; none: all run, see ALWAYS_REQUIRED
    thinking: Literal["on", "off"] | None = None  # mode that will be served; None: the one the data was prepared with
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] | None = None  # of target and served drafter; None: the record's, else float32
    examples: int = 8  # texts that the alignment and parity probes read
    max_tokens: int = 512  # of each text
    cpu_threads: int = 1  # intra-op threads when the device is a CPU; many are slower than one where other programs run

    def __post_init__(self) -> None:
        if self.examples < 1 or self.max_tokens < 16:
            raise ConfigError(f"examples is {self.examples}, max-tokens {self.max_tokens}: use at least 1 and 16")
        if self.cpu_threads < 1:
            raise ConfigError(f"cpu-threads is {self.cpu_threads}: use at least 1")
        if self.gguf_file is not None and self.target is None:
            raise ConfigError("gguf-file has no meaning without --target: add it")

    @property
    def chosen(self) -> tuple[Probe, ...]:
        """The probes that run."""
        return tuple(probe for probe in PROBES if not self.probes or probe in self.probes)


@dataclass(frozen=True)
class Check:
    """One line of the answer."""

    name: str  # probe.check
    status: str  # PASS, FAIL or NOT_OBSERVED
    found: str  # what was seen; when not observed, why
    fix: str = ""  # what to do about it; empty where nothing is to be done

    @property
    def probe(self) -> str:
        """The probe it belongs to."""
        return self.name.partition(".")[0]


def judged(name: str, good: bool, found: str, fix: str) -> Check:
    """A check that was observed; the fix is only shown when it failed."""
    return Check(name, PASS, found) if good else Check(name, FAIL, found, fix)


def unobserved(name: str, why: str, fix: str = "") -> Check:
    """A check that could not be made."""
    return Check(name, NOT_OBSERVED, why, fix)
