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
from functools import lru_cache

from diagnostics.logs.reader import Line
from diagnostics.logs.shapes import (
    BEGINS_FRAME,
    EXCEPTION,
    FRAME,
    HEADER,
    LINK,
    MAX_TEXT,
    OTHER,
    SOURCE,
    THREAD,
    ExceptionLine,
    Frame,
    Shape,
    shape_of,
    shape_of_frame,
)
from diagnostics.logs.traceback import MAX_SOURCE_LINES, Traceback

_MAX_FRAMES = 300
_MAX_OPEN = 16  # of one stream
_MAX_STREAMS = 4096
_MAX_QUIET_LINES = 1000
_MAX_TAIL = 12
_MAX_CHAIN = 20
_MAX_KNOWN_SHAPES = 1024
_GROUP_BAR = re.compile(r"^\s*[|+](?:[-+ ]*\d[-+ ]*$)?\s?")


@dataclass(slots=True)
class _Open:
    traceback: Traceback
    indent: int
    piece: str = ""  # of a frame that a terminal wrapped
    _hashes: list[int] = field(default_factory=lambda: [0])

    @property
    def hashes(self) -> list[int]:
        """Of the first 0, 1, 2, ... frames. Computed only where several are open."""
        hashes, frames = self._hashes, self.traceback.frames
        while len(hashes) <= len(frames):
            hashes.append(hash((hashes[-1], frames[len(hashes) - 1])))
        return hashes

    def add(self, frame: Frame, number: int) -> None:
        traceback = self.traceback
        traceback.frames.append(frame)
        traceback.last_line = number
        if len(traceback.frames) > _MAX_FRAMES:
            del self.hashes[_MAX_FRAMES // 2], traceback.frames[_MAX_FRAMES // 2]


@dataclass(slots=True)
class _Stream:
    open: list[_Open] = field(default_factory=list)  # frames are being read
    ended: Traceback | None = None  # its message is being read
    before: Traceback | None = None  # the next one of the chain is awaited
    link: str = ""
    thread: str = ""
    grouped: bool = False
    dated: bool = False  # the lines of what is being read carry dates
    wrapped: bool = False  # one of those open may wait for the rest of a frame

    @property
    def newest(self) -> _Open:
        """The one touched last, of those open."""
        return self.open[0] if len(self.open) == 1 else max(self.open, key=lambda one: one.traceback.last_line)


class TracebackReader:
    """Feed it lines; it hands over each traceback once its end is known."""

    def __init__(self) -> None:
        self.streams: dict[str, _Stream] = {}  # those with something open: with none, lines without a trigger need not be fed

    def goes_on(self, line: Line, number: int) -> bool:
        """Whether line `number` is a frame or source of the only traceback open in its stream; then it was taken, as by `feed`.

        Most lines of a log full of tracebacks are that.
        """
        stream = self.streams.get(line.stream)
        if (
            stream is None
            or len(stream.open) != 1
            or stream.grouped
            or stream.wrapped
            or stream.ended is not None
            or stream.before is not None
        ):
            return False
        if line.shape.is_ == SOURCE:
            traceback = stream.open[0].traceback
            if number - traceback.last_line <= MAX_SOURCE_LINES:
                traceback.last_line = number
                return True
        elif line.shape.is_ == FRAME and line.shape.frame is not None:
            stream.open[0].add(line.shape.frame, number)
            return True
        return False

    def feed(self, line: Line, number: int, done: list[Traceback]) -> bool:
        """Whether line `number` belongs to a traceback; tracebacks that it ends are added to `done`."""
        stream = self.streams.get(line.stream)
        if stream is None:
            if line.shape.is_ not in _BEGINNINGS:
                return False
            stream = self.streams[line.stream] = _Stream()
        used = _feed(stream, line, number, done)
        if not (stream.open or stream.ended or stream.before or stream.thread):
            del self.streams[line.stream]
        elif len(self.streams) > _MAX_STREAMS:
            done += _give_up(self.streams.pop(next(iter(self.streams))))
        return used

    def sweep(self, number: int) -> list[Traceback]:
        """Give up what was last touched long before line `number`; call it now and then."""
        done: list[Traceback] = []
        for name in list(self.streams):
            stream = self.streams[name]
            touched = [one.traceback.last_line for one in stream.open]
            touched += [one.last_line for one in (stream.ended, stream.before) if one is not None]
            if number - max(touched, default=0) > _MAX_QUIET_LINES:
                done += _give_up(self.streams.pop(name))
        return done

    def finish(self) -> list[Traceback]:
        """What is still open at the end of the log."""
        done = [traceback for stream in self.streams.values() for traceback in _give_up(stream)]
        self.streams.clear()
        return done


_ORDINARY = (OTHER, SOURCE)
_BEGINNINGS = (FRAME, HEADER, THREAD, EXCEPTION)
_known_shape = lru_cache(_MAX_KNOWN_SHAPES)(shape_of)


def _feed(stream: _Stream, line: Line, number: int, done: list[Traceback]) -> bool:
    text, shape = line.text, line.shape
    if stream.grouped:
        text = _GROUP_BAR.sub("", text)
        shape = (_known_shape if len(text) < MAX_TEXT else shape_of)(text)
    is_ = shape.is_
    if (stream.wrapped or is_ not in _ORDINARY) and _take(stream, line, number, text, shape, done):
        return True
    ended = stream.ended
    if ended is not None and len(ended.tail) < _MAX_TAIL and line.dated == stream.dated:
        ended.tail.append((number, text[:MAX_TEXT]))
        return True
    _end_message(stream, done)
    source = is_ == SOURCE or (shape.exception is not None and shape.exception.source)
    return _pass(stream, number, source or (is_ == BEGINS_FRAME and text.startswith(" ")), bool(text), done)


def _take(stream: _Stream, line: Line, number: int, text: str, shape: Shape, done: list[Traceback]) -> bool:
    """Whether the line is a part of a traceback by its shape; then it has been taken into it."""
    is_ = shape.is_
    if is_ == HEADER:
        _begin(stream, line.stream, number, shape, done)
        return True
    if is_ == LINK and stream.ended is not None:
        stream.before, stream.ended, stream.link = stream.ended, None, shape.text
        return True
    frame = _wrapped(stream, text, shape) if stream.wrapped or is_ == BEGINS_FRAME else shape.frame
    if frame is not None:
        _end_message(stream, done)
        _owner(stream, line.stream, number, frame).add(frame, number)
        return True
    if is_ == THREAD:
        _end_message(stream, done)
        stream.thread = shape.text
        return True
    return shape.exception is not None and _take_exception(stream, line, number, text, shape.exception, done)


def _take_exception(stream: _Stream, line: Line, number: int, text: str, exception: ExceptionLine, done: list[Traceback]) -> bool:
    owner = _ends(stream, number, exception) if stream.open else None
    if owner is None and not exception.alone:
        return False
    _end_message(stream, done)
    if owner is not None:
        _close(stream, owner, number, text)
    else:
        stream.ended = _alone(stream, line.stream, number, exception.name, text)
    stream.dated = line.dated
    return True


def _begin(stream: _Stream, name: str, number: int, header: Shape, done: list[Traceback]) -> None:
    _end_message(stream, done)
    for one in [one for one in stream.open if one.traceback.truncated]:
        stream.open.remove(one)  # a stack that was only printed, or whose exception comes later and then stands alone
        done.append(one.traceback)
    if len(stream.open) >= _MAX_OPEN:
        done.append(_cut(stream.open.pop(0).traceback))
    before, stream.before = stream.before, None
    if before is not None and before.cause is not None and sum(1 for _ in before.chain) >= _MAX_CHAIN:
        done.append(before)
        before = None
    traceback = Traceback(
        stream=name,
        thread=stream.thread or (before.thread if before else ""),
        first_line=number,
        last_line=number,
        cause=before,
        link=stream.link if before else "",
    )
    stream.thread, stream.grouped = "", stream.grouped or header.group
    stream.open.append(_Open(traceback, header.indent))
    if len(stream.open) > 1:
        for one in stream.open:
            one.traceback.interleaved = True


def _wrapped(stream: _Stream, text: str, shape: Shape) -> Frame | None:
    """The frame of a line that may be a piece of one: it is put together with the piece before it."""
    waiting = next((one for one in stream.open if one.piece), None)
    if waiting is not None:
        text, waiting.piece = waiting.piece + text, ""
        shape = shape_of_frame(text)
    stream.wrapped = any(one.piece for one in stream.open)
    if stream.open and shape.is_ is BEGINS_FRAME:
        stream.open[-1].piece, stream.wrapped = text, True
    return shape.frame


def _owner(stream: _Stream, name: str, number: int, frame: Frame) -> _Open:
    if not stream.open:
        traceback = Traceback(stream=name, first_line=number, last_line=number, truncated="start", thread=stream.thread)
        stream.open.append(_Open(traceback, 0))
    newest = stream.newest
    if len(stream.open) == 1:
        return newest
    by_length = sorted([(len(one.hashes), at, one) for at, one in enumerate(stream.open)])
    for at, (length, _, one) in enumerate(by_length):
        continued = hash((one.hashes[-1], frame))
        for other_length, _, other in by_length[at + 1 :]:  # another traceback went on like this from the same frames
            if other_length > length and other.hashes[length] == continued:
                return one
    longest = max(stream.open, key=lambda one: len(one.hashes))
    behind = len(newest.hashes) > 1 and longest.hashes[: len(newest.hashes)] == newest.hashes
    return longest if behind else newest


def _ends(stream: _Stream, number: int, exception: ExceptionLine) -> _Open | None:
    """The open traceback whose exception this line is."""
    candidates = [one for one in stream.open if exception.indent <= one.indent]
    if not candidates:
        return None
    owner = candidates[0] if len(candidates) == 1 else max(candidates, key=lambda one: len(one.traceback.frames))
    if exception.sure:
        return owner
    near = owner.traceback.frames and number - owner.traceback.last_line <= MAX_SOURCE_LINES
    return owner if exception.named and near else None


def _close(stream: _Stream, owner: _Open, number: int, text: str) -> None:
    name, _, message = text.strip().partition(":")
    traceback = owner.traceback
    traceback.exception, traceback.message, traceback.last_line = name, message.strip()[:MAX_TEXT], number
    stream.open.remove(owner)
    stream.ended = traceback


def _alone(stream: _Stream, stream_name: str, number: int, name: str, text: str) -> Traceback:
    """An exception whose frames were cut off, or never printed."""
    thread, stream.thread = stream.thread, ""
    return Traceback(
        stream=stream_name,
        first_line=number,
        last_line=number,
        thread=thread,
        truncated="start",
        exception=name,
        message=text.partition(":")[2].strip()[:MAX_TEXT],
    )


def _pass(stream: _Stream, number: int, source: bool, filled: bool, done: list[Traceback]) -> bool:
    """A source line or carets, which belong to a traceback, or something else between its lines, which does not."""
    used = False
    if stream.open:
        if source and number - (newest := stream.newest).traceback.last_line <= MAX_SOURCE_LINES:
            used = True
            if not newest.piece:
                newest.traceback.last_line = number
        if any(number - one.traceback.last_line > _MAX_QUIET_LINES for one in stream.open):
            _give_up_quiet(stream, number, done)
    if stream.before is not None and number - stream.before.last_line > _MAX_QUIET_LINES:
        done.append(stream.before)
        stream.before = None
    if filled and not stream.open and stream.before is None:
        stream.thread = ""
    return used


def _give_up_quiet(stream: _Stream, number: int, done: list[Traceback]) -> None:
    for one in [one for one in stream.open if number - one.traceback.last_line > _MAX_QUIET_LINES]:
        stream.open.remove(one)
        done.append(_cut(one.traceback))


def _end_message(stream: _Stream, done: list[Traceback]) -> None:
    if stream.ended is not None:
        done.append(stream.ended)
        stream.ended = None


def _cut(traceback: Traceback) -> Traceback:
    traceback.truncated = traceback.truncated or "end"
    return traceback


def _give_up(stream: _Stream) -> list[Traceback]:
    done = [_cut(one.traceback) for one in stream.open]
    return [*(one for one in (stream.ended, stream.before) if one is not None), *done]
