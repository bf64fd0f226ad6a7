"""One combination of the stress command in this process, under the probes; its last line of output is its result as JSON.

Every action first runs alone, which gives the reference (and is the warm-up of the policy `prewarm`); then N threads choose
among them; then every action runs alone once more, in the process as the threads left it.
Run it by `python -m diagnostics.stress`, which starts one child for each combination.
"""

from __future__ import annotations

import faulthandler
import json
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dflash.fx import seams
from diagnostics.catalogue import match
from diagnostics.findings import conclude
from diagnostics.observe import observed
from diagnostics.stress import policies
from diagnostics.stress.combination import Combination, Refused
from diagnostics.stress.workload import CASES, Action, Workload, same

_SWITCH_INTERVAL_SECONDS = 1e-5
_MAX_EXAMPLES = 3


@dataclass
class Tally:
    """What all threads did; each adds to it under the lock."""

    actions: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)  # by failure of the catalogue, or by exception
    wrong: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, *, right: bool | None, error: Exception | None) -> None:
        """One action: its result was right, wrong, or it raised."""
        with self.lock:
            self.actions[name] += 1
            if error is not None:
                kind = match(str(error)) or type(error).__name__
                self.errors[kind] += 1
                if len(self.examples) < _MAX_EXAMPLES:
                    self.examples.setdefault(kind, "".join(traceback.format_exception(error)[-3:]))
            elif not right:
                self.wrong[name] += 1


def run(combination: Combination) -> dict[str, Any]:
    """Run one combination; returns its counts as JSON values. Raises Refused when no action is left to do."""
    tally = Tally()
    with policies.around_process(combination.policy), observed() as log:
        actions = _actions(combination)
        _say("reference")
        references = {action.name: [action.run(case) for case in range(CASES)] for action in actions}
        compiles_before = _compiles(log.observations())
        _say("threads")
        with policies.around_threads(combination.policy):
            _run_threads(combination, actions, references, tally)
        compiles_after = _compiles(log.observations())
        leaks = seams.leaks(seams.tracing_state())
        _say("afterwards")
        wrong_afterwards = {name: why for action in actions for name, why in _once_more(action, references[action.name])}
    observations = log.observations()
    return {
        **json.loads(combination.to_json()),
        "torch": torch.__version__,
        "actions": dict(tally.actions),
        "errors": dict(tally.errors),
        "wrong_results": dict(tally.wrong),
        "examples": tally.examples,
        "leaks": leaks,
        "afterwards": len(actions) * CASES,
        "wrong_afterwards": wrong_afterwards,
        "compiles_by_threads": compiles_after - compiles_before,
        "findings": [finding.to_dict() for finding in conclude(observations)],
        "notes": policies.notes(combination.policy),
        "not_observed": [seen.name for seen in observations if seen.kind == "not_observed"],
    }


def main(arguments: Sequence[str]) -> int:
    """Run the combination given as JSON and print its result."""
    if len(arguments) != 1:
        print("start it by: python -m diagnostics.stress", file=sys.stderr)  # noqa: T201 - usage
        return 2
    faulthandler.enable()
    if hasattr(signal, "SIGUSR1"):  # asked for by the parent when this process hangs
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        result = run(Combination.from_json(arguments[0]))
    except Refused as error:
        print(error, file=sys.stderr)  # noqa: T201 - a message of the command
        return 2
    print(json.dumps(result), flush=True)  # noqa: T201 - the command's result
    return 0


def _actions(combination: Combination) -> list[Action]:
    guard = policies.guard(combination.policy)
    workload = Workload(backends=combination.backends, device=combination.device, guard=guard)
    known = workload.actions()
    unknown = set(combination.actions) - {action.name for action in known}
    if unknown:
        names = ", ".join(action.name for action in known)
        raise Refused(f"stress: --actions {', '.join(sorted(unknown))}: there is no such action here; known are {names}")
    allowed = policies.allowed(combination.policy, known)
    wanted = [action for action in allowed if not combination.actions or action.name in combination.actions]
    if not wanted:
        names = ", ".join(action.name for action in allowed)
        raise Refused(f"stress: --actions {', '.join(combination.actions)}: policy {combination.policy} has only {names}")
    return wanted


def _run_threads(combination: Combination, actions: Sequence[Action], references: dict[str, list[Any]], tally: Tally) -> None:
    barrier = threading.Barrier(combination.threads)

    def work(index: int) -> None:
        choice = random.Random(f"{combination.seed}-{index}")
        barrier.wait()
        until = time.monotonic() + combination.seconds
        while time.monotonic() < until:
            action, case = choice.choice(actions), choice.randrange(CASES)
            try:
                tally.add(action.name, right=same(action.run(case), references[action.name][case]), error=None)
            except Exception as error:  # noqa: BLE001 - counting what fails is the purpose
                tally.add(action.name, right=None, error=error)

    workers = [threading.Thread(target=work, args=(index,), name=f"stress-{index}") for index in range(combination.threads)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)


def _once_more(action: Action, references: list[Any]) -> list[tuple[str, str]]:
    """The cases of an action that are not what they were, and how."""
    found = []
    for case, expected in enumerate(references):
        try:
            why = "" if same(action.run(case), expected) else "another result"
        except Exception as error:  # noqa: BLE001 - counting what fails is the purpose
            why = match(str(error)) or type(error).__name__
        if why:
            found.append((f"{action.name}, case {case}", why))
    return found


def _compiles(observations: Sequence[Any]) -> int:
    return sum(seen.count for seen in observations if seen.kind == "compile")


def _say(phase: str) -> None:
    """For the parent, which tells where a run hung."""
    print(f"phase: {phase}", file=sys.stderr, flush=True)  # noqa: T201 - read by the parent


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
