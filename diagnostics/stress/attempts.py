"""Run a race under the scheduler in a forked copy of this process, which a failure may damage and a deadlock may keep.

The parent builds the race once (imports, compiles) and starts no threads, so that a try costs milliseconds.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import sys
import traceback
from dataclasses import dataclass
from typing import Any

import torch.fx

from dflash.fx import seams
from diagnostics.catalogue import match
from diagnostics.stress.combination import failure_of_leak
from diagnostics.stress.parkpoints import park_points
from diagnostics.stress.races import Race
from diagnostics.stress.scheduler import LETTERS, Choose, Scheduler
from diagnostics.stress.strategies import Explicit

_HANG_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What became of one schedule."""

    asked: str  # the schedule that was followed; where chance decided, the choices it made
    made: str  # the choices made
    places: tuple[str, ...]  # for each choice, where the thread had been parked
    failures: tuple[str, ...]  # of the catalogue, or exceptions, "deadlock", "hang"; sorted
    messages: tuple[str, ...]
    skipped: int = 0  # letters of `asked` whose thread could not go on

    @classmethod
    def from_json(cls, text: str) -> Attempt:
        """Read back what the child wrote."""
        values: dict[str, Any] = json.loads(text)
        for name in ("places", "failures", "messages"):
            values[name] = tuple(values[name])
        return cls(**values)


class Attempts:
    """Tries of one race. Raises NotObservable when this torch lacks a park point, RuntimeError where there is no fork."""

    def __init__(self, race: Race) -> None:
        if not hasattr(os, "fork"):
            raise RuntimeError(f"schedules run in forked processes, which {sys.platform} does not have: use Linux or macOS")
        with park_points(lambda _place: None, lambda _sentence: None):
            self._race = race
        self.count = 0

    def run(self, choose: Choose, *, asked: str | None = None) -> Attempt:
        """Try one schedule."""
        self.count += 1
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            code = 1
            try:
                os.write(write, json.dumps(dataclasses.asdict(_perform(self._race, choose, asked))).encode())
                code = 0
            except BaseException:  # noqa: BLE001 - a forked copy must not return into its parent's code
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(write)
        text = _read(read, child)
        if text is None:
            made = asked or ""
            sentence = f"no end within {_HANG_SECONDS:.0f} s, or the process died: killed"
            return Attempt(asked=made, made="", places=(), failures=("hang or crash",), messages=(sentence,))
        return Attempt.from_json(text)


def _read(pipe: int, child: int) -> str | None:
    """What the child wrote, when it has ended; None where it hung or died."""
    parts = []
    with os.fdopen(pipe, "rb") as file:
        while select.select([file], [], [], _HANG_SECONDS)[0]:
            part = os.read(file.fileno(), 65536)
            if not part:
                break
            parts.append(part)
        else:
            os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return b"".join(parts).decode() if code == 0 else None


def _perform(race: Race, choose: Choose, asked: str | None) -> Attempt:
    scheduler = Scheduler(choose)
    messages: list[str] = []
    with park_points(scheduler.park, messages.append):
        run = scheduler.run(race.bodies)
    failures = {"deadlock"} if run.deadlock else set()
    messages += run.deadlock
    for thread, outcome in enumerate(run.outcomes):
        _note(failures, messages, f"thread {LETTERS[thread]}", outcome.result, outcome.error)
    leaks = [] if run.deadlock else seams.leaks(seams.tracing_state())
    failures |= {failure_of_leak(leak) for leak in leaks}
    messages += [leak.partition(". ")[0] for leak in leaks]
    if race.afterwards is not None and not run.deadlock:
        _afterwards(race, failures, messages)
    return Attempt(
        asked=run.schedule if asked is None else asked,
        made=run.schedule,
        places=run.places,
        failures=tuple(sorted(failures)),
        messages=tuple(messages),
        skipped=choose.skipped if isinstance(choose, Explicit) else 0,
    )


def _afterwards(race: Race, failures: set[str], messages: list[str]) -> None:
    assert race.afterwards is not None
    result, raised = None, None
    try:
        result = race.afterwards()
    except Exception as error:  # noqa: BLE001 - what fails is the result
        raised = error
    if raised is not None and match(str(raised)) == "F1" and "F6" in failures:  # told by its cause
        messages.append(f"afterwards: {type(raised).__name__}: {_first_line(raised)}")
        return
    _note(failures, messages, "afterwards", result, raised)


def _note(failures: set[str], messages: list[str], who: str, result: Any, error: BaseException | None) -> None:
    if error is not None:
        failures.add(match(str(error)) or type(error).__name__)
        messages.append(f"{who}: {type(error).__name__}: {_first_line(error)}")
    elif isinstance(result, torch.fx.Proxy):
        failures.add("F3")
        messages.append(f"{who} got a Proxy")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
