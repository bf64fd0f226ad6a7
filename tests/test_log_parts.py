"""Laws of reading a large log in parts: wherever it is cut, the parts say together what one reader says of all of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnostics import triage
from diagnostics.logs import parts
from diagnostics.logs.encodings import Unreadable
from diagnostics.logs.groups import MAX_EVIDENCE, Groups
from diagnostics.logs.parts import Read, _Part, read_log
from diagnostics.logs.search import LogSearch

TRACEBACK = 'Traceback (most recent call last):\n  File "/a.py", line {n}, in f\n    call({n})\n'
LINK = "\n\nThe above exception was the direct cause of the following exception:\n\n"
WAITS = '  File "/v/torch/distributed/distributed_c10d.py", line {n} in wait\n'
FAILURES = (
    f"{TRACEBACK}ValueError: {{n}} of {{word}}",
    f"{TRACEBACK}KeyError: {{n}}{LINK}{TRACEBACK}RuntimeError: {{word}}",
    "RuntimeError: CUDA error: an illegal memory access was encountered\nsecond line {n}",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {n}.00 GiB. GPU 1 has a total capacity of 99.00 GiB",
    f"Timeout (0:00:0{{n}})!\nThread 0x{{n}} (most recent call first):\n{WAITS}{WAITS}",
    "CUDA error: an illegal\n memory access was encountered and the terminal wrapped it",
    "[Rank {n}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=15{n}, OpType=ALLREDUCE, NumelIn=4)",
)
PIECES = st.lists(st.sampled_from(FAILURES), min_size=1, max_size=2)


@st.composite
def logs(draw: st.DrawFn) -> bytes:
    """Failures of ranks, marked or not, mixed line by line with each other and with healthy lines."""
    marked, random = draw(st.booleans()), Random(draw(st.integers(0, 2**32)))
    queues = [["step 5 loss 2.0", "", "  indented"] * 3]
    for rank in range(2 if marked else 1):
        mark = f"[rank{rank}]: " if marked else ""
        text = "\n".join(form.format(n=random.randrange(9), word=random.choice("abc")) for form in draw(PIECES))
        queues.append([mark + line for line in text.split("\n")])
    mixed = []
    while any(queues):
        queue = random.choice([queue for queue in queues if queue])
        mixed += [queue.pop(0) for _ in range(min(len(queue), random.randrange(1, 5)))]
    return "\n".join(mixed).encode()


@settings(max_examples=40, deadline=None)
@given(logs(), st.sets(st.integers(1, 60), max_size=4))
def test_parts_say_together_what_one_reader_says(tmp_path_factory: pytest.TempPathFactory, log: bytes, cuts: set[int]) -> None:
    path = tmp_path_factory.getbasetemp() / "parts.log"
    path.write_bytes(log)
    starts = [0, *(at + 1 for at, byte in enumerate(log) if byte == ord("\n"))]
    chosen = [0, *sorted({starts[cut] for cut in cuts if cut < len(starts)})]
    cut_up = [_Part(path, begin, end) for begin, end in zip(chosen, [*chosen[1:], None], strict=True)]
    groups = Groups()
    read = parts._put_together(path, map(parts._read_part, cut_up), groups)
    assert (read, told(groups)) == whole(path)


def test_parts_that_each_say_more_than_is_kept_of_a_kind_are_put_together(tmp_path: Path) -> None:
    full = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {n} GiB. GPU 1 has a total capacity of 99 GiB. "
    others = "".join(f"Process {{n}}{other} has 1 GiB memory in use. " for other in range(4))
    path, log = tmp_path / "parts.log", "".join(f"{full}{others}\n".format(n=n) for n in range(20)).encode()
    path.write_bytes(log)
    middle = log.index(b"\n", len(log) // 2) + 1
    groups = Groups()
    read = parts._put_together(path, map(parts._read_part, [_Part(path, 0, middle), _Part(path, middle, None)]), groups)
    assert (read, told(groups)) == whole(path)


def test_a_part_begins_well_where_it_is_read_from_the_middle_of_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_BEFORE_BYTES", 3000)
    monkeypatch.setattr(parts, "_BEHIND_BYTES", 100)
    path = flood(tmp_path / "train.log", num_failures=60)
    size = path.stat().st_size
    with path.open("rb") as file:
        ends = [parts._next_line(file, at) for at in range(700, size, 700)]
    begins = [0, *(end for end in ends if end is not None and end < size)]
    groups = Groups()
    cut_up = [_Part(path, begin, end) for begin, end in zip(begins, [*begins[1:], None], strict=True)]
    assert len(cut_up) > 9
    assert (parts._put_together(path, map(parts._read_part, cut_up), groups), told(groups)) == whole(path)


def test_a_large_log_is_read_by_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = flood(tmp_path / "train.log", num_failures=300)
    expected = whole(path)
    monkeypatch.setattr(parts, "_PART_BYTES", path.stat().st_size // 4)
    monkeypatch.setattr(parts, "_num_processes", lambda: 2)
    monkeypatch.setattr(LogSearch, "read", None)  # of this process
    groups = Groups()
    assert (read_log(path, groups), told(groups)) == expected


def test_a_process_that_is_killed_is_told_and_nothing_is_reported_as_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = flood(tmp_path / "train.log", num_failures=30)
    monkeypatch.setattr(parts, "_PART_BYTES", path.stat().st_size // 4)
    monkeypatch.setattr(parts, "_num_processes", lambda: 2)
    monkeypatch.setattr(parts, "_leave_interrupts", os.abort)
    with pytest.raises(Unreadable, match="killed"):
        read_log(path, Groups())
    assert triage.main([str(path)]) == 2
    assert "killed" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_a_log_in_another_encoding_is_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    path = flood(tmp_path / "train.log", num_failures=30)
    expected = whole(path)[1]
    path.write_text(path.read_text(), encoding=encoding)
    monkeypatch.setattr(parts, "_PART_BYTES", path.stat().st_size // 4)
    monkeypatch.setattr(parts, "_read_parts", None)
    groups = Groups()
    read_log(path, groups)
    assert told(groups) == expected


def test_a_log_that_grows_faster_than_it_is_read_is_read_as_far_as_it_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = flood(tmp_path / "train.log", num_failures=60)
    expected, more, writes = whole(path), path.read_bytes(), iter(range(20))
    read_block = LogSearch.read_block

    def grow(search: LogSearch, block: bytes) -> None:
        if next(writes, None) is not None:
            path.write_bytes(path.read_bytes() + more)
        read_block(search, block)

    monkeypatch.setattr(LogSearch, "read_block", grow)
    groups = Groups()
    assert (read_log(path, groups), told(groups)) == expected


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="without /proc a process opens a file of another one by its name")
@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_log_that_is_replaced_or_deleted_while_it_is_read_in_parts_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_deleted: bool
) -> None:
    path = flood(tmp_path / "train.log", num_failures=60)
    expected = whole(path)
    before_parts(path, monkeypatch, lambda: path.unlink() if is_deleted else rotate(path))
    groups = Groups()
    assert (read_log(path, groups), told(groups)) == expected


def test_a_part_of_another_file_under_the_same_name_is_refused(tmp_path: Path) -> None:
    path = flood(tmp_path / "train.log", num_failures=6)
    part = _Part(path, 0, None, tmp_path / "no such place", path.stat().st_ino)
    assert parts._read_part(part).lines > 0
    rotate(path)
    with pytest.raises(Unreadable, match="another file got its name"):
        parts._read_part(part)


@pytest.mark.parametrize("now", [b"", b"another beginning\n" * 5000])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_log_that_is_truncated_or_rewritten_while_it_is_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], num_processes: int, now: bytes
) -> None:
    path = tmp_path / "train.log"
    path.write_text("step 1 loss 2.0\n" * 500)
    before_parts(path, monkeypatch, lambda: path.write_bytes(now), num_processes=num_processes)
    assert triage.main([str(path)]) == 2
    assert f"{path}: it was truncated or rewritten while it was read" in capsys.readouterr().err
    assert triage.main([str(path)]) == (0 if now else 3)


def before_parts(path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[], object], *, num_processes: int = 2) -> None:
    """Have `change` happen once the log has been opened and cut into parts, and have them read by so many processes."""
    monkeypatch.setattr(parts, "_PART_BYTES", path.stat().st_size // 4)
    monkeypatch.setattr(parts, "_num_processes", lambda: num_processes)
    name = "_read_alone" if num_processes == 1 else "_read_parts"
    read, changes = getattr(parts, name), iter([change])

    def changed(*arguments: object) -> Read:
        next(changes, lambda: None)()
        found: Read = read(*arguments)
        return found

    monkeypatch.setattr(parts, name, changed)


def rotate(path: Path) -> None:
    """Give the log another name, as logrotate does, and its name to a new one."""
    path.rename(path.with_suffix(".1"))
    path.write_text("step 1 loss 2.0\n" * 5000)


def flood(path: Path, *, num_failures: int) -> Path:
    """Failures of two ranks, one after the other, with a step between them."""
    with path.open("w") as file:
        for number in range(num_failures):
            text = FAILURES[number % len(FAILURES)].format(n=number % 9, word="abc"[number % 3])
            file.writelines(f"[rank{number % 2}]: {line}\n" for line in (*text.split("\n"), f"step {number} loss 2.0"))
    return path


def whole(path: Path) -> tuple[Read, str]:
    """What one reader reads and finds."""
    search = LogSearch(str(path), Groups())
    with path.open("rb") as file:
        search.read(file)
    return Read(str(path), search.lines, search.bytes), told(search.groups)


def told(groups: Groups) -> str:
    """All that is found, without what follows from the order: that of the failures' ends, or first of the parts."""
    found = [group.to_dict() for group in groups.ordered()]
    for group in found:
        del group["where"], group["after"]
        if group["count"] > MAX_EVIDENCE:
            del group["evidence"]
        for one in ("streams", "facts", "doubts"):
            group[one].sort()
    return json.dumps(sorted(found, key=lambda group: (group["kind"], group["signature"])), indent=1)
