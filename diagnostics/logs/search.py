"""One log, read once from its beginning: every failure goes into the groups. Time grows with the log, memory does not.

A block without a trigger (`recognise.GATES`) is only counted, unless a traceback or a dump is open. A line that a terminal has
wrapped in the middle of a message is put together with the next one.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from diagnostics.logs.dumps import Dump, DumpReader
from diagnostics.logs.encodings import Unreadable
from diagnostics.logs.groups import Groups, signature_of
from diagnostics.logs.reader import Line, blocks, lines
from diagnostics.logs.recognise import GATES, Match, digits_matter, gated, of_dump, of_line, of_traceback, stack_of
from diagnostics.logs.templates import keep, zeroed
from diagnostics.logs.traceback import Traceback
from diagnostics.logs.tracebacks import TracebackReader

_SWEEP_LINES = 5000
_PIECE_BYTES = 2048
_MAX_KNOWN, _MAX_KNOWN_BYTES = 512, 4000  # tracebacks, and what one of them says
_WRAPPED = 25  # characters, without what loggers put before: a terminal is not narrower


class LogSearch:
    """Reads one log, called `log`, into `groups`; `lines` and `bytes` count what it read."""

    def __init__(self, log: str, groups: Groups) -> None:
        self.log, self._groups = log, groups
        self._tracebacks, self._dumps = TracebackReader(), DumpReader()
        self._begun: tuple[Line, int] | None = None  # a line that may go on in the next one, and its number
        self._known: dict[tuple[object, ...], tuple[Match, bool, str]] = {}
        self.lines = 0
        self.bytes = 0

    def read(self, file: BinaryIO) -> None:
        """Read to the end. Raises Unreadable, and OSError of the file."""
        for block in blocks(file):
            self.bytes += len(block)
            self._read_block(block)
        self._take(self._tracebacks.finish(), self._dumps.finish())

    @property
    def _quiet(self) -> bool:
        return not (self._tracebacks.streams or self._dumps.open or self._begun)

    def _read_block(self, block: bytes) -> None:
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
        stop = block.find(b"\n", at + _PIECE_BYTES)
        feed, streams, dumps = self.feed, self._tracebacks.streams, self._dumps.open
        for raw in block[at : stop if stop >= 0 else len(block) - block.endswith(b"\n")].split(b"\n"):
            self.lines = number = self.lines + 1
            for line in lines(raw):
                feed(line, number)
            if number % _SWEEP_LINES == 0:
                self._take(self._tracebacks.sweep(number), self._dumps.sweep(number))
            at += len(raw) + 1
            if not (streams or dumps or self._begun):
                break
        return at

    def feed(self, line: Line, number: int) -> None:
        """Read line `number`."""
        undumped = line.shape.dump is None and not self._dumps.open
        if undumped and self._tracebacks.goes_on(line, number):
            self._begun = None
            return
        tracebacks: list[Traceback] = []
        dumps: list[Dump] = []
        used = False if undumped else self._dumps.feed(line, number, dumps)
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
            self._groups.add_line(self.log, match, number, line.stream, line.text)
        elif begun is None and len(line.text) >= _WRAPPED:
            self._begun = line, number

    def _take(self, tracebacks: list[Traceback], dumps: list[Dump]) -> None:
        for traceback in tracebacks:
            if traceback.is_stack:
                continue
            match, needed_tail, signature = self._recognised(traceback)
            self._groups.add_traceback(self.log, match, signature, traceback)
            if not needed_tail:
                self._take_tail(traceback)
        for dump in dumps:
            found = of_dump(dump)
            if found is not None:
                self._groups.add_dump(self.log, found, dump)

    def _recognised(self, traceback: Traceback) -> tuple[Match, bool, str]:
        """Its kind, whether that needed the lines after its message, and its signature; once for all that are alike."""
        texts = [zeroed(one.text.encode()) for one in traceback.chain]
        if sum(map(len, texts)) > _MAX_KNOWN_BYTES:
            return _recognise(traceback)
        key = tuple(
            [
                (one.exception, text, stack_of(one), one.truncated, one.interleaved)
                for one, text in zip(traceback.chain, texts, strict=True)
            ]
        )
        known = self._known.get(key)
        if known is None:
            known = _recognise(traceback)
            if not any(digits_matter(text) for text in texts):
                keep(self._known, key, known, _MAX_KNOWN)
        return known

    def _take_tail(self, traceback: Traceback) -> None:
        """What followed the message was not a part of it, as far as is known."""
        for one in traceback.chain:
            for number, text in one.tail:
                match = of_line(text)
                if match is not None:
                    self._groups.add_line(self.log, match, number, one.stream, text)


def _recognise(traceback: Traceback) -> tuple[Match, bool, str]:
    match, needed_tail = of_traceback(traceback)
    return match, needed_tail, signature_of(match[0], traceback)


def read_log(path: Path, groups: Groups) -> LogSearch:
    """Search one file. Raises Unreadable with what was found and what to do."""
    if path.is_dir():
        raise Unreadable("it is a folder: name log files, for example with a * at its end")
    search = LogSearch(str(path), groups)
    try:
        with path.open("rb") as file:
            search.read(file)
    except OSError as error:
        raise Unreadable(f"{error.strerror or error}: check the name and the right to read it") from error
    return search
