"""What is known of the failures of compiled training on several GPUs: by which words each is recognised, and what to do.

A `Mark` is text that PyTorch, Triton, NCCL, CUDA, the driver or the kernel prints. Blanks do not count when it is looked for,
because terminals wrap lines. `sure` says how sure the *kind* is: certain where nothing else prints these words, likely or
possible where something else can. Why a failure came about is said only as far as the log shows it.
The kinds are in kinds_threads.py (tracing, compiling), kinds_gpu.py (GPUs, driver, ranks), kinds_machine.py (the rest).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Sure = Literal["certain", "likely", "possible"]
Severity = Literal["error", "hazard", "info"]


@dataclass(frozen=True)
class Mark:
    """Words to look for; `pattern` must match them too, `stack` a line "file:function" of the traceback."""

    text: str
    pattern: str = ""
    stack: str = ""
    sure: Sure = "certain"

    @property
    def squeezed(self) -> str:
        """The words without blanks."""
        return re.sub(r"\s", "", self.text)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of failure. `follows`: it is usually the consequence of another one, in this process or in another rank."""

    id: str
    title: str
    marks: tuple[Mark, ...]
    means: str
    to_do: str
    no_help: str
    severity: Severity = "error"
    follows: bool = False


UNKNOWN = Kind(
    id="unknown",
    title="an error that is not in this list",
    marks=(),
    means="Nothing is known of it here. The traceback says where it was raised; why is not guessed.",
    to_do="Read the innermost lines of the program below; look for the first error of the log, which is often another one.",
    no_help="Retrying without having read it.",
)
