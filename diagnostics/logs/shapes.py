"""What a line of a log is by its words alone, whatever stands before it: the readers of tracebacks and of dumps decide by this.

A shape depends on the text only, so it is found once for a line that is printed again and again. Cheap looks at the first
characters come before any expression: most lines are none of this.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_TEXT = 1000  # characters of one line of a message
_HEADER = re.compile(r"^(?P<before>.*?)(?P<group>Exception Group )?Traceback \(most recent call last\)")
_FRAME = re.compile(r'^\s*File "(.+?)", line (\d+)(?:, in (.*))?$')
_DUMPED_FRAME_BEGINS = re.compile(r'^\s*File "[^"]*", line \d+ in ')
_RICH_FRAME = re.compile(r"^\s*│\s+(\S+?):(\d+) in (\S+)")
_RICH = ("│", "╭", "╰")
_CARETS = re.compile(r"^\s*[\^~]+\s*$")
_IN_THREAD = re.compile(r"^Exception in thread (.+?)(?: \(.*\))?:$")
_LINKS = {
    "During handling of the above exception, another exception occurred:": "while it was handled",
    "The above exception was the direct cause of the following exception:": "caused by it",
}
_EXCEPTION = re.compile(r"^(\s*)((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?::(?:\s.*)?)?$")
_ALONE = ("Error", "Exception", "Interrupt")
_LIKE_AN_EXCEPTION = re.compile(
    r"(?:Error|Exception|Interrupt|Exit|Warning|Failed|Failure|Group|Timeout|Unsupported|Hit|Iteration|Refused|Closed|Empty|Full|"
    r"Aborted|Cancelled|NotFound|Fault|Unreadable)$"
)
_LOWER_CASE = {"error", "timeout", "gaierror", "herror"}
_NOT_EXCEPTIONS = {"Epoch", "Step", "Loss", "Note", "Rank", "Time", "Iter", "Progress", "Info", "Warning", "Error", "Debug"}
_FAULTHANDLER = re.compile(r"^(?:Current thread|Thread) 0x(?P<id>[0-9a-f]+)(?: \[(?P<name>.*)\])? \(most recent call first\):")
_PY_SPY = re.compile(r'^Thread (?P<id>\w+) \((?P<state>idle|active)[^)]*\)(?:: "(?P<name>.*)")?$')
_DUMPED_FRAME = re.compile(r'^\s+File "(.+?)", line (\d+) in (.+)$')
_PY_SPY_FRAME = re.compile(r"^\s+(\S.*) \(([^()]+):(\d+)\)$")
_CAUSE = re.compile(r"^(?P<cause>Fatal Python error: .+|Timeout \(.+\)!|Process \d+: .*|Python v\d.*)$")
_THREADS = ("Thread ", "Current thread ")
_BEGINNINGS = (*_THREADS, "Fatal Python error", "Timeout (", "Process ")
_DUMP_HEADS = (*_BEGINNINGS, "Python v")


class Frame(NamedTuple):
    """One call."""

    file: str
    line: int
    function: str


class ThreadHead(NamedTuple):
    """The line before a thread's frames in a dump."""

    name: str
    active: bool


class DumpPart(NamedTuple):
    """What a line can be in a dump of all threads: `begins` one, or is one of the others inside it."""

    begins: bool
    cause: str = ""
    thread: ThreadHead | None = None
    frame: Frame | None = None
    py_spy_frame: Frame | None = None


# What a line can be in a traceback. Plain numbers: they are compared at every line.
OTHER = 0
SOURCE = 1  # a line of source, or carets: if it stands after a frame
FRAME = 2
BEGINS_FRAME = 3  # and a terminal wrapped it
HEADER = 4
LINK = 5  # between the tracebacks of a chain
THREAD = 6  # names the thread of the next traceback
EXCEPTION = 7  # if it stands at a traceback's end


class ExceptionLine(NamedTuple):
    """A line that begins with a name as exceptions have. `sure`: no other line does; `alone`: known without a traceback."""

    indent: int
    name: str
    sure: bool
    named: bool  # with a capital first letter: enough next to a frame
    alone: bool
    source: bool  # it may as well be a line of source


Span = tuple[int, int]
Spans = tuple[Span, Span, Span]


class Shape(NamedTuple):
    """One line. Which of the others are filled follows from `is_`."""

    is_: int
    dump: DumpPart | None = None
    text: str = ""  # of a link, a thread
    frame: Frame | None = None
    exception: ExceptionLine | None = None
    indent: int = 0  # of a header
    group: bool = False  # a header of an exception group


_OTHER, _SOURCE = Shape(OTHER), Shape(SOURCE)


def shape_of(text: str) -> Shape:
    """The shape of a line without what loggers put before it and without blanks at its end."""
    if not text:
        return _OTHER
    if "Traceback (most" in text and (header := _HEADER.match(text)) is not None:
        before = header["before"]
        indent = 0 if before.strip() else len(before)
        return Shape(HEADER, _part_of_dump(text), indent=indent, group=header["group"] is not None)
    words = text.lstrip()
    if words.startswith('File "'):
        return shape_of_frame(text)
    if words[:1] == "│" and (rich := _RICH_FRAME.match(text)) is not None:
        return Shape(FRAME, _part_of_dump(text), frame=Frame(rich[1], int(rich[2]), rich[3]))
    return _shape_of_words(text, words)


def _shape_of_words(text: str, words: str) -> Shape:
    dump = _part_of_dump(text)
    source = text.startswith((" ", *_RICH)) or (words[:1] in ("^", "~") and _CARETS.match(text) is not None)
    name = words.partition(":")[0]
    if not (" " in name or "(" in name) and (found := _EXCEPTION.match(text)) and found[2] not in _NOT_EXCEPTIONS:
        return Shape(EXCEPTION, dump, exception=_exception(len(found[1]), found[2], text, source))
    if text in _LINKS:
        return Shape(LINK, dump, text=_LINKS[text])
    if text.startswith("Exception in") and (thread := _IN_THREAD.match(text)) is not None:
        return Shape(THREAD, dump, text=thread[1])
    if dump is not None:
        return Shape(SOURCE if source else OTHER, dump)
    return _SOURCE if source else _OTHER


def shape_of_frame(text: str) -> Shape:
    """The shape of a line whose first word is `File`, with a quotation mark behind it."""
    found = _FRAME.match(text)
    if found is not None:
        file, line, function = found.groups()
        # With one line number, and a comma or nothing behind it, it is no frame of a dump.
        dump = None if text.count('", line ') == 1 and text[-1] != ")" else _part_of_dump(text)
        return Shape(FRAME, dump, frame=Frame(file, int(line), function.strip() if function else ""))
    begins = _DUMPED_FRAME_BEGINS.match(text) is None and len(text) < 4 * MAX_TEXT
    is_ = BEGINS_FRAME if begins else SOURCE if text[0] == " " else OTHER
    return Shape(is_, _part_of_dump(text))


def spans_of(text: str, shape: Shape) -> Spans | None:
    """Where the parts of the one frame in `text` stand, None where there is no or more than one frame."""
    if shape.exception is not None or (shape.frame is None and shape.dump is None):
        return None
    frames = [(shape.frame, _FRAME, (1, 2, 3))]
    if shape.dump is not None:
        frames += [(shape.dump.frame, _DUMPED_FRAME, (1, 2, 3)), (shape.dump.py_spy_frame, _PY_SPY_FRAME, (2, 3, 1))]
    frames = [one for one in frames if one[0] is not None]
    if len(frames) != 1:
        return None
    frame, pattern, (file, line, function) = frames[0]
    found = pattern.match(text)
    if found is None or frame != (found[file], int(found[line]), found[function]):
        return None
    return found.span(file), found.span(line), found.span(function)


def _exception(indent: int, name: str, text: str, source: bool) -> ExceptionLine:
    last = name.rpartition(".")[2]
    sure = _LIKE_AN_EXCEPTION.search(last) is not None or ("." in name and last in _LOWER_CASE)
    alone = not indent and name.endswith(_ALONE) and len(text) != len(name) + 1  # a bare colon follows other things too
    return ExceptionLine(indent, name, sure, last[0].isupper() and not last.isupper(), alone, source)


def _part_of_dump(text: str) -> DumpPart | None:
    if text[0].isspace():
        frame = _frame(_DUMPED_FRAME.match(text)) if 'File "' in text else None
        py_spy = _PY_SPY_FRAME.match(text) if text[-1] == ")" and text[-2].isdigit() else None
        if frame is None and py_spy is None:
            return None
        inner = Frame(py_spy[2], int(py_spy[3]), py_spy[1]) if py_spy is not None else None
        return DumpPart(frame is not None and text.startswith('  File "'), frame=frame, py_spy_frame=inner)
    if not text.startswith(_DUMP_HEADS):
        return None
    cause, thread = _CAUSE.match(text), _thread(text)
    if cause is None and thread is None:
        return None
    return DumpPart(text.startswith(_BEGINNINGS), cause["cause"] if cause is not None else "", thread)


def _frame(found: re.Match[str] | None) -> Frame | None:
    return Frame(found[1], int(found[2]), found[3]) if found is not None else None


def _thread(text: str) -> ThreadHead | None:
    if (found := _FAULTHANDLER.match(text)) is not None:
        return ThreadHead(found["name"] or f"thread 0x{found['id'].lstrip('0')}", active=False)
    if (found := _PY_SPY.match(text)) is not None:
        return ThreadHead(found["name"] or f"thread {found['id']}", active=found["state"] == "active")
    return None
