"""Laws of files with versions: read as pip writes them, refused with words where they are not exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnostics.bisection import pins
from diagnostics.bisection.outcomes import BadInput
from diagnostics.bisection.pins import Change


def test_pins_are_read_as_pip_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "good.txt"
    path.write_text(
        "# made by pip freeze\nTorch==2.11.0+cu128\nruamel.yaml==1.0 \\\n    --hash=sha256:abc\n"
        "old==1; python_version < '3'\nmine @ https://h/mine.whl # note\n\n"
    )
    assert pins.read(path) == {"torch": "2.11.0+cu128", "ruamel-yaml": "1.0", "mine": "https://h/mine.whl"}


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "No such file"), (b"", "pins nothing"), (b"\xff\x00", "is no text"), (b"torch>=2", "no exact version"),
     (b"torch", "no exact"),
     (b"torch==2.*", "no exact version"), (b"-e .", "cannot stand there"), (b"!!", "is no requirement"),
     (b"a==1\nA==2", "pins a twice"), (b"a[x]==1", "asks for extras")],
)  # fmt: skip
def test_a_file_without_exact_versions_is_refused(tmp_path: Path, content: bytes | None, told: str) -> None:
    if content is not None:
        (tmp_path / "x").write_bytes(content)
    with pytest.raises(BadInput, match=told):
        pins.read(tmp_path / "x")


@pytest.mark.parametrize(
    "line", ["a[x] @ https://me:plant@h.io/a.whl", "a @ @ https://me:plant@h.io/a", "x" * 10**6, "]" * 10**6]
)
def test_what_is_refused_is_told_in_short_and_without_secrets(tmp_path: Path, line: str) -> None:
    (tmp_path / "x").write_text(line)
    with pytest.raises(BadInput) as refused:
        pins.read(tmp_path / "x")
    assert "plant" not in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_changes_are_those_that_differ_and_some_can_be_applied() -> None:
    good, bad = {"a": "1", "b": "1", "c": "1"}, {"a": "2", "b": "1", "d": "https://u:secretpw@h/d.whl"}
    added = Change(name="d", before=None, after=bad["d"])
    assert pins.changes(good, bad) == [Change(name="a", before="1", after="2"), Change(name="c", before="1", after=None), added]
    assert pins.applied(good, [added]) == ("a==1", "b==1", "c==1", f"d @ {bad['d']}")
    assert added.sentence == "d absent → https://***@h/d.whl"
