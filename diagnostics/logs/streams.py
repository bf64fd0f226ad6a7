"""What is open in one stream (rank) of a log: tracebacks of which frames, the message or the next one of a chain are awaited.

Where a log does not say whose a line is, several tracebacks can be open at once. A frame goes to the one that it continues as
another one already went on (ranks that fail alike), else to the one that is ahead of its likes, else to the one touched last.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diagnostics.logs.shapes import ExceptionLine, Frame
from diagnostics.logs.traceback import MAX_SOURCE_LINES, Traceback

MAX_FRAMES = 300
MAX_QUIET_LINES = 1000


@dataclass(slots=True)
class Open:
    """A traceback whose frames are being read."""

    traceback: Traceback
    indent: int
    touched: int  # the stream's line that was last taken into it
    piece: str = ""  # of a frame that a terminal wrapped
    _hashes: list[int] = field(default_factory=lambda: [0])

    @property
    def hashes(self) -> list[int]:
        """Of the first 0, 1, 2, ... frames. Computed only where several are open."""
        hashes, frames = self._hashes, self.traceback.frames
        while len(hashes) <= len(frames):
            hashes.append(hash((hashes[-1], frames[len(hashes) - 1])))
        return hashes

    def add(self, frame: Frame) -> None:
        """Take a frame; of too many one in the middle is left out."""
        frames = self.traceback.frames
        frames.append(frame)
        if len(frames) > MAX_FRAMES:
            del self.hashes[MAX_FRAMES // 2], frames[MAX_FRAMES // 2]

    def touch(self, number: int, at: int) -> None:
        """Line `number` of the log, line `at` of the stream, is a part of it."""
        self.traceback.last_line, self.touched = number, at


@dataclass(slots=True)
class Stream:
    """What is open in one stream. `at` counts its lines since something is open: where ranks are mixed, its own only."""

    open: list[Open] = field(default_factory=list)
    ended: Traceback | None = None  # its message is being read
    before: Traceback | None = None  # the next one of the chain is awaited
    link: str = ""
    thread: str = ""
    at: int = 0
    last_line: int = 0  # of the log, that was taken
    grouped: bool = False
    dated: bool = False  # the lines of what is being read carry dates
    wrapped: bool = False  # one of those open may wait for the rest of a frame

    @property
    def all(self) -> list[Traceback]:
        """Those of which anything is kept, without those printed before them in a chain."""
        return [*(one.traceback for one in self.open), *(one for one in (self.ended, self.before) if one is not None)]

    @property
    def is_empty(self) -> bool:
        """Nothing is awaited."""
        return not (self.open or self.ended or self.before or self.thread)

    @property
    def is_plain(self) -> bool:
        """One traceback is open, and nothing else needs a look."""
        return len(self.open) == 1 and not (self.grouped or self.wrapped or self.ended or self.before)

    @property
    def newest(self) -> Open:
        """The one touched last, of those open."""
        return self.open[0] if len(self.open) == 1 else max(self.open, key=lambda one: one.touched)

    def is_near(self, one: Open) -> bool:
        """Whether a line of source can belong to the last frame of `one`."""
        return self.at - one.touched <= MAX_SOURCE_LINES

    def owner(self, frame: Frame) -> Open:
        """Of those open, the one that a frame belongs to."""
        newest = self.newest
        if len(self.open) == 1:
            return newest
        by_length = sorted([(len(one.hashes), at, one) for at, one in enumerate(self.open)])
        for at, (length, _, one) in enumerate(by_length):
            continued = hash((one.hashes[-1], frame))
            for other_length, _, other in by_length[at + 1 :]:  # another traceback went on like this from the same frames
                if other_length > length and other.hashes[length] == continued:
                    return one
        longest = max(self.open, key=lambda one: len(one.hashes))
        behind = len(newest.hashes) > 1 and longest.hashes[: len(newest.hashes)] == newest.hashes
        return longest if behind else newest

    def ended_by(self, exception: ExceptionLine) -> Open | None:
        """The open traceback whose exception a line is."""
        candidates = [one for one in self.open if exception.indent <= one.indent]
        if not candidates:
            return None
        owner = candidates[0] if len(candidates) == 1 else max(candidates, key=lambda one: len(one.traceback.frames))
        if exception.sure:
            return owner
        return owner if exception.named and owner.traceback.frames and self.is_near(owner) else None

    def end_message(self, done: list[Traceback]) -> None:
        """The message of the one that ended is whole."""
        if self.ended is not None:
            done.append(self.ended)
            self.ended = None

    def give_up_quiet(self, number: int, done: list[Traceback]) -> None:
        """Hand over what was last touched long before line `number` of the log."""
        for one in [one for one in self.open if number - one.traceback.last_line > MAX_QUIET_LINES]:
            self.open.remove(one)
            done.append(cut(one.traceback))
        if self.before is not None and number - self.before.last_line > MAX_QUIET_LINES:
            done.append(self.before)
            self.before = None

    def give_up(self) -> list[Traceback]:
        """All, as far as they are read."""
        done = [cut(one.traceback) for one in self.open]
        return [*(one for one in (self.ended, self.before) if one is not None), *done]


def cut(traceback: Traceback) -> Traceback:
    """It has no end."""
    traceback.truncated = traceback.truncated or "end"
    return traceback
