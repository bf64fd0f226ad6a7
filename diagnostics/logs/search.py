"""One log, read once from its beginning: every failure goes into the groups. Time grows with the log, memory does not.

A block without a trigger (`recognise.GATES`) is only counted, unless a traceback or a dump is open. A line that a terminal has
wrapped in the middle of a message is put together with the next one.
"""

from __future__ import annotations

import sys
from typing import BinaryIO

from diagnostics.logs.dumps import Dump, DumpReader
from diagnostics.logs.groups import Groups, signature_of
from diagnostics.logs.reader import Line, blocks, lines, templates
from diagnostics.logs.recognise import GATES, Match, digits_matter, gated, of_dump, of_line, of_traceback, stack_of
from diagnostics.logs.shapes import FRAME, SOURCE
from diagnostics.logs.templates import keep, zeroed, zeroed_lines
from diagnostics.logs.traceback import Traceback
from diagnostics.logs.tracebacks import TracebackReader

_SWEEP_LINES = 5000
_PIECE_BYTES, _MAX_PIECE_BYTES = 1 << 11, 1 << 16  # read at once: at first, and where nothing is quiet
_MAX_KNOWN, _MAX_KNOWN_BYTES = 512, 4000  # tracebacks, and what one of them says
_GO_ON = (SOURCE, FRAME)
_WRAPPED = 25  # characters, without what loggers put before: a terminal is not narrower


class LogSearch:
    """Reads one log, called `log`, into `groups`; `lines` and `bytes` count what it read."""

    def __init__(self, log: str, groups: Groups) -> None:
        self.log, self.groups = log, groups
        self._tracebacks, self._dumps = TracebackReader(), DumpReader()
        self._begun: tuple[Line, int] | None = None  # a line that may go on in the next one, and its number
        self._known: dict[tuple[object, ...], tuple[Match, bool, str]] = {}
        self._piece_bytes, self._swept = _PIECE_BYTES, 0
        self.lines = 0
        self.bytes = 0
        self.counted = range(sys.maxsize)  # failures that begin at these lines are counted

    def read(self, file: BinaryIO) -> None:
        """Read to the end. Raises Unreadable, and OSError of the file."""
        for block in blocks(file):
            self.read_block(block)
        self.finish()

    def finish(self) -> None:
        """Count what is still open at the end of the log."""
        self._take(self._tracebacks.finish(), self._dumps.finish())

    def is_open_since(self, number: int) -> bool:
        """Whether something that began at line `number` or before it is open."""
        begun = [one.first_line for one in self._dumps.open.values()] + ([self._begun[1]] if self._begun is not None else [])
        return min([self._tracebacks.first_line, *begun]) <= number

    @property
    def _quiet(self) -> bool:
        return not (self._tracebacks.streams or self._dumps.open or self._begun)

    def read_block(self, block: bytes) -> None:
        """Read whole lines."""
        self.bytes += len(block)
        at, end = 0, len(block)
        hits = [-1] * len(GATES)  # the end of each gate's next trigger
        while at < end:
            if at and self._quiet:  # a block's first line is always read: a trigger may need the line feed before it
                for number, gate in enumerate(GATES):
                    if hits[number] <= at:
                        found = gate.search(block, at - 1)
                        hits[number] = found.end() if found is not None else end + 1
                start = end if min(hits) > end else max(at, block.rfind(b"\n", at, min(hits)) + 1)
                self.lines += block.count(b"\n", at, start)
                at = start
                if min(hits) > end:
                    return
            at = self._read_lines(block, at)

    def _read_lines(self, block: bytes, at: int) -> int:
        """Read lines until nothing is open, or a few; where the next one begins."""
        stop = block.find(b"\n", at + self._piece_bytes)
        piece = block[at : stop if stop >= 0 else len(block) - block.endswith(b"\n")]
        raws = piece.split(b"\n")
        first = number = self.lines + 1
        goes_on, feed, streams, dumps = self._tracebacks.goes_on, self.feed, self._tracebacks.streams, self._dumps.open
        for number, (raw, key) in enumerate(zip(raws, zeroed_lines(piece, raws), strict=True), first):
            template = templates.get(key)
            if template is not None and template.is_ in _GO_ON and not dumps and goes_on(raw, template, number):
                self._begun = None
                continue
            for line in lines(raw, key):
                feed(line, number)
            if not (streams or dumps or self._begun):
                break
        self.lines = number
        self._piece_bytes = _PIECE_BYTES if self._quiet else _MAX_PIECE_BYTES
        if number - self._swept > _SWEEP_LINES:
            self._swept = number
            self._take(self._tracebacks.sweep(number), self._dumps.sweep(number))
        read = raws[: number - first + 1]
        return at + sum(map(len, read)) + len(read)

    def feed(self, line: Line, number: int) -> None:
        """Read line `number`."""
        tracebacks: list[Traceback] = []
        dumps: list[Dump] = []
        used = bool(line.shape.dump is not None or self._dumps.open) and self._dumps.feed(line, number, dumps)
        used = used or self._tracebacks.feed(line, number, tracebacks)
        if tracebacks or dumps:
            self._take(tracebacks, dumps)
        begun, self._begun = self._begun, None
        if not used and line.text and (begun is not None or gated(line.text)):
            self._match_line(line, number, begun)

    def _match_line(self, line: Line, number: int, begun: tuple[Line, int] | None) -> None:
        match = of_line(line.text)
        if match is None and begun is not None and begun[0].stream == line.stream:
            match = of_line(begun[0].text + line.text)
            line, number = begun if match is not None else (line, number)
        if match is not None:
            if number in self.counted:
                self.groups.add_line(self.log, match, number, line.stream, line.text)
        elif begun is None and len(line.text) >= _WRAPPED:
            self._begun = line, number

    def _take(self, tracebacks: list[Traceback], dumps: list[Dump]) -> None:
        for traceback in tracebacks:
            if traceback.is_stack or traceback.first_line not in self.counted:
                continue
            match, needed_tail, signature = self._recognised(traceback)
            self.groups.add_traceback(self.log, match, signature, traceback)
            if not needed_tail:
                self._take_tail(traceback)
        for dump in dumps:
            found = of_dump(dump)
            if found is not None and dump.first_line in self.counted:
                self.groups.add_dump(self.log, found, dump)

    def _recognised(self, traceback: Traceback) -> tuple[Match, bool, str]:
        """Its kind, whether that needed the lines after its message, and its signature; once for all that are alike."""
        if traceback.cause is None:
            texts = zeroed(traceback.text.encode())
            key: tuple[object, ...] = _what_decides(traceback, texts)
        else:
            each = [zeroed(one.text.encode()) for one in traceback.chain]
            texts = b"\n".join(each)
            key = tuple([_what_decides(one, text) for one, text in zip(traceback.chain, each, strict=True)])
        if len(texts) > _MAX_KNOWN_BYTES:
            return _recognise(traceback)
        known = self._known.get(key)
        if known is None:
            known = _recognise(traceback)
            if not digits_matter(texts):
                keep(self._known, key, known, _MAX_KNOWN)
        return known

    def _take_tail(self, traceback: Traceback) -> None:
        """What followed the message was not a part of it, as far as is known."""
        for one in traceback.chain:
            for number, text in one.tail:
                match = of_line(text)
                if match is not None:
                    self.groups.add_line(self.log, match, number, one.stream, text)


def _what_decides(traceback: Traceback, text: bytes) -> tuple[object, ...]:
    return traceback.exception, text, stack_of(traceback), traceback.truncated, traceback.interleaved


def _recognise(traceback: Traceback) -> tuple[Match, bool, str]:
    match, needed_tail = of_traceback(traceback)
    return match, needed_tail, signature_of(match[0], traceback)
