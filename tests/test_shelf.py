"""Laws of prompts on disk: they come back as they were put, in their order, and nothing is left of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data import scratch
from dflash.data.meta import DataError
from dflash.data.shelf import Prompt, PromptShelf

IDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)


def prompt(sample_id: str, text: str = "hi", **changes: Any) -> Prompt:
    return Prompt(**{"sample_id": sample_id, "messages": ({"role": "user", "content": text},), "split": "train", **changes})


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(IDS, st.text(max_size=9), st.sampled_from(["train", "heldout"]), st.booleans()), max_size=12))
def test_prompts_come_back_as_they_were_put_and_in_their_order(rows: list[tuple[str, str, Any, bool]]) -> None:
    shelf, expected = PromptShelf(Path("/tmp")), {}
    for name, text, split, answered in rows:
        given = ({"role": "assistant", "content": text},) if answered else ()
        expected[name] = prompt(name, text, split=split, given=given, tools=({"function": {"name": name, "x": [1, None]}},))
        shelf.put(expected[name])
    assert list(shelf) == list(expected.values())
    assert len(shelf) == len(expected)
    assert [shelf.get(name) for name in expected] == list(expected.values())
    assert all(name in shelf for name in expected)
    assert shelf.get("not there") is None
    for name in expected:
        shelf.put_question(name, [len(name), 7])
    assert [q.sample_id for q, _ in shelf.questions("heldout")] == [n for n, p in expected.items() if p.split == "heldout"]
    assert [given for _, given in shelf.questions()] == [bool(p.given) for p in expected.values()]


@settings(deadline=None, max_examples=25)
@given(st.dictionaries(IDS, st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5), max_size=12))
def test_questions_come_longest_first_and_equal_ones_by_id(asked: dict[str, list[int]]) -> None:
    shelf = PromptShelf(Path("/tmp"))
    for name in asked:
        shelf.put(prompt(name))
    for name, ids in reversed(asked.items()):
        shelf.put_question(name, ids)
    assert [(q.sample_id, list(q.ids)) for q in shelf.longest_first()] == sorted(
        asked.items(), key=lambda item: (-len(item[1]), item[0])
    )
    assert [(q.sample_id, list(q.ids)) for q, _ in shelf.questions()] == list(asked.items())
    assert shelf.num_questions() == len(asked)


def test_a_shelf_has_no_name_on_the_disk_and_makes_no_directory(tmp_path: Path) -> None:
    shelf = PromptShelf(tmp_path / "not" / "yet")
    for number in range(3000):
        shelf.put(prompt(str(number), "x" * 5000))
    assert list(tmp_path.iterdir()) == []
    assert len(list(shelf)) == 3000


def test_a_disk_that_is_full_is_an_error_that_says_where(tmp_path: Path) -> None:
    shelf = PromptShelf(tmp_path)
    shelf._database.execute("PRAGMA max_page_count = 40")
    with pytest.raises(DataError, match=r"cannot keep prompts there .*full.*make room"):
        shelf.put(prompt("long", "x" * 500_000))


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(scratch.tempfile, "NamedTemporaryFile", refused)
    with pytest.raises(DataError, match=r"cannot keep prompts there .*Permission denied"):
        PromptShelf(tmp_path)
