"""Failures of one kind with one signature, counted; and the report over all logs, most telling first."""

from __future__ import annotations

import dataclasses
import itertools
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePath
from typing import Any

from diagnostics.environments.masking import masked
from diagnostics.logs.dumps import Dump
from diagnostics.logs.facts import TELLING, Collectives, facts
from diagnostics.logs.kinds import UNKNOWN, Kind, Sure
from diagnostics.logs.recognise import Match
from diagnostics.logs.shapes import Frame
from diagnostics.logs.traceback import Traceback

_MAX_GROUPS = 500
MAX_EVIDENCE = 5
_MAX_FACTS = 12
_MAX_STREAMS = 64
_SURE = ("certain", "likely", "possible")
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")
_LIBRARY = re.compile(r"(?:^|/)(?:site|dist)-packages/|/lib/python[\d.]+/|^<frozen |^<string>")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Where it stands in which log. Lines count from 1."""

    log: str
    first_line: int
    last_line: int
    stream: str
    thread: str
    text: str

    def moved(self, lines: int) -> Evidence:
        """The same, so many lines further down."""
        return dataclasses.replace(self, first_line=self.first_line + lines, last_line=self.last_line + lines)

    @property
    def place(self) -> str:
        """file:line, or file:first-last."""
        end = f"-{self.last_line}" if self.last_line != self.first_line else ""
        return f"{self.log}:{self.first_line}{end}"


@dataclass(kw_only=True)
class Group:
    """Failures with one signature."""

    kind: Kind
    sure: Sure
    signature: str
    where: tuple[str, ...] = ()  # the program's innermost lines, the innermost first
    count: int = 0
    evidence: list[Evidence] = field(default_factory=list)  # the first ones
    streams: dict[str, None] = field(default_factory=dict)
    facts: dict[str, None] = field(default_factory=dict)
    doubts: dict[str, None] = field(default_factory=dict)
    after: str = ""  # an earlier failure that this one probably follows from

    @property
    def is_full(self) -> bool:
        """Another failure would add nothing but its count."""
        return self.has_evidence and (self.kind.id not in TELLING or len(self.facts) >= _MAX_FACTS)

    @property
    def has_evidence(self) -> bool:
        """Another failure would add nothing but its count and what its message says in numbers."""
        return len(self.evidence) >= MAX_EVIDENCE

    def count_one(self, sure: Sure, stream: str) -> None:
        """One more, of rank or stream `stream`."""
        self.count += 1
        if sure is not self.sure:
            self.sure = min(self.sure, sure, key=_SURE.index)
        if stream and len(self.streams) < _MAX_STREAMS:
            self.streams[stream] = None

    def add(self, later: Group) -> None:
        """Count those of a later part of the log, too."""
        self.count += later.count
        self.sure = min(self.sure, later.sure, key=_SURE.index)
        self.evidence += later.evidence[: MAX_EVIDENCE - len(self.evidence)]
        self.doubts.update(later.doubts)
        self.facts.update(itertools.islice(later.facts.items(), max(0, _MAX_FACTS - len(self.facts))))
        self.streams.update(itertools.islice(later.streams.items(), _MAX_STREAMS - len(self.streams)))

    def to_dict(self) -> dict[str, Any]:
        """The group as JSON values."""
        kind = self.kind
        return {
            "kind": kind.id,
            "title": kind.title,
            "severity": kind.severity,
            "sure": self.sure,
            "count": self.count,
            "signature": masked(self.signature),
            "where": list(self.where),
            "streams": list(self.streams),
            "facts": [masked(fact) for fact in self.facts],
            "doubts": list(self.doubts),
            "after": masked(self.after),
            "evidence": [{**dataclasses.asdict(one), "text": masked(one.text)} for one in self.evidence],
            "means": kind.means,
            "to_do": kind.to_do,
            "no_help": kind.no_help,
        }


class Groups:
    """All failures of all logs."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str], Group] = {}
        self._collectives: dict[tuple[str, str], Collectives] = {}
        self.dropped = 0

    def add_traceback(self, log: str, match: Match, signature: str, traceback: Traceback) -> Group | None:
        """Count a traceback with what was printed before it; its group, or None where there are too many."""
        group = self._group(match, signature, traceback.frames)
        if group is None:
            return None
        group.count_one(match[1], traceback.stream)
        if len(group.evidence) < MAX_EVIDENCE:
            group.evidence.append(_evidence(log, traceback))
        if group.kind.id in TELLING:
            self.learn(group, traceback.text)
        if traceback.truncated:
            end = "begins" if traceback.truncated == "start" else "ends"
            group.doubts[f"some tracebacks are not whole: the log {end} inside, or their frames were not printed"] = None
        if traceback.interleaved:
            group.doubts[
                "tracebacks of several ranks or threads are mixed in this log: frames may be another's (torchrun --tee 3 "
                "marks the ranks)"
            ] = None
        return group

    def add_line(self, log: str, match: Match, number: int, stream: str, text: str) -> Group | None:
        """Count a line that is no traceback; its group, or None where there are too many."""
        group = self._group(match, "", [])
        if group is None:
            return None
        group.count_one(match[1], stream)
        if len(group.evidence) < MAX_EVIDENCE:
            group.evidence.append(
                Evidence(log=log, first_line=number, last_line=number, stream=stream, thread="", text=text.strip()[:300])
            )
        self.learn(group, text)
        return group

    def add_dump(self, log: str, match: Match, dump: Dump) -> None:
        """Count a dump of all threads."""
        group = self._group(match, "stacks of all threads", [] if dump.deadlock or dump.in_collectives else dump.stack)
        if group is None:
            return
        group.count_one(match[1], dump.stream)
        if len(group.evidence) < MAX_EVIDENCE:
            group.evidence.append(
                Evidence(
                    log=log,
                    first_line=dump.first_line,
                    last_line=dump.last_line,
                    stream=dump.stream,
                    thread="",
                    text=dump.cause or "stacks of all threads",
                )
            )
        self.learn(group, dump.cause)
        if dump.deadlock is not None:
            holder, waiter = dump.deadlock
            group.facts[f"{holder.name} holds the compile lock and waits for autograd, at {holder.program_line}"] = None
            group.facts[f"{waiter.name}, autograd's device thread, waits for the compile lock, at {waiter.program_line}"] = None
        for thread in dump.in_collectives[:_MAX_FACTS]:
            group.facts[f"{thread.name} waits in a collective ({thread.frames[0].function}), at {thread.program_line}"] = None
        if not dump.first_line or (dump.threads and dump.threads[0].name == "cut off"):
            group.doubts["the log begins inside this dump: threads before it are missing"] = None

    def ordered(self) -> list[Group]:
        """Causes before their usual consequences, in the order of the logs; infos last."""
        for key, collectives in self._collectives.items():
            self._groups[key].facts.update(dict.fromkeys(collectives.sentences()))
        for group in self._groups.values():
            logs = list(dict.fromkeys(one.log for one in group.evidence))
            group.evidence.sort(key=lambda one: (logs.index(one.log), one.first_line))
        groups = sorted(self._groups.values(), key=_order)
        causes = [group for group in groups if not group.kind.follows and group.kind.severity == "error"]
        for group in groups:
            first = next((one for one in causes if one is not group and one.evidence[0].log == group.evidence[0].log), None)
            if group.kind.follows and first is not None:
                group.after = f"{first.kind.id} at {first.evidence[0].place}"
        return groups

    def add_all(self, other: Groups, lines_before: int) -> None:
        """Count what was found in a later part of a log, which begins after so many lines; `other` is used up."""
        self.dropped += other.dropped
        for key, found in other._groups.items():
            found.evidence = [one.moved(lines_before) for one in found.evidence]
            group = self._groups.get(key)
            if group is not None:
                group.add(found)
            elif len(self._groups) < _MAX_GROUPS:
                self._groups[key] = found
            else:
                self.dropped += found.count
        for key, collectives in other._collectives.items():
            if key in self._groups:
                self._collectives.setdefault(key, Collectives()).add_all(collectives)

    def count_unknown(self, signature: str, stream: str) -> tuple[bool, Group | None]:
        """Whether an unknown failure was counted, because nothing else is to be noted of it; and its group, if it has one."""
        group = self._groups.get((UNKNOWN.id, signature))
        if group is None and len(self._groups) >= _MAX_GROUPS:
            self.dropped += 1
            return True, None
        if group is None or not group.is_full:
            return False, group
        group.count_one("possible", stream)
        return True, group

    def learn(self, group: Group, text: str) -> None:
        """Note what a message says in numbers."""
        kind = group.kind.id
        if len(group.facts) < _MAX_FACTS:
            for fact in facts(kind, text):
                group.facts[fact] = None
        if kind == "nccl-timeout":  # its facts come at the end, so its group is never full before
            self._collectives.setdefault((kind, group.signature), Collectives()).add(text)

    def _group(self, match: Match, signature: str, frames: list[Frame]) -> Group | None:
        """The group of this kind and signature, or None where there are too many."""
        kind, sure = match
        key = (kind.id, signature)
        group = self._groups.get(key)
        if group is None:
            if len(self._groups) >= _MAX_GROUPS:
                self.dropped += 1
                return None
            group = self._groups[key] = Group(kind=kind, sure=sure, signature=signature, where=program_lines(frames))
        return group


def signature_of(kind: Kind, traceback: Traceback) -> str:
    """What tracebacks that are counted as one have in common: the exception, the innermost calls and what the first cause was."""
    root = ""
    if traceback.cause is not None:
        root = next((f"; after {one.exception}" for one in traceback.cause.chain if one.exception), "")
    names = " < ".join([f"{_file_name(file)}:{function}" for file, _, function in traceback.frames[-1:-4:-1]])
    return f"{words_of(kind, traceback.exception, traceback.message)}{' in ' if names else ''}{names}{root}"


def words_of(kind: Kind, exception: str, message: str) -> str:
    """How a signature begins: of an unknown kind with the message, but for its numbers."""
    name = exception or "(the exception is cut off)"
    words = _NUMBERS.sub("#", message)[:160] if kind is UNKNOWN else ""
    return f"{name}: {words}" if words else name


def _evidence(log: str, traceback: Traceback) -> Evidence:
    return Evidence(
        log=log,
        first_line=min(one.first_line for one in traceback.chain),
        last_line=traceback.last_line,
        stream=traceback.stream,
        thread=traceback.thread,
        text=traceback.text.split("\n", 1)[0][:300] or "(cut off)",
    )


@lru_cache(1024)
def _file_name(file: str) -> str:
    return PurePath(file).name


def program_lines(frames: list[Frame], limit: int = 3) -> tuple[str, ...]:
    """The program's innermost lines, the innermost first; those of libraries where there are no others."""
    program = [frame for frame in frames if not _LIBRARY.search(frame.file)] or frames
    return tuple(f"{frame.file}:{frame.line} in {frame.function}" for frame in reversed(program[-limit:]))


def _order(group: Group) -> tuple[bool, bool, str, int]:
    first = group.evidence[0]
    return (group.kind.severity == "info", group.kind.follows, first.log, first.first_line)
