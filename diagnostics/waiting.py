"""Who waits for whom in a dumped process, and whether that is a deadlock or a stall. Pure: from snapshots to a `HangReport`.

A deadlock is a cycle of waits among threads that did not move between two looks. A stall is a process none of whose busy
threads moved, which used no CPU time, and in which some thread waits for more than work to do.

Limits: the only lock whose holder is known is Dynamo's compile lock. Which of several device threads a backward waits for is
not visible from outside: all with Python frames count, and a cycle is a hazard, not an error, while another one works. A long
kernel, a slow peer or a slow disk under a compile looks like a stall: look again with a longer time between the looks.
This module imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass
from typing import Any

from diagnostics.catalogue import CATALOGUE
from diagnostics.records import Finding
from diagnostics.stacks import Snapshot, worked
from diagnostics.thread_states import ThreadState, classify, unreadable

_LOCK_REASON = "the compile lock"
_AUTOGRAD_REASON = "autograd's device thread"
_ADVICE = {
    "in a collective": "Run this command on the other ranks: one of them has not come to the same collective, or has ended.",
    "synchronises with a device": "A kernel does not end: look at the device (nvidia-smi), and again with --native.",
    "waits for a lock": "See which other thread holds this lock: its holder cannot be seen from outside.",
    "waits in autograd": "Look at the device threads with --native: they run C++ or wait for a device.",
}
_OTHER_ADVICE = (
    "Look again with --native and a longer --watch; long compiles use the CPU here or in child processes and are no stall."
)


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Thread `waiter` cannot go on before `holder` does. Both are native thread ids; no holder: it cannot be seen."""

    waiter: int
    holder: int | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class HangReport:
    """What was seen in one process. `not_observed` says why something, or all of it, could not be seen."""

    pid: int
    still_seconds: float  # the time between the looks, or for which the process was known to do nothing
    threads: tuple[ThreadState, ...] = ()
    waits: tuple[Wait, ...] = ()
    findings: tuple[Finding, ...] = ()
    not_observed: tuple[str, ...] = ()

    @property
    def stuck(self) -> bool:
        """A deadlock or a stall was found."""
        return bool(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {**dataclasses.asdict(self), "stuck": self.stuck}


def analyse(earlier: Snapshot, later: Snapshot) -> HangReport:
    """Compare two looks at one process. The same look with an earlier time says that nothing moved since then."""
    threads = tuple(classify(stack) for stack in later.stacks)
    edges = waits(threads)
    still = _still(earlier, later)
    seconds = later.at_seconds - earlier.at_seconds
    findings = tuple(
        _deadlock(cycle, edges, threads, _working(earlier, later)) for cycle in cycles(edges) if still.issuperset(_members(cycle))
    )
    if not findings and _stalled(threads, still) and not worked(earlier.cpu_seconds, later.cpu_seconds, seconds):
        findings = (_stall(threads, seconds),)
    missing = tuple(f"{file} cannot be read here: who holds the compile lock may be missed" for file in unreadable(later.stacks))
    return HangReport(pid=later.pid, still_seconds=seconds, threads=threads, waits=edges, findings=findings, not_observed=missing)


def waits(threads: tuple[ThreadState, ...]) -> tuple[Wait, ...]:
    """The edges of the wait-for graph."""
    holders = [thread.native_id for thread in threads if thread.holds_compile_lock]
    busy = [thread.native_id for thread in threads if thread.device_thread and thread.in_python]
    found: list[Wait] = []
    for thread in threads:
        if thread.state == "waits for the compile lock":
            found += _edges(thread.native_id, holders, _LOCK_REASON)
        elif thread.state == "waits in autograd":
            found += _edges(thread.native_id, [other for other in busy if other != thread.native_id], _AUTOGRAD_REASON)
    return tuple(found)


def cycles(edges: tuple[Wait, ...]) -> tuple[tuple[Wait, ...], ...]:
    """For each thread the shortest cycle of waits through it; a cycle of the same threads only once."""
    found: dict[frozenset[int], tuple[Wait, ...]] = {}
    for start in dict.fromkeys(edge.waiter for edge in edges):
        cycle = _shortest_cycle(start, edges)
        if cycle:
            found.setdefault(_members(cycle), cycle)
    return tuple(found.values())


def _edges(waiter: int, holders: list[int], reason: str) -> list[Wait]:
    known: list[int | None] = [*holders] or [None]
    return [Wait(waiter=waiter, holder=holder, reason=reason) for holder in known]


def _shortest_cycle(start: int, edges: tuple[Wait, ...]) -> tuple[Wait, ...]:
    paths: deque[tuple[Wait, ...]] = deque([()])
    reached: set[int] = set()
    while paths:
        path = paths.popleft()
        end = path[-1].holder if path else start
        for edge in edges:
            if edge.waiter != end or edge.holder is None or edge.holder in reached:
                continue
            if edge.holder == start:
                return (*path, edge)
            reached.add(edge.holder)
            paths.append((*path, edge))
    return ()


def _members(cycle: tuple[Wait, ...]) -> frozenset[int]:
    return frozenset(edge.waiter for edge in cycle)


def _still(earlier: Snapshot, later: Snapshot) -> set[int]:
    """Threads that were at the same place in both looks."""
    before = {stack.native_id: stack.frames for stack in earlier.stacks}
    return {stack.native_id for stack in later.stacks if before.get(stack.native_id) == stack.frames}


def _stalled(threads: tuple[ThreadState, ...], still: set[int]) -> bool:
    busy = [thread for thread in threads if thread.state != "idle"]
    waiting = [thread for thread in busy if thread.state != "running"]
    return bool(waiting) and all(thread.native_id in still for thread in busy)


def _working(earlier: Snapshot, later: Snapshot) -> tuple[str, ...]:
    """Autograd's device threads that used CPU time between the looks."""
    before, after = earlier.device_cpu_seconds, later.device_cpu_seconds
    seconds = later.at_seconds - earlier.at_seconds
    return tuple(name for name, used in after.items() if worked(before.get(name, 0.0), used, seconds))


def _deadlock(
    cycle: tuple[Wait, ...], edges: tuple[Wait, ...], threads: tuple[ThreadState, ...], working: tuple[str, ...]
) -> Finding:
    thread = {each.native_id: each for each in threads}
    # Begin with the holder of the lock: that is how the failure is told.
    first = next((at for at, edge in enumerate(cycle) if thread[edge.waiter].holds_compile_lock), 0)
    cycle = (*cycle[first:], *cycle[:first])
    names = [thread[edge.waiter] for edge in cycle]
    told = "; ".join(_sentence(edge, thread) for edge in cycle)
    behind = sorted({edge.waiter for edge in edges} - _members(cycle))
    also = f"; behind them wait {', '.join(thread[each].label for each in behind)}" if behind else ""
    doubt = f"; not certain while {', '.join(working)} works, which may be what is waited for: look again" if working else ""
    is_f8 = {edge.reason for edge in cycle} == {_LOCK_REASON, _AUTOGRAD_REASON}
    return Finding(
        id="F8" if is_f8 else "deadlock",
        severity="hazard" if working else "error",
        what=f"{'deadlock: ' if is_f8 else ''}{told}{also}{doubt}",
        who=tuple(each.name for each in names),
        where=(),
        others=tuple(f"{each.name}: {each.where[-1]}" for each in names if each.where),
        why=CATALOGUE["F8"].why if is_f8 else "These threads wait for each other, so none of them goes on.",
        what_to_do=CATALOGUE["F8"].what_to_do if is_f8 else f"Kill the process. {_ADVICE['waits in autograd']}",
    )


def _sentence(edge: Wait, thread: dict[int, ThreadState]) -> str:
    waiter, holder = thread[edge.waiter], thread[edge.holder or 0]
    if edge.reason == _LOCK_REASON:
        return f"{waiter.label} waits for the compile lock held by {holder.label}"
    holding = "holds the compile lock and " if waiter.holds_compile_lock else ""
    return f"{waiter.label} {holding}waits for {holder.label}"


def _stall(threads: tuple[ThreadState, ...], seconds: float) -> Finding:
    waiting = [thread for thread in threads if thread.state not in {"idle", "running"}]
    told = "; ".join(f"{thread.label} {verb(thread)}" for thread in waiting)
    gil = next((f"; {thread.label} holds the GIL" for thread in threads if thread.holds_gil), "")
    advice = dict.fromkeys(_ADVICE.get(thread.state, _OTHER_ADVICE) for thread in waiting)
    return Finding(
        id="stall",
        severity="error",
        what=f"nothing moved for {seconds:.1f} s: {told}{gil}",
        who=tuple(thread.name for thread in waiting),
        where=(),
        others=tuple(f"{thread.name}: {thread.where[-1]}" for thread in waiting if thread.where),
        why="No busy thread moved, and the process and its children used no CPU time.",
        what_to_do=" ".join(advice),
    )


def verb(thread: ThreadState) -> str:
    """The thread's state as the end of a sentence."""
    return (
        f"is {thread.state}" if thread.state in {"compiling", "tracing", "running", "idle", "in a collective"} else thread.state
    )
