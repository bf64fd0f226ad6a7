"""How the threads of a stress run are protected from each other.

| policy | what it does | promises to be clean |
|---|---|---|
| none | nothing: everything at once | no |
| lock | one lock around whatever traces or calls compiled code, forward only: around backward it can deadlock (F8) | no |
| prewarm | what a trainer does: one thread compiles everything, then recompiles are forbidden and the threads only call | yes |
| isolate | `dflash.fx.isolate()`: tracing state of its own for each thread | yes |

`prewarm` freezes by the stance `fail_on_recompile`, which also avoids F19, and keeps Dynamo's cache entries in their places:
by default a call moves the entry that it used to the front of the code object's list, and a call of another thread that is
searching the list just then misses its own entry: it recompiles for no reason, and under the stance it raises (F18).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch._dynamo

import dflash.fx
from diagnostics.stress.workload import Action, Guard

_MOVE_TO_FRONT = "_set_lru_cache"
_IN_TURNS = {"prewarm": "block mask"}  # F20: what this policy alone does not protect


@dataclass(frozen=True, kw_only=True)
class Policy:
    """One way to protect threads."""

    promises_clean: bool
    only_calls: bool = False  # the threads get only actions that trace and compile nothing
    hazards_allowed: bool = False  # traces overlap on purpose: only errors of the probes count


POLICIES = {
    "none": Policy(promises_clean=False),
    "lock": Policy(promises_clean=False),
    "prewarm": Policy(promises_clean=True, only_calls=True),
    "isolate": Policy(promises_clean=True, hazards_allowed=True),
}


def guard(name: str) -> Guard:
    """What an action enters before it traces or calls compiled code."""
    return threading.RLock() if name == "lock" else contextlib.nullcontext()


def around_process(name: str) -> Guard:
    """What is entered before anything is compiled."""
    return dflash.fx.isolated() if name == "isolate" else contextlib.nullcontext()


@contextlib.contextmanager
def around_threads(name: str) -> Iterator[None]:
    """What is entered between the reference, which compiles, and the threads."""
    if name != "prewarm":
        yield
        return
    move_to_front = getattr(torch._C._dynamo.eval_frame, _MOVE_TO_FRONT, None) or (lambda _on: None)
    with torch.compiler.set_stance("fail_on_recompile"):
        move_to_front(False)
        try:
            yield
        finally:
            move_to_front(True)  # torch's default


def notes(name: str) -> list[str]:
    """What is not as promised on this torch."""
    if name == "prewarm" and not hasattr(torch._C._dynamo.eval_frame, _MOVE_TO_FRONT):
        return [f"this torch has no {_MOVE_TO_FRONT}: cache entries may be moved under another thread's search (F18)"]
    return []


def allowed(name: str, actions: list[Action]) -> list[Action]:
    """The actions that threads get under a policy."""
    if POLICIES[name].only_calls:
        actions = [action for action in actions if action.only_calls]
    turns = threading.Lock()
    return [_in_turns(action, turns) if action.name == _IN_TURNS.get(name) else action for action in actions]


def _in_turns(action: Action, turns: threading.Lock) -> Action:
    def run(case: int) -> object:
        with turns:
            return action.run(case)

    return Action(name=action.name, run=run, only_calls=action.only_calls)
