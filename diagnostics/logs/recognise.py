"""Which kind of failure a line or a traceback is, and how sure. One expression looks for all marks, only then one by one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from diagnostics.logs import kinds_gpu, kinds_machine, kinds_threads
from diagnostics.logs.dumps import Dump
from diagnostics.logs.kinds import UNKNOWN, Kind, Mark, Sure
from diagnostics.logs.templates import once_for_all_digits
from diagnostics.logs.traceback import Traceback

KINDS = (*kinds_threads.KINDS, *kinds_gpu.KINDS, *kinds_machine.KINDS)
BY_ID = {kind.id: kind for kind in (*KINDS, UNKNOWN)}
Match = tuple[Kind, Sure]
_GATE_CHARACTERS = 14  # of a mark: enough to be rare, few enough to stand before a terminal's line break
# What stands before a trigger that begins with a small letter: it begins a word, or follows a colour's `m`.
_BEFORE_SMALL = r"""[ \t\n\r\[({:=.'"`,;/|>*\-m]"""
_GENERAL = ("compile-error", "unknown")  # say less than any other kind that fits
_SURE: tuple[Sure, ...] = ("certain", "likely", "possible")
_HIJACKED = re.compile(r"torch/fx/_symbolic_trace\.py:module_call_wrapper")
_OWN_TRACE = re.compile(
    r"torch/fx/_symbolic_trace\.py:(?:trace|symbolic_trace)$|proxy_tensor\.py:(?:trace|_trace_inner|dispatch_trace|wrapped)$|"
    r"torch/export/|torch/_export/",
    re.MULTILINE,
)
_STRUCTURE = (
    "Traceback (most",
    'File "',
    "(most recent call f",
    "Exception in thread",
    "Error",
    "Exception",
    "Interrupt",
    "Fatal Python",
    "(idle",
    "(active",
    "Timeout (",
)


def any_of(texts: Iterable[str]) -> str:
    """An expression for any of `texts`, in groups by first character: much faster than one long alternation."""
    groups: dict[str, list[str]] = defaultdict(list)
    wanted = sorted(set(texts), key=len)
    for text in wanted:
        if not any(short != text and short in text for short in wanted):
            groups[text[0]].append(re.escape(text[1:]))
    return "|".join(f"{re.escape(first)}(?:{'|'.join(rest)})" for first, rest in sorted(groups.items()))


_ALL_MARKS = [mark for kind in KINDS for mark in kind.marks]
_TRIGGERS = [*_STRUCTURE, *(mark.text[:_GATE_CHARACTERS] for mark in _ALL_MARKS)]
_SMALL = [trigger for trigger in _TRIGGERS if trigger[0].islower()]
_FIRST = "".join(sorted({trigger[0] for trigger in _SMALL}))
# Two searches, because each stops at every character that one of its triggers can begin with, and small letters are everywhere.
GATES = (
    re.compile(any_of(set(_TRIGGERS) - set(_SMALL)).encode()),
    re.compile(f"{_BEFORE_SMALL}(?=[{_FIRST}])(?:{any_of(_SMALL)})".encode()),
)
_TABLE = [(mark.squeezed, kind, mark) for kind in KINDS for mark in kind.marks]
# Names of classes stand in every traceback, so they are looked for one by one, and the other marks by one expression.
_CLASSES = [entry for entry in _TABLE if re.fullmatch(r"\w+(?:Error|Exception)", entry[0])]
_BY_FREQUENCY = "eatinsorldcumpfghwybvkxjqz"
_COMMON = _BY_FREQUENCY[:17]


def _rare_end(words: str) -> str:
    """A mark from its rarest letter on: one expression for these stops at few letters of a text."""
    starts = range(max(1, len(words) - 3))
    return words[max(starts, key=lambda at: _BY_FREQUENCY.find(words[at]) % len(_BY_FREQUENCY + " ")) :]


_ENDS = {_rare_end(words) for words in {words for words, _, _ in _TABLE} - {words for words, _, _ in _CLASSES}}
_COMMON_ENDS = [words for words in _ENDS if words[0] in _COMMON]
_RARE_ENDS = re.compile(any_of(_ENDS - set(_COMMON_ENDS)))


# Where the digits of a mark stand, which digits they are has to be looked at.
_WITH_DIGITS = {
    *("".join(words.split()) for words in (*_TRIGGERS, *(mark.text for mark in _ALL_MARKS)) if re.search(r"\d", words)),
    *(word for mark in _ALL_MARKS for word in re.findall(r"\w*\d\w*", re.sub(r"\\d|\[[^]]*\]|\{[^}]*\}", " ", mark.pattern))),
}
_ZEROED_MARKS = {re.sub(r"\d", "0", words).encode() for words in _WITH_DIGITS}


def digits_matter(text: bytes) -> bool:
    """Whether a mark with digits may be in a text that has 0 for each digit."""
    squeezed = b"".join(text.split())
    return any([words in squeezed for words in _ZEROED_MARKS])  # noqa: C419 - faster so


def _gated(text: str) -> bool:
    """Whether one line has a trigger."""
    line = f"\n{text}".encode()
    return any(gate.search(line) for gate in GATES)


gated = once_for_all_digits(_gated, digits_matter)


def of_line(text: str) -> Match | None:
    """The kind of a line that is no part of a traceback."""
    candidates = _known_candidates(text)
    return _best([(kind, mark.sure) for kind, mark in candidates if not mark.stack]) if candidates else None


def of_traceback(traceback: Traceback) -> tuple[Match, bool]:
    """The kind of a traceback with its causes, `unknown` included, and whether lines after its message were needed."""
    alone = traceback.cause is None
    matches = (
        _of_words(traceback.head, traceback)
        if alone
        else [match for one in traceback.chain for match in _of_words(one.head, one)]
    )
    found = best = _best(matches) if matches else None
    if best is not None and best[0].id not in _GENERAL:
        return best, False
    if not alone or traceback.tail:  # else its text was its head
        found = _best([*matches, *(match for one in traceback.chain for match in _of_words(one.text, traceback))])
    if found is None:
        return ((BY_ID["F4"], "likely") if _hijacked(traceback) else (UNKNOWN, "possible")), False
    return found, found != best


def _hijacked(traceback: Traceback) -> bool:
    if traceback.truncated:
        return False
    stack = stack_of(traceback)
    return bool(_HIJACKED.search(stack)) and not _OWN_TRACE.search(stack)


def _of_words(text: str, traceback: Traceback) -> list[Match]:
    """What `text` means, said with this stack."""
    candidates = _candidates(text)
    if not candidates:
        return []
    stack = stack_of(traceback)
    fitting = ((kind, mark.sure) for kind, mark in candidates if not mark.stack or re.search(mark.stack, stack))
    return [_whose(match, traceback, stack) for match in fitting]


def stack_of(traceback: Traceback) -> str:
    """A line "file:function" for each frame."""
    return "\n".join([f"{file}:{function}" for file, _, function in traceback.frames])


def of_dump(dump: Dump) -> Match | None:
    """What a dump of all threads shows: never certain, since it is one look."""
    if dump.deadlock is not None:
        return BY_ID["F8"], "likely"
    if dump.in_collectives and (dump.cause.startswith("Timeout") or len(dump.in_collectives) > 1):
        return BY_ID["stuck-collective"], "likely"
    if dump.in_collectives:
        return BY_ID["stuck-collective"], "possible"
    return of_line(dump.cause)


def _candidates(text: str) -> tuple[tuple[Kind, Mark], ...]:
    """Kinds with a mark that is in `text`, whatever the stack."""
    squeezed = "".join(text.split())
    special = _RARE_ENDS.search(squeezed) or any([end in squeezed for end in _COMMON_ENDS])  # noqa: C419 - faster so
    table = _TABLE if special else _CLASSES
    return tuple([(kind, mark) for words, kind, mark in table if words in squeezed and _fits(mark, text)])


_known_candidates = once_for_all_digits(_candidates, digits_matter)


def _fits(mark: Mark, text: str) -> bool:
    if not mark.pattern or re.search(mark.pattern, text):
        return True
    spaced = " ".join(text.split())
    return spaced != text and re.search(mark.pattern, spaced) is not None


def _whose(match: Match, traceback: Traceback, stack: str) -> Match:
    """F1 within one thread is another failure: the stack shows whose the trace is, where it is whole."""
    if match[0].id != "F1":
        return match
    if _OWN_TRACE.search(stack):
        return BY_ID["F1-own"], "likely" if traceback.interleaved else "certain"
    if traceback.truncated or traceback.interleaved or not traceback.frames:
        return match[0], "possible"
    return match[0], "certain" if _HIJACKED.search(stack) else "likely"


def _best(matches: list[Match]) -> Match | None:
    """The one that says most: a cause before its consequence, a special kind before a general one, the surest."""
    return min(
        matches,
        default=None,
        key=lambda match: (match[0].id in _GENERAL, match[0].severity == "info", match[0].follows, _SURE.index(match[1])),
    )
