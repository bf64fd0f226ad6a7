"""Laws of reading tracebacks: nothing is lost, whatever is cut off, mixed or wrapped."""

from __future__ import annotations

import io
import traceback
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from diagnostics.logs.reader import blocks, lines
from diagnostics.logs.traceback import Traceback
from diagnostics.logs.tracebacks import TracebackReader

NAMES = st.sampled_from(["ValueError", "torch._inductor.exc.InductorError", "KeyError", "RuntimeError", "queue.Empty"])
FRAMES = st.lists(
    st.tuples(st.sampled_from(["/a.py", "/b/c.py", "/site-packages/torch/x.py"]), st.integers(1, 99)), min_size=1, max_size=6
)
NOISE = st.sampled_from(
    ["step 5: loss 0.3", "INFO: fine", "", "  indented", "x = y", "Epoch: 3", "100%|####| 5/5", "\u2502", "a: b"]
)


def printed(name: str, frames: list[tuple[str, int]], message: str) -> list[str]:
    """As Python prints it."""
    listed = "".join(f'  File "{file}", line {line}, in f{line}\n    call({line})\n' for file, line in frames)
    return f"Traceback (most recent call last):\n{listed}{name}: {message}".split("\n")


def read(text: list[str] | str) -> list[Traceback]:
    reader = TracebackReader()
    done: list[Traceback] = []
    raw = text if isinstance(text, str) else "\n".join(text)
    for number, one in enumerate(b"".join(blocks(io.BytesIO(raw.encode()))).split(b"\n"), 1):
        for line in lines(one):
            reader.feed(line, number, done)
    return done + reader.finish()


def every(tracebacks: list[Traceback]) -> list[Traceback]:
    return [one for traceback_ in tracebacks for one in traceback_.chain]


def frames_of(one: Traceback) -> list[tuple[str, int]]:
    return [(frame.file, frame.line) for frame in one.frames]


def test_a_real_chain_is_one_traceback_with_its_causes() -> None:
    def fails() -> None:
        try:
            {}["step"]
        except KeyError as error:
            raise ValueError("no such step\nsecond line") from error

    try:
        fails()
    except ValueError as error:
        text = "".join(traceback.format_exception(error))
    (found,) = read(text)
    assert [one.exception for one in found.chain] == ["ValueError", "KeyError"]
    assert found.link == "caused by it"
    assert found.frames[-1].function == "fails"
    assert "second line" in found.text


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(NAMES, FRAMES), min_size=1, max_size=4), st.integers(0, 2**32))
def test_ranks_that_are_marked_are_read_apart_whatever_their_order(
    crashes: list[tuple[str, list[tuple[str, int]]]], seed: int
) -> None:
    queues = [
        [f"[rank{rank}]: {line}" for line in printed(name, frames, f"of {rank}")] for rank, (name, frames) in enumerate(crashes)
    ]
    found = read(shuffled(queues, seed))
    assert {(one.stream, one.exception, tuple(frames_of(one)), one.message) for one in found} == {
        (f"rank {rank}", name, tuple(frames), f"of {rank}") for rank, (name, frames) in enumerate(crashes)
    }
    assert not any(one.interleaved for one in found)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(NAMES, FRAMES), min_size=1, max_size=5), st.lists(NOISE, max_size=10), st.integers(0, 2**32))
def test_no_exception_is_lost_where_ranks_are_not_marked(
    crashes: list[tuple[str, list[tuple[str, int]]]], noise: list[str], seed: int
) -> None:
    queues = [printed(name, frames, f"of {rank}") for rank, (name, frames) in enumerate(crashes)]
    found = every(read(shuffled([*queues, noise], seed)))
    expected = sorted((name, f"of {rank}") for rank, (name, _) in enumerate(crashes))
    assert sorted((one.exception, one.message) for one in found if one.exception) == expected
    assert sum(len(one.frames) for one in found) == sum(len(frames) for _, frames in crashes)


@settings(max_examples=30, deadline=None)
@given(NAMES, FRAMES, st.integers(2, 6), st.integers(0, 2**32))
def test_ranks_that_fail_alike_are_told_apart_without_marks_once_each_has_begun(
    name: str, frames: list[tuple[str, int]], ranks: int, seed: int
) -> None:
    different = [(file, line + 100 * at) for at, (file, line) in enumerate(frames)]  # no frame twice: else the order is not known
    head, *rest = printed(name, different, "same")
    found = read("\n".join(shuffled([[f"{head}\n{rest[0]}", *rest[1:]] for _ in range(ranks)], seed)))
    assert [frames_of(one) for one in found] == [different] * ranks


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(NAMES, FRAMES), min_size=1, max_size=3), st.integers(0, 400), st.integers(0, 400))
def test_a_log_cut_anywhere_keeps_every_exception_that_is_left(
    crashes: list[tuple[str, list[tuple[str, int]]]], start: int, length: int
) -> None:
    text = "\n".join(line for name, frames in crashes for line in printed(name, frames, "why"))
    piece = text[start : start + length]
    whole = [line for line in piece.split("\n")[1:-1] if line.endswith("Error: why")]
    found = every(read(piece))
    assert len([one for one in found if one.message == "why" and one.exception.endswith("Error")]) >= len(whole)
    heads = sum("Traceback (most recent call last):" in line for line in piece.split("\n"))
    assert len(found) >= heads


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=600))
def test_any_bytes_are_read_without_an_error(junk: bytes) -> None:
    reader = TracebackReader()
    for number, raw in enumerate((junk + b'\n  File "x", line 1\nTraceback (most recent call last)\n' + junk).split(b"\n"), 1):
        for line in lines(raw):
            reader.feed(line, number, [])
    reader.finish()


def test_a_frame_that_a_terminal_wrapped_is_put_together() -> None:
    head = 'Traceback (most recent call last):\n  File "/venv/site-packages/torch/fx/experi'
    (found,) = read(f'{head}\nmental/proxy_tensor.py", line 12, in call_module\n    x\nRuntimeError: y')
    assert frames_of(found) == [("/venv/site-packages/torch/fx/experimental/proxy_tensor.py", 12)]


def test_a_traceback_that_never_ends_is_truncated_and_one_that_stands_alone_too() -> None:
    found = read('Traceback (most recent call last):\n  File "/a.py", line 1, in f')
    assert [(one.truncated, one.exception) for one in found] == [("end", "")]
    found = read('    return f(x)\n  File "/a.py", line 1, in f\nValueError: x')
    assert [(one.truncated, one.exception) for one in found] == [("start", "ValueError")]


def test_a_stack_that_is_only_printed_does_not_swallow_the_traceback_after_it() -> None:
    stack = ["line"] * 9 + ['  File "/a.py", line 1, in forward', "    x"]
    found = read([*stack, *printed("ValueError", [("/b.py", 2)], "real")])
    assert [one.exception for one in found if not one.is_stack] == ["ValueError"]
    assert [frames_of(one) for one in found if not one.is_stack] == [[("/b.py", 2)]]


def test_an_exception_group_and_its_parts_are_read() -> None:
    def fails() -> None:
        raise ExceptionGroup("workers", [ValueError("one"), KeyError("two")])

    try:
        fails()
    except ExceptionGroup as error:
        text = "".join(traceback.format_exception(error))
    assert {"ExceptionGroup", "ValueError", "KeyError"} <= {one.exception for one in every(read(text))}


def test_memory_does_not_grow_with_tracebacks_that_never_end() -> None:
    reader = TracebackReader()
    handed: list[Traceback] = []
    for number in range(20_000):
        (line,) = lines(b"[rank%d]: Traceback (most recent call last):" % number)
        reader.feed(line, number, handed)
    assert len(reader.streams) <= 4096
    assert len(handed) >= 20_000 - 4096


def shuffled(queues: list[list[str]], seed: int) -> list[str]:
    """The lines of all queues, each in its own order."""
    random = Random(seed)
    left, mixed = [list(queue) for queue in queues if queue], []
    while left:
        queue = random.choice(left)
        mixed.append(queue.pop(0))
        left = [queue for queue in left if queue]
    return mixed
