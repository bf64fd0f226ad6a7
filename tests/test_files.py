import os
from pathlib import Path

import pytest

from dflash.files import write_whole


def test_the_new_content_is_there_with_the_usual_rights_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content in (b"old", b"new"):
        write_whole(path, content)
        assert path.read_bytes() == content
    other = tmp_path / "b"
    other.touch()
    assert path.stat().st_mode == other.stat().st_mode
    assert {file.name for file in tmp_path.iterdir()} == {"a.json", "b"}


def test_a_full_disk_leaves_the_old_content_and_nothing_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_full(_: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "a.json"
    write_whole(path, b"old")
    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
