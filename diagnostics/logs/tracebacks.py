"""Tracebacks out of lines: chained, in threads, of interleaved ranks, cut off at either end, wrapped by a terminal.

Each stream (rank) is read by itself. Where a log does not say whose a line is, several tracebacks can be open at once: a
frame goes to the one that it continues as another one already went on (ranks that fail alike), else to the one that is ahead
of its likes, else to the one touched last; all say that they are `interleaved`. No traceback is dropped: one that never ends
is handed over as `truncated`.

Limits: frames beyond 300 are left out in the middle; a traceback is given up after 1000 lines that do not belong to it; of a
message of several lines the first 12 are kept; a frame that was wrapped behind its line number keeps half a name. An
exception class is known by its place and by a name such as Python's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from diagnostics.logs.reader import Line
from diagnostics.logs.traceback import MAX_SOURCE_LINES, Frame, Traceback

_MAX_FRAMES = 300
_MAX_OPEN = 16  # of one stream
_MAX_STREAMS = 4096
_MAX_QUIET_LINES = 1000
_MAX_TAIL = 12
_MAX_TEXT = 1000  # characters of one line of a message
_MAX_CHAIN = 20
_HEADER = re.compile(r"^(?P<before>.*?)(?P<group>Exception Group )?Traceback \(most recent call last\)")
_FRAME = re.compile(r'^\s*File "(?P<file>.+?)", line (?P<line>\d+)(?:, in (?P<function>.*))?$')
_FRAME_BEGINS = re.compile(r'^\s*File "')
_DUMPED_FRAME = re.compile(r'^\s*File "[^"]*", line \d+ in ')
_RICH_FRAME = re.compile(r"^\s*│\s+(?P<file>\S+?):(?P<line>\d+) in (?P<function>\S+)")
_RICH = ("│", "╭", "╰")
_GROUP_BAR = re.compile(r"^\s*[|+](?:[-+ ]*\d[-+ ]*$)?\s?")
_CARETS = re.compile(r"^\s*[\^~]+\s*$")
_IN_THREAD = re.compile(r"^Exception in thread (.+?)(?: \(.*\))?:$")
_LINKS = {
    "During handling of the above exception, another exception occurred:": "while it was handled",
    "The above exception was the direct cause of the following exception:": "caused by it",
}
_EXCEPTION = re.compile(r"^(?P<indent>\s*)(?P<name>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?::(?:\s(?P<message>.*))?)?$")
_ALONE = re.compile(r"^((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt))(?::\s.*)?$")
_LIKE_AN_EXCEPTION = re.compile(
    r"(?:Error|Exception|Interrupt|Exit|Warning|Failed|Failure|Group|Timeout|Unsupported|Hit|Iteration|Refused|Closed|Empty|Full|"
    r"Aborted|Cancelled|NotFound|Fault|Unreadable)$"
)
_LOWER_CASE = {"error", "timeout", "gaierror", "herror"}
_NOT_EXCEPTIONS = {"Epoch", "Step", "Loss", "Note", "Rank", "Time", "Iter", "Progress", "Info", "Warning", "Error", "Debug"}


@dataclass(slots=True)
class _Open:
    traceback: Traceback
    indent: int
    hashes: list[int] = field(default_factory=lambda: [0])  # of the first 0, 1, 2, ... frames
    piece: str = ""  # of a frame that a terminal wrapped

    def add(self, frame: Frame, number: int) -> None:
        frames = self.traceback.frames
        self.hashes.append(hash((self.hashes[-1], frame)))
        frames.append(frame)
        if len(frames) > _MAX_FRAMES:
            del frames[_MAX_FRAMES // 2], self.hashes[_MAX_FRAMES // 2]
        self.traceback.last_line = number


@dataclass(slots=True)
class _Stream:
    open: list[_Open] = field(default_factory=list)  # frames are being read
    ended: Traceback | None = None  # its message is being read
    before: Traceback | None = None  # the next one of the chain is awaited
    link: str = ""
    thread: str = ""
    grouped: bool = False
    dated: bool = False  # the lines of what is being read carry dates


class TracebackReader:
    """Feed it lines; it hands over each traceback once its end is known."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}

    @property
    def idle(self) -> bool:
        """Nothing is open: lines without a trigger need not be fed."""
        return not self._streams

    def feed(self, line: Line) -> tuple[bool, list[Traceback]]:
        """Whether the line belongs to a traceback, and the tracebacks that it ends."""
        stream = self._streams.get(line.stream)
        if stream is None:
            stream = self._streams[line.stream] = _Stream()
        done: list[Traceback] = []
        used = _feed(stream, line, done)
        if not (stream.open or stream.ended or stream.before or stream.thread):
            del self._streams[line.stream]
        if len(self._streams) > _MAX_STREAMS:
            done += _give_up(self._streams.pop(next(iter(self._streams))))
        return used, done

    def sweep(self, number: int) -> list[Traceback]:
        """Give up what was last touched long before line `number`; call it now and then."""
        done: list[Traceback] = []
        for name in list(self._streams):
            stream = self._streams[name]
            touched = [one.traceback.last_line for one in stream.open]
            touched += [one.last_line for one in (stream.ended, stream.before) if one is not None]
            if number - max(touched, default=0) > _MAX_QUIET_LINES:
                done += _give_up(self._streams.pop(name))
        return done

    def finish(self) -> list[Traceback]:
        """What is still open at the end of the log."""
        done = [traceback for stream in self._streams.values() for traceback in _give_up(stream)]
        self._streams.clear()
        return done


def _feed(stream: _Stream, line: Line, done: list[Traceback]) -> bool:
    text = _GROUP_BAR.sub("", line.text) if stream.grouped else line.text
    link = _LINKS.get(text)
    if "Traceback (most" in text and (header := _HEADER.match(text)) is not None:
        done += _begin(stream, line, header)
    elif link is not None and stream.ended is not None:
        stream.before, stream.ended, stream.link = stream.ended, None, link
    elif (frame := _frame(stream, text)) is not None:
        done += _end_message(stream)
        _owner(stream, line, frame).add(frame, line.number)
    elif text.startswith("Exception in") and (named := _IN_THREAD.match(text)) is not None:
        done += _end_message(stream)
        stream.thread = named[1]
    elif stream.open and (owner := _ends(stream, line.number, text)) is not None:
        done += _end_message(stream)
        _close(stream, owner, line.number, text)
        stream.dated = line.dated
    elif (alone := _ALONE.match(text)) is not None and alone[1] not in _NOT_EXCEPTIONS:
        done += _end_message(stream)
        stream.ended, stream.dated = _alone(stream, line, alone[1], text), line.dated
    elif stream.ended is not None and len(stream.ended.tail) < _MAX_TAIL and line.dated == stream.dated:
        stream.ended.tail.append(Line(line.number, line.stream, text[:_MAX_TEXT]))
    else:
        done += _end_message(stream)
        return _pass(stream, line.number, text, done)
    return True


def _begin(stream: _Stream, line: Line, header: re.Match[str]) -> list[Traceback]:
    done = _end_message(stream)
    headless = [one for one in stream.open if one.traceback.truncated]
    for one in headless:  # a stack that was only printed, or whose exception comes later and then stands alone
        stream.open.remove(one)
        done.append(one.traceback)
    if len(stream.open) >= _MAX_OPEN:
        done.append(_cut(stream.open.pop(0).traceback))
    before, stream.before = stream.before, None
    if before is not None and sum(1 for _ in before.chain) >= _MAX_CHAIN:
        done.append(before)
        before = None
    traceback = Traceback(
        stream=line.stream,
        thread=stream.thread or (before.thread if before else ""),
        first_line=line.number,
        last_line=line.number,
        cause=before,
        link=stream.link if before else "",
    )
    stream.thread, stream.grouped = "", stream.grouped or header["group"] is not None
    indent = len(header["before"]) if not header["before"].strip() else 0
    stream.open.append(_Open(traceback, indent))
    if len(stream.open) > 1:
        for one in stream.open:
            one.traceback.interleaved = True
    return done


def _frame(stream: _Stream, text: str) -> Frame | None:
    waiting = next((one for one in stream.open if one.piece), None)
    if waiting is not None:
        text, waiting.piece = waiting.piece + text, ""
    found = _FRAME.match(text) or _RICH_FRAME.match(text)
    if found is not None:
        return Frame(found["file"], int(found["line"]), (found["function"] or "").strip())
    if stream.open and _FRAME_BEGINS.match(text) and not _DUMPED_FRAME.match(text) and len(text) < 4 * _MAX_TEXT:
        stream.open[-1].piece = text
    return None


def _owner(stream: _Stream, line: Line, frame: Frame) -> _Open:
    if not stream.open:
        traceback = Traceback(
            stream=line.stream, first_line=line.number, last_line=line.number, truncated="start", thread=stream.thread
        )
        stream.open.append(_Open(traceback, 0))
    newest = max(stream.open, key=lambda one: one.traceback.last_line)
    if len(stream.open) == 1:
        return newest
    for one in sorted(stream.open, key=lambda one: len(one.hashes)):
        if _follows(one, hash((one.hashes[-1], frame)), stream.open):
            return one
    longest = max(stream.open, key=lambda one: len(one.hashes))
    behind = len(newest.hashes) > 1 and longest.hashes[: len(newest.hashes)] == newest.hashes
    return longest if behind else newest


def _follows(one: _Open, continued: int, others: list[_Open]) -> bool:
    """Another traceback went on like this from the same frames."""
    at = len(one.hashes)
    return any(len(other.hashes) > at and other.hashes[at] == continued for other in others if other is not one)


def _ends(stream: _Stream, number: int, text: str) -> _Open | None:
    """The open traceback whose exception this line is."""
    found = _EXCEPTION.match(text)
    if found is None or found["name"] in _NOT_EXCEPTIONS:
        return None
    candidates = [one for one in stream.open if len(found["indent"]) <= one.indent]
    if not candidates:
        return None
    owner = max(candidates, key=lambda one: len(one.traceback.frames))
    last = found["name"].rpartition(".")[2]
    if _LIKE_AN_EXCEPTION.search(last) or ("." in found["name"] and last in _LOWER_CASE):
        return owner
    named = last[0].isupper() and not last.isupper()
    return owner if named and owner.traceback.frames and number - owner.traceback.last_line <= MAX_SOURCE_LINES else None


def _close(stream: _Stream, owner: _Open, number: int, text: str) -> None:
    name, _, message = text.strip().partition(":")
    traceback = owner.traceback
    traceback.exception, traceback.message, traceback.last_line = name, message.strip()[:_MAX_TEXT], number
    stream.open.remove(owner)
    stream.ended = traceback


def _alone(stream: _Stream, line: Line, name: str, text: str) -> Traceback:
    """An exception whose frames were cut off, or never printed."""
    thread, stream.thread = stream.thread, ""
    return Traceback(
        stream=line.stream,
        first_line=line.number,
        last_line=line.number,
        thread=thread,
        truncated="start",
        exception=name,
        message=text.partition(":")[2].strip()[:_MAX_TEXT],
    )


def _pass(stream: _Stream, number: int, text: str, done: list[Traceback]) -> bool:
    """A source line or carets, which belong to a traceback, or something else between its lines, which does not."""
    source = text.startswith((" ", *_RICH)) or _CARETS.match(text) is not None
    newest = max(stream.open, key=lambda one: one.traceback.last_line, default=None)
    used = newest is not None and source and number - newest.traceback.last_line <= MAX_SOURCE_LINES
    if used and newest is not None and newest.traceback.last_line < number and not newest.piece:
        newest.traceback.last_line = number
    for one in [one for one in stream.open if number - one.traceback.last_line > _MAX_QUIET_LINES]:
        stream.open.remove(one)
        done.append(_cut(one.traceback))
    if stream.before is not None and number - stream.before.last_line > _MAX_QUIET_LINES:
        done.append(stream.before)
        stream.before = None
    if not stream.open and stream.before is None and text.strip():
        stream.thread = ""
    return used


def _end_message(stream: _Stream) -> list[Traceback]:
    ended, stream.ended = stream.ended, None
    return [ended] if ended is not None else []


def _cut(traceback: Traceback) -> Traceback:
    traceback.truncated = traceback.truncated or "end"
    return traceback


def _give_up(stream: _Stream) -> list[Traceback]:
    done = [_cut(one.traceback) for one in stream.open]
    return [*(one for one in (stream.ended, stream.before) if one is not None), *done]
