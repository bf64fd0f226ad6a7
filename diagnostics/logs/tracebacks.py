"""Tracebacks out of lines: chained, in threads, of interleaved ranks, cut off at either end, wrapped by a terminal.

Each stream (rank) is read by itself. Where a log does not say whose a line is, several tracebacks can be open at once, and
`streams` says whose a frame is; all say that they are `interleaved`. No traceback is dropped: one that never ends is handed
over as `truncated`.

Limits: frames beyond 300 are left out in the middle; a traceback is given up after 1000 lines that do not belong to it; of a
message of several lines the first 12 are kept; a frame that was wrapped behind its line number keeps half a name. An
exception class is known by its place and by a name such as Python's.
"""

from __future__ import annotations

import math
import re
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
from diagnostics.logs.streams import MAX_FRAMES, MAX_QUIET_LINES, Open, Stream, cut
from diagnostics.logs.templates import Template, keep
from diagnostics.logs.traceback import MAX_SOURCE_LINES, Traceback

_MAX_OPEN = 16  # of one stream
_MAX_STREAMS = 4096
_MAX_TAIL = 12
_MAX_CHAIN = 20
_MAX_KNOWN_SHAPES = 1024
_GROUP_BAR = re.compile(r"^\s*[|+](?:[-+ ]*\d[-+ ]*$)?\s?")
_ORDINARY = (OTHER, SOURCE)
_BEGINNINGS = (FRAME, HEADER, THREAD, EXCEPTION)
_known_shape = lru_cache(_MAX_KNOWN_SHAPES)(shape_of)
_known_frames: dict[bytes, Frame] = {}


class TracebackReader:
    """Feed it lines; it hands over each traceback once its end is known."""

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}  # those with something open: with none, lines without a trigger need not be fed
        self._plain: dict[str, Stream] = {}  # of these

    def goes_on(self, raw: bytes, template: Template, number: int) -> bool:
        """Whether line `number` is a frame or source of the only traceback open in its stream; then it was taken, as by `feed`.

        Most lines of a log full of tracebacks are that. `template` is the line's, and says that it may be.
        """
        stream = self._plain.get(template.stream(raw))
        if stream is None:
            return False
        one = stream.open[0]
        if number - one.traceback.last_line > MAX_QUIET_LINES:
            return False
        if template.is_ == SOURCE:
            if stream.at - one.touched >= MAX_SOURCE_LINES:
                return False
        else:
            frames = one.traceback.frames
            if len(frames) >= MAX_FRAMES:
                return False
            words = template.words(raw)
            frame = _known_frames.get(words)
            frames.append(keep(_known_frames, words, template.frame_in(words.decode())) if frame is None else frame)
        stream.at = at = stream.at + 1
        one.touched = at
        stream.last_line = one.traceback.last_line = number
        return True

    def feed(self, line: Line, number: int, done: list[Traceback]) -> bool:
        """Whether line `number` belongs to a traceback; tracebacks that it ends are added to `done`."""
        name = line.stream
        stream = self.streams.get(name)
        if stream is not None and number - stream.last_line > MAX_QUIET_LINES:
            done += self._give_up(name)
            stream = None
        if stream is None:
            if line.shape.is_ not in _BEGINNINGS:
                return False
            stream = self.streams[name] = Stream(last_line=number)
        stream.give_up_quiet(number, done)
        stream.at += 1
        used = _feed(stream, line, number, done)
        if used:
            stream.last_line = number
        if stream.is_plain:
            self._plain[name] = stream
        else:
            self._plain.pop(name, None)
            if stream.is_empty:
                del self.streams[name]
        if len(self.streams) > _MAX_STREAMS:
            done += self._give_up(next(iter(self.streams)))
        return used

    def end_message(self, name: str, done: list[Traceback]) -> bool:
        """The next line of this stream ends its message; whether nothing is open in it then."""
        stream = self.streams.get(name)
        if stream is None:
            return True
        if stream.open or stream.before or stream.thread or stream.grouped:
            return False
        self._plain.pop(name, None)
        done += self.streams.pop(name).give_up()
        return True

    @property
    def first_line(self) -> float:
        """Where the first of those that are open begins; infinite where none is."""
        return min((one.first_line for stream in self.streams.values() for one in stream.all), default=math.inf)

    def sweep(self, number: int) -> list[Traceback]:
        """Give up what was last touched long before line `number`; call it now and then."""
        done: list[Traceback] = []
        for name, stream in list(self.streams.items()):
            if number - stream.last_line > MAX_QUIET_LINES:
                done += self._give_up(name)
        return done

    def finish(self) -> list[Traceback]:
        """What is still open at the end of the log."""
        return [traceback for name in list(self.streams) for traceback in self._give_up(name)]

    def _give_up(self, name: str) -> list[Traceback]:
        self._plain.pop(name, None)
        return self.streams.pop(name).give_up()


def _feed(stream: Stream, line: Line, number: int, done: list[Traceback]) -> bool:
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
    stream.end_message(done)
    source = is_ == SOURCE or (shape.exception is not None and shape.exception.source)
    return _pass(stream, number, source or (is_ == BEGINS_FRAME and text.startswith(" ")), bool(text))


def _take(stream: Stream, line: Line, number: int, text: str, shape: Shape, done: list[Traceback]) -> bool:
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
        _take_frame(stream, line.stream, number, frame, done)
        return True
    if is_ == THREAD:
        stream.end_message(done)
        stream.thread = shape.text
        return True
    return shape.exception is not None and _take_exception(stream, line, number, text, shape.exception, done)


def _take_frame(stream: Stream, name: str, number: int, frame: Frame, done: list[Traceback]) -> None:
    stream.end_message(done)
    if not stream.open:
        traceback = Traceback(stream=name, first_line=number, last_line=number, truncated="start", thread=stream.thread)
        stream.open.append(Open(traceback, 0, stream.at))
    owner = stream.owner(frame)
    owner.add(frame)
    owner.touch(number, stream.at)


def _take_exception(stream: Stream, line: Line, number: int, text: str, exception: ExceptionLine, done: list[Traceback]) -> bool:
    owner = stream.ended_by(exception) if stream.open else None
    if owner is None and not exception.alone:
        return False
    stream.end_message(done)
    if owner is not None:
        stream.open.remove(owner)
        stream.ended = owner.traceback
    else:  # its frames were cut off, or never printed
        stream.ended = Traceback(stream=line.stream, first_line=number, last_line=number, thread=stream.thread, truncated="start")
        stream.thread = ""
    name, _, message = text.strip().partition(":")
    stream.ended.exception, stream.ended.message, stream.ended.last_line = name, message.strip()[:MAX_TEXT], number
    stream.dated = line.dated
    return True


def _begin(stream: Stream, name: str, number: int, header: Shape, done: list[Traceback]) -> None:
    stream.end_message(done)
    for one in [one for one in stream.open if one.traceback.truncated]:
        stream.open.remove(one)  # a stack that was only printed, or whose exception comes later and then stands alone
        done.append(one.traceback)
    if len(stream.open) >= _MAX_OPEN:
        done.append(cut(stream.open.pop(0).traceback))
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
    stream.open.append(Open(traceback, header.indent, stream.at))
    if len(stream.open) > 1:
        for one in stream.open:
            one.traceback.interleaved = True


def _wrapped(stream: Stream, text: str, shape: Shape) -> Frame | None:
    """The frame of a line that may be a piece of one: it is put together with the piece before it."""
    waiting = next((one for one in stream.open if one.piece), None)
    if waiting is not None:
        text, waiting.piece = waiting.piece + text, ""
        shape = shape_of_frame(text)
    stream.wrapped = any(one.piece for one in stream.open)
    if stream.open and shape.is_ is BEGINS_FRAME:
        stream.open[-1].piece, stream.wrapped = text, True
    return shape.frame


def _pass(stream: Stream, number: int, source: bool, filled: bool) -> bool:
    """A source line or carets, which belong to a traceback, or something else between its lines, which does not."""
    used = False
    if stream.open:
        newest = stream.newest
        used = source and stream.is_near(newest)
        if used and not newest.piece:
            newest.touch(number, stream.at)
    if filled and not stream.open and stream.before is None:
        stream.thread = ""
    return used
