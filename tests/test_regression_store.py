"""Laws of the history file."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regression.store import Store

ROOT = Path(__file__).parent.parent
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(st.dictionaries(st.text(), JSON, max_size=3), max_size=5))
@settings(max_examples=40, deadline=None)
def test_what_was_appended_is_read_in_order(tmp_path_factory: pytest.TempPathFactory, entries: list[dict[str, object]]) -> None:
    store = Store(tmp_path_factory.mktemp("store") / "history.jsonl")
    for entry in entries:
        store.append(entry)
    assert store.read() == (entries, [])


@pytest.mark.parametrize("cut", [1, 2, 8])
def test_a_torn_last_line_is_reported_skipped_and_does_not_spoil_the_next(tmp_path: Path, cut: int) -> None:
    store = Store(tmp_path / "history.jsonl")
    store.append({"night": 1})
    store.append({"night": 2})
    store.path.write_bytes(store.path.read_bytes()[: -cut - 1])
    entries, problems = store.read()
    assert entries == [{"night": 1}]
    assert len(problems) == 1
    assert "line 2: torn" in problems[0]
    store.append({"night": 3})
    assert store.read() == ([{"night": 1}, {"night": 3}], problems)


def test_a_lost_newline_alone_loses_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "history.jsonl")
    store.append({"night": 1})
    store.path.write_bytes(store.path.read_bytes()[:-1])
    store.append({"night": 2})
    assert store.read() == ([{"night": 1}, {"night": 2}], [])


def test_a_number_that_json_does_not_know_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "history.jsonl")
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.append({"loss": float("nan")})
    assert store.read() == ([], [])


def test_a_killed_writer_leaves_whole_lines_without_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    code = f"""
from pathlib import Path
from regression.store import Store
store = Store(Path({str(path)!r}))
number = 0
while True:
    store.append({{"number": number, "filler": "x" * 5000}})
    print(number, flush=True)
    number += 1
"""
    with subprocess.Popen((sys.executable, "-c", code), cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        while int(writer.stdout.readline()) < 20:
            pass
        writer.send_signal(signal.SIGKILL)
        told = [20, *map(int, writer.stdout.read().split())]
    entries, _ = Store(path).read()
    assert [entry["number"] for entry in entries] == list(range(len(entries)))
    assert len(entries) > max(told)  # what `append` returned from is on disk
