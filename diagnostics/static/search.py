"""Breadth first from a target to every FX entry point, along what functions refer to.

Paths are of three ranks: without a condition, on conditions, and only within `if torch.compiler.is_compiling()`, which Dynamo
compiles instead of running it. A function is visited again when a path of a better rank leads to it, and an entry point has its
shortest path at all and, where that has conditions, the shortest one without. So one path can stand for several conditions.
"""

from __future__ import annotations

import dataclasses
import gc
import re
from collections import deque
from dataclasses import dataclass
from typing import Any

from diagnostics.static.entry_points import COMPILES, Kind
from diagnostics.static.presumed import PresumedMethods
from diagnostics.static.references import Collector, Edge, References, Unfollowed, Use, entry_kind
from diagnostics.static.resolver import Resolver
from diagnostics.static.targets import find
from diagnostics.static.values import Function

MAX_FUNCTIONS = 500  # besides those of the target itself
MAX_DEPTH = 40
_COMPILING = re.compile(r"(torch\.(compiler|_dynamo)\.)?is_(dynamo_)?compiling\(\)")
_WHILE_COMPILING = 2


@dataclass(frozen=True)
class Step:
    """`function` does `how` at `where`, on `conditions`."""

    function: str
    how: str
    where: str
    conditions: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """An entry point, and how the target gets there; the last step names what it does there."""

    kind: Kind
    name: str
    path: tuple[Step, ...]

    @property
    def conditions(self) -> tuple[str, ...]:
        """All conditions along the path."""
        return tuple(dict.fromkeys(condition for step in self.path for condition in step.conditions))


@dataclass(frozen=True)
class NotFollowed:
    """Something that runs and could be anything; `where` is its first, nearest place of `count`."""

    kind: str
    text: str
    where: str
    count: int = 1


@dataclass(frozen=True)
class ScanResult:
    """What a scan found; `found` and `unfollowed` begin with what is nearest to the target."""

    target: str
    found: tuple[Found, ...]
    unfollowed: tuple[NotFollowed, ...]
    bounds: tuple[str, ...]
    presumed: int
    functions: int
    modules: int

    @property
    def exit_code(self) -> int:
        """0 nothing found, 1 entry points found, 3 nothing found but something could not be followed."""
        if self.found:
            return 1
        return 3 if self.unfollowed or self.bounds else 0

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {"version": 1, "exit_code": self.exit_code, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class _Visit:
    function: Function
    rank: int = 0
    parent: _Visit | None = None
    edge: Edge | None = None
    depth: int = 0


def scan(target: str, *, max_functions: int = MAX_FUNCTIONS, max_depth: int = MAX_DEPTH) -> ScanResult:
    """Find the entry points that `target` can reach. Raises TargetError on a target that is not there or not Python."""
    collecting = gc.isenabled()
    gc.disable()  # millions of small nodes, all of them kept: looking for garbage among them doubles the time
    try:
        resolver, roots = find(target)
        return _Search(resolver, max_functions, max_depth).run(target, roots)
    finally:
        if collecting:
            gc.enable()


class _Search:
    def __init__(self, resolver: Resolver, max_functions: int, max_depth: int) -> None:
        self._resolver = resolver
        self._presumed = PresumedMethods(resolver.sources)
        self._max_functions, self._max_depth = max_functions, max_depth
        self._references: dict[Function, References] = {}
        self._found: dict[tuple[Kind, str, str, int], list[Found]] = {}
        self._unfollowed: dict[tuple[str, str], NotFollowed] = {}
        self._bounds: dict[str, None] = {}

    def run(self, target: str, roots: list[Function]) -> ScanResult:
        self._max_functions += len(roots)
        queue = deque(_Visit(root) for root in roots)
        seen = dict.fromkeys(roots, 0)  # the best rank so far
        for root in roots:
            if (kind := entry_kind(self._resolver, root)) is not None:
                step = Step(root.qualname, "is an entry point", _where(root, _first_line(root)), ())
                self._found[kind, root.qualname, "", 0] = [Found(kind, root.qualname, (step,))]
        while queue:
            visit = queue.popleft()
            references = self._of(visit.function)
            if references is None:
                continue
            for use in references.uses:
                self._use(visit, use)
            for edge in references.edges:
                rank = max(visit.rank, _rank(edge.conditions))
                if rank >= seen.get(edge.target, rank + 1):
                    continue
                if visit.depth >= self._max_depth:
                    self._bounds[f"paths longer than {self._max_depth} calls were not followed"] = None
                    continue
                seen[edge.target] = rank
                queue.append(_Visit(edge.target, rank, visit, edge, visit.depth + 1))
        return self._result(target)

    def _of(self, function: Function) -> References | None:
        if function not in self._references:
            if len(self._references) >= self._max_functions:
                self._bounds[f"only the nearest {self._max_functions} functions were read: --max-functions N reads more"] = None
                return None
            references = self._collect(function)
            self._references[function] = references
            for one in references.unfollowed:
                self._not_followed(function, one)
        return self._references[function]

    def _collect(self, function: Function) -> References:
        try:
            return Collector(self._resolver, self._presumed, function).collect()
        except RecursionError:
            unread = Unfollowed("nested too deeply", function.qualname, _first_line(function))
            return References(unfollowed=[unread])

    def _use(self, visit: _Visit, use: Use) -> None:
        path = (*_steps(visit), Step(visit.function.qualname, f"-> {use.name}", _where(visit.function, use.line), use.conditions))
        found = Found(use.kind, use.name, path)
        key = (use.kind, use.name, visit.function.qualname, use.line)
        known = [one for one in self._found.get(key, ()) if _rank(one.conditions) < _WHILE_COMPILING]
        if not known or _rank(found.conditions) < min(_rank(one.conditions) for one in known):
            self._found[key] = [*known, found]

    def _not_followed(self, function: Function, one: Unfollowed) -> None:
        key = (one.kind, one.text)
        known = self._unfollowed.get(key)
        self._unfollowed[key] = (
            NotFollowed(one.kind, one.text, _where(function, one.line))
            if known is None
            else dataclasses.replace(known, count=known.count + 1)
        )

    def _result(self, target: str) -> ScanResult:
        found = sorted((one for group in self._found.values() for one in group), key=lambda one: len(one.path))
        if not any(one.kind in COMPILES for one in found):
            found = [one for one in found if one.kind != "backward"]  # of what nothing here compiles
        unreadable = [NotFollowed("no source", text, name) for name, text in self._resolver.sources.unreadable.items()]
        return ScanResult(
            target=target,
            found=tuple(found),
            unfollowed=(*self._unfollowed.values(), *unreadable),
            bounds=tuple(self._bounds),
            presumed=sum(one.presumed for one in self._references.values()),
            functions=len(self._references),
            modules=len({one.scope.module for one in self._references}),
        )


def _rank(conditions: tuple[str, ...]) -> int:
    if any(_COMPILING.match(condition) for condition in conditions):
        return _WHILE_COMPILING
    return 1 if conditions else 0


def _steps(visit: _Visit) -> tuple[Step, ...]:
    steps: list[Step] = []
    here = visit
    while here.parent is not None and here.edge is not None:
        caller, edge = here.parent.function, here.edge
        steps.append(Step(caller.qualname, f"{edge.how} {_name(edge.target)}", _where(caller, edge.line), edge.conditions))
        here = here.parent
    return tuple(reversed(steps))


def _name(function: Function) -> str:
    return function.qualname.removeprefix(f"{function.scope.module}.")


def _where(function: Function, line: int) -> str:
    return f"{function.scope.file}:{line}"


def _first_line(function: Function) -> int:
    line: int = getattr(function.scope.node, "lineno", 1)
    return line
