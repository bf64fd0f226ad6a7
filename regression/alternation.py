"""Training processes of one machine in turns: one runs, the others stand still.

All start at once and run until they are steady; then SIGSTOP holds all but the one whose turn it is, in the order ABBA ABBA ...,
so that whatever the machine does within seconds meets all alike. What start-up makes of a process (memory layout, placement of
threads) stays with it, so a pair is one sample however many turns it has, and the next pair starts two fresh processes.

The throughput of a side is the tokens of its turns over their time; a turn counts from the first end of a step in it to the
last, so neither a step that was interrupted nor the first, on cold caches, counts. Needs SIGSTOP (not Windows). A side can be any
commit that knows `train --measure`: the run learns nothing of turns. The environment's fingerprint is not compared before and
after a pair: its processes load everything within the same seconds, and the next pair loads it anew for both. Known limits: work
already queued on a GPU goes on for that moment after its process was stopped, into the time that does not count; clocks inside a
run see the pauses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dflash.config import Topology
from regression import validity
from regression.child import ChildFailed, Place, Running
from regression.measurement import failure_of
from regression.sampler import Sampler
from regression.spec import RunSpec, workers

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 60.0  # of a process that ended and left a result, until it is read
_MIN_ENDS = 4  # of steps in a turn that counts
_MANY_SEGMENTS = 1_000_000  # the run goes on until it is told to end


@dataclass(frozen=True, kw_only=True)
class Build:
    """One of the programs: its workload, where it runs, and where its files go."""

    name: str
    spec: RunSpec
    place: Place
    directory: Path


@dataclass(frozen=True, kw_only=True)
class TurnsResult:
    """What the processes did: tokens per second per device by name, or why it does not count."""

    rates: dict[str, float]
    invalid: tuple[str, ...] = ()


class BuildFailed(RuntimeError):
    """A build did not run to its end, or never became steady."""

    def __init__(self, build: Build, reason: str) -> None:
        super().__init__(reason)
        self.build = build


def run_in_turns(builds: Sequence[Build], *, turns: int, turn_seconds: float, timeout_seconds: float) -> TurnsResult:
    """Run builds of one workload in turns, `turns` of each, the first build first. Files of a build go to its new directory.

    Raises BuildFailed.
    """
    with Sampler(builds[0].spec.visible if builds[0].spec.gpus else None) as sampler, contextlib.ExitStack() as stack:
        sides = [stack.enter_context(_Side.started(build, sampler.started)) for build in builds]
        for side in sides:
            side.wait_until_steady(timeout_seconds)
        began = time.time()
        for number in range(turns):
            for side in sides if number % 2 == 0 else sides[::-1]:
                side.take_turn(turn_seconds)
        ended = time.time()
        results = [side.end(timeout_seconds) for side in sides]
    samples = validity.window(sampler.samples, began, ended)
    num_gpus = builds[0].spec.gpus
    reasons = validity.sample_reasons(sampler.before, samples, num_gpus=num_gpus, processes=len(builds))
    rates = {}
    for side, result in zip(sides, results, strict=True):
        steps = steps_of(side.events.read_text())
        tokens, seconds = tokens_and_seconds(steps, side.turns)
        reasons += [f"{side.name}: {reason}" for reason in (*run_reasons(result), *too_short(steps, side.turns))]
        if seconds:
            rates[side.name] = tokens / seconds / result["measure"]["num_devices"]
    return TurnsResult(rates=rates, invalid=tuple(dict.fromkeys(reasons)))


def steps_of(events: str) -> list[tuple[float, int]]:
    """End (wall clock) and tokens of every step in the text of an events.jsonl."""
    records = [json.loads(line) for line in events.splitlines() if line.endswith("}")]
    return [(record["time_seconds"], record["fields"]["tokens"]) for record in records if record["name"] == "step"]


def tokens_and_seconds(steps: Sequence[tuple[float, int]], turns: Sequence[tuple[float, float]]) -> tuple[int, float]:
    """Tokens and seconds of the steps (end, tokens) inside the turns (begin, end)."""
    tokens, seconds = 0, 0.0
    for began, ended in turns:
        inside = [step for step in steps if began < step[0] <= ended]
        tokens += sum(count for _, count in inside[1:])
        seconds += inside[-1][0] - inside[0][0] if inside else 0.0
    return tokens, seconds


def too_short(steps: Sequence[tuple[float, int]], turns: Sequence[tuple[float, float]]) -> list[str]:
    """Says so where turns hold too few steps to count."""
    ends = [sum(began < end <= ended for end, _ in steps) for began, ended in turns]
    short = sum(count < _MIN_ENDS for count in ends)
    return [f"in {short} of {len(turns)} turns fewer than {_MIN_ENDS} steps ended: use longer turns"] if short else []


def run_reasons(result: dict[str, Any]) -> list[str]:
    """Why the run's own account says that its throughput does not count: a compile, or a worker that did nothing."""
    reasons = [f"{result[key]} {key}" for key in ("recompiles_after_warmup", "fallbacks", "fx_errors") if result.get(key)]
    compiles = sum(segment["compiles"] for segment in result["measure"]["segments"])
    if compiles:
        reasons.append(f"{compiles} compile phases ended while it was timed")
    active = {row["worker"] for row in result["workers"] if row["items"] > 0}
    missing = [worker for worker in workers(Topology.parse(result["topology"])) if worker not in active]
    return [*reasons, f"{', '.join(missing)} did nothing"] if missing else reasons


class _Side:
    """The process of one build. Its methods raise BuildFailed when it ends by itself."""

    def __init__(self, build: Build, process: Running) -> None:
        self.build = build
        self.name = build.name
        self.events = build.directory / "run" / "events.jsonl"
        self.turns: list[tuple[float, float]] = []  # begin and end, wall clock
        self._process = process

    @classmethod
    @contextlib.contextmanager
    def started(cls, build: Build, tell: Callable[[int], None]) -> Iterator[Self]:
        build.directory.mkdir(parents=True)
        spec = dataclasses.replace(build.spec, segments=_MANY_SEGMENTS)
        place = dataclasses.replace(build.place, variables={**build.place.variables, **spec.variables}, started=tell)
        with Running.started(spec.command(build.directory / "run"), log=build.directory / "stderr.log", place=place) as process:
            yield cls(build, process)

    def wait_until_steady(self, timeout_seconds: float) -> None:
        """And hold it then. A side that waits for others before it is held runs on."""
        deadline = time.monotonic() + timeout_seconds
        while not self._has_said("steady after"):
            self._must_run()
            if time.monotonic() > deadline:
                raise BuildFailed(self.build, f"it was not steady within {timeout_seconds:.0f} s")
            time.sleep(_POLL_SECONDS)
        self._process.send(signal.SIGSTOP)

    def take_turn(self, seconds: float) -> None:
        self._must_run()
        began = time.time()
        self._process.send(signal.SIGCONT)
        time.sleep(seconds)
        self.turns.append((began, time.time()))
        self._process.send(signal.SIGSTOP)

    def end(self, timeout_seconds: float) -> dict[str, Any]:
        """Ask the run to end after its step; its result."""
        self._must_run()
        self._process.send(signal.SIGCONT)
        self._process.send(signal.SIGTERM)
        return self._result(timeout_seconds)

    def _must_run(self) -> None:
        if self._process.has_ended():
            incomplete = self._result(_GRACE_SECONDS).get("measure", {}).get("incomplete")
            raise BuildFailed(self.build, f"it ended before its time: {incomplete}")

    def _result(self, timeout_seconds: float) -> dict[str, Any]:
        try:
            return self._process.result(timeout_seconds)[1]
        except ChildFailed as error:
            raise BuildFailed(self.build, _words(failure_of(self.events.parent, error))) from error

    def _has_said(self, beginning: str) -> bool:
        return self.events.exists() and f'"text": "{beginning}' in self.events.read_text()


def _words(failure: dict[str, Any]) -> str:
    return f"{failure['type']}: {failure['message']}"
