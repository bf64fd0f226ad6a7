"""Laws of looking at a log's lines once: what is remembered, or taken by a short way, is what a look at each would give."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diagnostics.logs import groups, reader, recognise, search, templates
from diagnostics.logs.search import LogSearch
from diagnostics.logs.tracebacks import TracebackReader

DIGITS = st.integers(0, 99_999).map(str) | st.sampled_from(["00ab", "1fe9", "dead"])
PREFIXES = st.sampled_from(
    [
        "",
        "[rank#]: ",
        "[default#]:",
        "2026-11-30 04:00:0#,123 ",
        "(Worker pid=#) ",
        "#: ",
        "[rank#]:[E1130 04:00:08.4 P.cpp:#] ",
        "\u2502 ",
    ]
)
FORMS = st.sampled_from(
    r"""
  File "/v/python3.12/t#.py", line #, in f#
  File "/a b.py", line #, in g (x)
File "a.py", line #
  File "/a.py", line #, in  f
    File "/ü.py", line #, in f
  File "/a.py", line # in f#
  File "q"uote.py", line # in f
    f# (a/b#.py:#)
  File "/a.py", li
Traceback (most recent call last):
    Traceback (most recent call last):
Exception in thread w-# (f):
Thread # (idle): "w#"
Thread 0x# (most recent call first):
Timeout (0:00:#)!
ValueError: # is odd
my.Odd#: <x at 0x#a#f> of 0x#be, '0x#cd'
Epoch: #
    x = f(#)
    ^^^^
KeyError: '0x#f'
ValueError: #x# is 1x2, 0x#f) of 9xa
exit code 13#
RuntimeError: c#0d Broken pipe
Expected current_level > #
failed to recv, got # bytes
loss: nan at #
10%|# |~20%|# |
!Killed #
[Errno 2#] No space left on device
step # loss 2.0
│ /a/b.py:# in step │
  | ValueError: #
""".replace("~", "\r")
    .replace("!", "\x1b[31m")
    .split("\n")
)
LINES = st.builds(str.__add__, PREFIXES, FORMS)


@st.composite
def filled(draw: st.DrawFn) -> list[str]:
    """Lines of few forms, with other digits each time."""
    forms = draw(st.lists(LINES, min_size=1, max_size=12))
    return ["".join(draw(DIGITS) if part == "#" else part for part in draw(st.sampled_from(forms))) for _ in range(20)]


@settings(max_examples=60, deadline=None)
@given(filled())
@example(
    ["step 5", "step 12", "exit code 136", "exit code 137", "RuntimeError: c20d Broken pipe", "RuntimeError: c10d Broken pipe"]
)
def test_a_line_is_read_as_if_no_other_had_been_read(lines: list[str]) -> None:
    for line in lines:
        assert reader.lines(line.encode()) == reader._lines(line.encode())
        assert recognise.gated(line) == recognise._gated(line)
        assert recognise._known_candidates(line) == recognise.candidates(line)


@settings(max_examples=40, deadline=None)
@given(filled())
def test_the_short_way_of_an_open_traceback_is_only_shorter(lines: list[str]) -> None:
    text = "\n".join(["Traceback (most recent call last):", *lines]).encode()
    short = results(text)
    goes_on = TracebackReader.goes_on
    try:
        TracebackReader.goes_on = lambda *_: False  # type: ignore[method-assign]
        assert results(text) == short
    finally:
        TracebackReader.goes_on = goes_on  # type: ignore[method-assign]


@settings(max_examples=30, deadline=None)
@given(filled())
@example(["RuntimeError: c20d Broken pipe", "RuntimeError: c10d Broken pipe", "my.OddError: 1", "my.OtherError: 1"])
def test_tracebacks_that_are_alike_are_recognised_as_each_would_be(lines: list[str]) -> None:
    text = "\n".join(part for line in lines for part in ("Traceback (most recent call last):", '  File "/a", line 1, in f', line))
    known = results(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LogSearch, "_recognised", lambda _, traceback: search._recognise(traceback))
        assert results(text.encode()) == known


HEAD, FRAME = "Traceback (most recent call last):", '  File "/a1.py", line 1, in f'


@settings(max_examples=40, deadline=None)
@given(st.lists(filled(), min_size=1, max_size=2), st.integers(1, 4))
@example([[HEAD, FRAME, "KeyError: 1"]], 3)
@example([[HEAD, FRAME, "my.Odd: 1", *["step 1"] * 4, "CUDA out of memory."]], 3)
@example([["RuntimeError: c10d Broken pipe"]], 3)
@example(
    [
        ["RuntimeError: a"],
        [
            HEAD,
            FRAME,
            "KeyError: 1",
            "",
            "The above exception was the direct cause of the following exception:",
            "",
            HEAD,
            FRAME,
            "OSError: 1",
        ],
    ],
    3,
)
def test_a_flood_counts_what_its_failures_count_one_by_one(failures: list[list[str]], times: int) -> None:
    numbers = [1] * 7 + list(range(2, 2 + times))  # groups are full, then other digits come
    text = "\n".join("\n".join(lines) for number in numbers for lines in rotated(failures, number)).encode()
    assert counts(text, held=True) == counts(text, held=False)


def test_unknown_messages_of_a_flood_are_counted_and_known_ones_among_them_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_MAX_GROUPS", 7)
    words = ["".join(letters) for letters in itertools.product("abc", repeat=3)] * 2
    messages = ["CUDA out of memory. Tried", *words[:40], "CUDA out of memory. Tried", *words[40:], "a", "CUDA out of memory."]
    text = "\n".join(
        f"{HEAD}\n{FRAME}\nOSError: {word}" + "\nstep 1" * (at % 4 == 3) for at, word in enumerate(messages)
    ).encode()
    assert counts(text, held=True) == counts(text, held=False)
    assert counts(text, held=True)["cuda-oom", "OSError in a1.py:f"] == 3


@pytest.mark.parametrize("form", ["{}\n", f"{HEAD}\n{FRAME}\n{{}}\n", f"{HEAD}\n{FRAME}\n{{}}\nand more\n"])
@pytest.mark.parametrize("sizes", [[1] * 30 + [2] * 30 + [3], range(40), [7] * 3], ids=["few sizes", "many", "one"])
def test_a_flood_of_a_full_gpu_says_of_sizes_what_its_messages_say_one_by_one(form: str, sizes: Sequence[int]) -> None:
    said = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}.50 GiB. GPU 0 has a total capacity of 79.11 GiB"
    text = "".join(form.format(said.format(size)) for size in sizes).encode()
    flood, one_by_one = (list(found_in(text, held=held).ordered()) for held in (True, False))
    assert [group.to_dict() for group in flood] == [group.to_dict() for group in one_by_one]
    assert [group.count for group in flood] == [len(sizes)]
    assert list(flood[0].facts) == [
        f"GPU 0: {size}.50 GiB asked for, of 79.11 GiB" for size in list(dict.fromkeys(sizes))[: groups._MAX_FACTS]
    ]


def counts(text: bytes, *, held: bool) -> dict[tuple[str, str], int]:
    """How often each failure is found, with lines of failures held back or read one by one."""
    found = found_in(text, held=held)
    return {**{(group.kind.id, group.signature): group.count for group in found.ordered()}, ("", ""): found.dropped}


def found_in(text: bytes, *, held: bool) -> groups.Groups:
    """What is found, with lines of failures held back or read one by one."""
    found = groups.Groups()
    with pytest.MonkeyPatch.context() as patch:
        if not held:
            patch.setattr(LogSearch, "_hold", lambda *_: False)
            patch.setattr(LogSearch, "_says_nothing", lambda *_: False)
        LogSearch("log", found).read(io.BytesIO(text))
    return found


def rotated(failures: list[list[str]], number: int) -> list[list[str]]:
    """With another digit for each, so that they are alike only but for digits."""
    return [[line.replace("1", str(number)) for line in lines] for lines in failures]


def test_what_is_remembered_of_a_log_has_an_end() -> None:
    known: dict[bytes, int] = {}
    for number in range(3 * templates._MAX_KNOWN):
        templates.keep(known, b"%d" % number, number)
        assert known[b"%d" % number] == number
    assert len(known) <= templates._MAX_KNOWN
    long = b"x" * (templates.MAX_TEXT + 1)
    reader.lines(long)
    assert long not in reader._known


def test_no_mark_can_begin_in_an_address() -> None:
    marks = [mark.squeezed for kind in recognise.KINDS for mark in kind.marks]
    assert [mark for mark in marks if templates._ADDRESS.search(f"0x0{mark}".encode())] == []
    assert [mark for mark in marks if "0x" in mark] == []


def results(text: bytes) -> str:
    """All that is found in a log."""
    found = groups.Groups()
    LogSearch("log", found).read(io.BytesIO(text))
    return json.dumps([group.to_dict() for group in found.ordered()])
