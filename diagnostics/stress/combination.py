"""One run of the stress command as plain values, and what must hold of its result. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
import shlex
from dataclasses import dataclass
from typing import Any


class Refused(ValueError):
    """A combination that cannot run; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Combination:
    """What one child process does. With the same seed each thread does the same in the same order, but not at the same time."""

    policy: str
    threads: int
    seconds: float
    seed: int
    backends: tuple[str, ...]
    device: str  # cpu or cuda
    actions: tuple[str, ...] = ()  # only these; empty: all that the policy allows

    def to_json(self) -> str:
        """As one line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Combination:
        """Read back what `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, "backends": tuple(values["backends"]), "actions": tuple(values["actions"])})

    def replay_command(self) -> str:
        """The command that runs this combination alone."""
        command = ["python", "-m", "diagnostics.stress", "--policy", self.policy, "--threads", str(self.threads)]
        command += ["--seconds", f"{self.seconds:g}", "--seed", str(self.seed)]
        command += ["--backends", ",".join(self.backends), "--device", self.device]
        if self.actions:
            command += ["--actions", ",".join(self.actions)]
        return shlex.join(command)


def unclean(result: dict[str, Any], *, hazards_allowed: bool = False) -> list[str]:
    """Why a run that must be clean is not."""
    if "failure" in result:
        return [result["failure"]]
    found = [f"{count} times {name}" for name, count in result["errors"].items()]
    found += [f"{count} wrong results of {name}" for name, count in result["wrong_results"].items()]
    found += [
        f"{finding['severity']} {finding['id']}: {finding['what']}"
        for finding in result["findings"]
        if finding["severity"] == "error" or not hazards_allowed
    ]
    found += [f"left behind: {leak.partition('. ')[0]}" for leak in result["leaks"]]
    if result["wrong_afterwards"]:
        names = ", ".join(result["wrong_afterwards"])
        found.append(f"wrong afterwards, in one thread: {len(result['wrong_afterwards'])} of {result['afterwards']} ({names})")
    if result["compiles_by_threads"] and not hazards_allowed:
        found.append(f"{result['compiles_by_threads']} compiles after the warm-up")
    if not result["actions"]:
        found.append("the threads did nothing")
    return found


def failure_of_leak(sentence: str) -> str:
    """The failure of the catalogue that a sentence of `dflash.fx.seams.leaks` belongs to."""
    return next((failure for failure in ("F5", "F6") if f"({failure})" in sentence), "compiling flag")
