"""One log, read once from its beginning: every failure goes into the groups. Time grows with the log, memory does not.

A block without a trigger (`recognise.GATES`) is only counted, unless a traceback or a dump is open. A line that a terminal has
wrapped in the middle of a message is put together with the next one.
"""

from __future__ import annotations

import sys
from typing import BinaryIO, NamedTuple

from diagnostics.logs import floods
from diagnostics.logs.dumps import Dump, DumpReader
from diagnostics.logs.floods import Run
from diagnostics.logs.groups import Group, Groups, signature_of, words_of
from diagnostics.logs.kinds import UNKNOWN, Sure
from diagnostics.logs.reader import Line, blocks, lines, template_for
from diagnostics.logs.recognise import GATES, Match, candidates, digits_matter, gated, of_dump, of_line, of_traceback, stack_of
from diagnostics.logs.shapes import FRAME, OTHER, SOURCE
from diagnostics.logs.streams import MAX_QUIET_LINES
from diagnostics.logs.templates import Template, keep, zeroed, zeroed_lines
from diagnostics.logs.traceback import Traceback
from diagnostics.logs.tracebacks import TracebackReader

_SWEEP_LINES = 5000
_PIECE_BYTES, _MAX_PIECE_BYTES = 1 << 11, 1 << 16  # read at once: at first, and where nothing is quiet
_MAX_KNOWN, _MAX_KNOWN_BYTES = 512, 4000  # tracebacks, and what one of them says
_GO_ON = (SOURCE, FRAME)
_MAX_RUNS = 256
_WRAPPED = 25  # characters, without what loggers put before: a terminal is not narrower


class _Noted(NamedTuple):
    group: Group | None
    match: Match
    signature: str


class LogSearch:
    """Reads one log, called `log`, into `groups`; `lines` and `bytes` count what it read."""

    def __init__(self, log: str, groups: Groups) -> None:
        self.log, self.groups = log, groups
        self._tracebacks, self._dumps = TracebackReader(), DumpReader()
        self._begun: tuple[Line, int] | None = None  # a line that may go on in the next one, and its number
        self._known: dict[tuple[object, ...], tuple[Match, bool, str]] = {}
        self._runs: dict[str, Run] = {}  # by stream
        self._known_frames: dict[floods.Key, str] = {}  # of unknown failures: the signature behind the message
        self._known_runs: dict[floods.Key, list[tuple[Group, Sure]]] = {}  # what they counted
        self._noted: list[_Noted] | None = None  # what is counted now, while a run is learned
        self._learning = ""  # its stream
        self._piece_bytes, self._swept = _PIECE_BYTES, 0
        self.lines = 0
        self.bytes = 0
        self.counted = range(sys.maxsize)  # failures that begin at these lines are counted

    def read(self, file: BinaryIO, end: int | None = None) -> None:
        """Read to byte `end`, or to the end. Raises Unreadable, and OSError of the file."""
        for block in blocks(file, end):
            self.read_block(block)
        self.finish()

    def finish(self) -> None:
        """Count what is still open at the end of the log."""
        for name in list(self._runs):
            self._read_run(name)
        self._take(self._tracebacks.finish(), self._dumps.finish())

    def is_open_since(self, number: int) -> bool:
        """Whether something that began at line `number` or before it is open."""
        begun = [one.first_line for one in self._dumps.open.values()] + ([self._begun[1]] if self._begun is not None else [])
        return min([self._tracebacks.first_line, *begun, *(run.first_line for run in self._runs.values())]) <= number

    @property
    def _quiet(self) -> bool:
        return not (self._tracebacks.streams or self._dumps.open or self._begun or self._runs)

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
        runs, streams, dumps = self._runs, self._tracebacks.streams, self._dumps.open
        for number, (raw, key) in enumerate(zip(raws, zeroed_lines(piece, raws), strict=True), first):
            template = template_for(raw, key)
            if template is None or template.is_ < 0 or dumps or not self._hold(raw, key, template, number):
                self._read_line(raw, key, template, number)
                if not (streams or dumps or self._begun or runs):
                    break
        self.lines = number
        self._piece_bytes = _PIECE_BYTES if self._quiet else _MAX_PIECE_BYTES
        if number - self._swept > _SWEEP_LINES:
            self._swept = number
            for name in [name for name, run in runs.items() if number - run.last_line > MAX_QUIET_LINES]:
                self._read_run(name)
            self._take(self._tracebacks.sweep(number), self._dumps.sweep(number))
        read = raws[: number - first + 1]
        return at + sum(map(len, read)) + len(read)

    def _hold(self, raw: bytes, key: bytes, template: Template, number: int) -> bool:
        """Whether line `number` is held back in a run: most lines of a log full of failures are."""
        name = template.stream(raw)
        run = self._runs.get(name)
        if run is not None:
            if not run.ends_before(template) and len(run.keys) < floods.MAX_LINES and number - run.last_line <= MAX_QUIET_LINES:
                run.add(raw, key, template, number)
                self._begun = None
                return True
            self._end_run(name, run) if run.ends_before(template) else self._read_run(name)
        if not template.begins_run or len(self._runs) >= _MAX_RUNS:
            return False
        done: list[Traceback] = []
        is_free = self._tracebacks.end_message(name, done)
        self._take(done, [])
        if is_free:
            self._runs[name] = run = Run()
            run.add(raw, key, template, number)
            self._begun = None
        return is_free

    def _end_run(self, name: str, run: Run) -> None:
        """Count a run whose message has ended: as before, where it came before."""
        key = run.key if run.first_line in self.counted and run.last_line in self.counted else None
        known = self._known_runs.get(key) if key is not None else None
        if known is not None and (all([group.is_full for group, _ in known]) or self._learned(run, known)):  # noqa: C419 - faster so
            del self._runs[name]
            for group, sure in known:
                group.count_one(sure, name)
            return
        unknown = run.frames if key is not None else None
        if key is not None and unknown is not None and self._counted_as_unknown(name, key, *unknown):
            del self._runs[name]
            return
        self._noted, self._learning = [], name
        self._read_run(name)
        done: list[Traceback] = []
        is_free = self._tracebacks.end_message(name, done)
        self._take(done, [])
        noted, self._noted = self._noted, None
        if key is not None and is_free and self._begun is None and not digits_matter(b"\n".join(key)):
            self._learn(key, unknown, noted)

    def _learned(self, run: Run, known: list[tuple[Group, Sure]]) -> bool:
        """Whether the numbers in the message are all that could be new in a run that came before; then they are noted."""
        ending = run.exception if len(known) == 1 and known[0][0].has_evidence else None
        if ending is None:
            return False
        exception, message = ending
        self.groups.learn(known[0][0], f"{exception}: {message}")
        return True

    def _learn(self, key: floods.Key, unknown: tuple[floods.Key, str, str] | None, noted: list[_Noted]) -> None:
        """Remember what a run counted."""
        grouped = [(one.group, one.match[1]) for one in noted if one.group is not None]
        if len(grouped) == len(noted):
            keep(self._known_runs, key, grouped, floods.MAX_KNOWN)
        if unknown is not None and [one.match[0] for one in noted] == [UNKNOWN]:
            frames, exception, message = unknown
            where = noted[0].signature.removeprefix(words_of(UNKNOWN, exception, message))
            keep(self._known_frames, frames, where, floods.MAX_KNOWN)

    def _counted_as_unknown(self, name: str, key: floods.Key, frames: floods.Key, exception: str, message: str) -> bool:
        """Whether a traceback was counted whose frames are those of an unknown failure, and whose message names no known one."""
        where = self._known_frames.get(frames)
        if where is None or candidates(f"{exception}: {message}" if message else exception):
            return False
        counted, group = self.groups.count_unknown(words_of(UNKNOWN, exception, message) + where, name)
        if counted and group is not None and not digits_matter(b"\n".join(key)):
            counts: list[tuple[Group, Sure]] = [(group, "possible")]
            keep(self._known_runs, key, counts, floods.MAX_KNOWN)
        return counted

    def _read_run(self, name: str) -> None:
        """Read the lines of a run one by one."""
        for raw, template, number in self._runs.pop(name).held:
            if template.is_ in _GO_ON and self._tracebacks.goes_on(raw, template, number):
                self._begun = None
            else:
                for line in lines(raw):
                    self.feed(line, number)

    def _read_line(self, raw: bytes, key: bytes, template: Template | None, number: int) -> None:
        if template is not None and template.is_ == OTHER and self._says_nothing(raw, key, template):
            self._begun = None
            return
        if template is not None and template.is_ in _GO_ON and self._tracebacks.goes_on(raw, template, number):
            self._begun = None
            return
        for line in lines(raw, key):
            if line.stream in self._runs:
                self._read_run(line.stream)
            self.feed(line, number)

    def _says_nothing(self, raw: bytes, key: bytes, template: Template) -> bool:
        """Whether a line has no trigger, and nothing of its stream is open."""
        name = template.stream(raw)
        if name in self._tracebacks.streams or name in self._dumps.open or name in self._runs:
            return False
        if self._begun is not None and self._begun[0].stream == name:
            return False
        if template.is_plain is None:
            template.is_plain = not (digits_matter(key) or gated(template.words(raw).decode()))
        return template.is_plain

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
                self._note(self.groups.add_line(self.log, match, number, line.stream, line.text), match, "", line.stream)
        elif begun is None and len(line.text) >= _WRAPPED:
            self._begun = line, number

    def _take(self, tracebacks: list[Traceback], dumps: list[Dump]) -> None:
        for traceback in tracebacks:
            if traceback.is_stack or traceback.first_line not in self.counted:
                continue
            match, needed_tail, signature = self._recognised(traceback)
            self._note(self.groups.add_traceback(self.log, match, signature, traceback), match, signature, traceback.stream)
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
                    self._note(self.groups.add_line(self.log, match, number, one.stream, text), match, "", one.stream)

    def _note(self, group: Group | None, match: Match, signature: str, stream: str) -> None:
        if self._noted is not None and stream == self._learning:
            self._noted.append(_Noted(group, match, signature))


def _what_decides(traceback: Traceback, text: bytes) -> tuple[object, ...]:
    return traceback.exception, text, stack_of(traceback), traceback.truncated, traceback.interleaved


def _recognise(traceback: Traceback) -> tuple[Match, bool, str]:
    match, needed_tail = of_traceback(traceback)
    return match, needed_tail, signature_of(match[0], traceback)
