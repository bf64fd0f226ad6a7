"""Laws of prune and diff."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
from helpers_caches import SEEN, TRITON_KEY, graph, ours, tree, triton_kernel, write

from diagnostics import compile_cache
from diagnostics.caches import trash

DAY = 86400


def run(*arguments: object) -> int:
    return compile_cache.main([str(argument) for argument in arguments])


def aged(made: dict[str, Path], days: float) -> dict[str, Path]:
    """Written, and last read, so many days ago."""
    for path in made.values():
        os.utime(path, (time.time() - days * DAY, time.time() - days * DAY))
    return made


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A graph of our own from today, one that is 40 days old, a foreign one, a torn one, a Triton kernel, a stranger's file."""
    folder = tmp_path / "caches" / "cache"
    graph(folder, 1, ours(), kernel="one")
    aged(graph(folder, 2, ours(), kernel="two"), 40)
    graph(folder, 3, SEEN["H200"], kernel="three")
    torn = graph(folder, 4, ours(), kernel="four")["fx"]
    torn.write_bytes(torn.read_bytes()[:-1])
    aged({"torn": torn}, 0.1)
    triton_kernel(folder, named=folder)
    aged({"stranger": write(folder / "notes.txt", "mine"), "lock": write(folder / "locks" / "a.lock", "")}, 1000)
    return folder


def gone(before: dict[str, tuple[bytes, int, int]] | None, cache: Path) -> set[str]:
    assert before is not None
    return {*before} - {*(tree(cache) or {})}


def names(number: int, kernel: str, root: Path) -> set[str]:
    """The files of one graph."""
    made = graph(root, number, ours(), kernel=kernel)
    return {str(path.relative_to(root)) for path in made.values()}


def test_each_rule_moves_its_own_entries_and_undo_brings_every_byte_back(cache: Path, tmp_path: Path) -> None:
    before = tree(cache)
    old, foreign = names(2, "two", tmp_path / "a"), names(3, "three", tmp_path / "b")
    (torn,) = (name for name in names(4, "four", tmp_path / "c") if name.startswith("fxgraph"))
    kernel = {name for name in before or {} if name.startswith("triton/")}
    for rule, expected in (
        (("--older-than-days", "30"), old),
        (("--foreign",), foreign | kernel),
        (("--torn",), {torn}),
        (("--torn", "--older-than-days", "30"), {torn} | old),
    ):
        assert run("prune", *rule, "--yes", "--directory", cache) == 0
        assert gone(before, cache) == expected
        assert (cache / "triton" / "0" / TRITON_KEY).exists() == (
            "--foreign" not in rule
        )  # an empty one would be taken for a kernel
        thrown = trash.thrown(cache)[-1]
        assert {*(tree(thrown.content) or {})} == expected
        assert run("prune", "--undo", "--yes", "--directory", cache) == 0
        assert tree(cache) == before
        assert run("prune", "--undo", "--yes", "--directory", cache) == 2


def test_an_old_entry_that_was_read_lately_stays(cache: Path, tmp_path: Path) -> None:
    before = tree(cache)
    for name in names(2, "two", tmp_path / "a"):
        os.utime(cache / name, (time.time() - DAY, (cache / name).stat().st_mtime))
    assert run("prune", "--older-than-days", "30", "--yes", "--directory", cache) == 0
    assert tree(cache) == before


def test_what_looks_torn_and_is_young_may_be_being_written_and_stays(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph(cache, 5, ours(), kernel="five")["so"].write_bytes(b"\x7fELF")
    young = write(cache / "ab" / ".99999999.1.tmp", "half")
    before = tree(cache)
    assert run("prune", "--torn", "--yes", "--directory", cache) == 0
    assert [name[:8] for name in gone(before, cache)] == ["fxgraph/"]
    assert capsys.readouterr().out.count("may be being written") == 2
    os.utime(young, (time.time() - 700, time.time() - 700))
    assert run("prune", "--torn", "--yes", "--directory", cache) == 0
    assert not young.exists()


def test_by_size_the_longest_unused_go_and_no_more_than_needed(cache: Path, tmp_path: Path) -> None:
    before = tree(cache) or {}
    size = sum(len(content) for content, _, _ in before.values())
    old = names(2, "two", tmp_path / "a")
    assert run("prune", "--max-bytes", size, "--yes", "--directory", cache) == 0
    assert tree(cache) == before
    assert run("prune", "--max-bytes", size - 1, "--yes", "--directory", cache) == 0
    first = gone(before, cache)
    assert first < old
    assert run("prune", "--max-bytes", 4, "--yes", "--directory", cache) == 0
    assert {*(tree(cache) or {})} == {"notes.txt", "locks/a.lock"}
    assert run("prune", "--undo", "--yes", "--directory", cache) == run("prune", "--undo", "--yes", "--directory", cache) == 0
    assert tree(cache) == before


def test_what_was_written_again_meanwhile_is_not_overwritten_by_undo(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("prune", "--torn", "--yes", "--directory", cache) == 0
    again = graph(cache, 4, ours(), kernel="four")["fx"].read_bytes()
    after = tree(cache)
    capsys.readouterr()
    assert run("prune", "--undo", "--yes", "--directory", cache) == 0
    assert "1 were written again meanwhile and stay in" in capsys.readouterr().out
    assert tree(cache) == after
    (kept,) = (path for path in trash.thrown(cache)[-1].content.rglob("*") if path.is_file())
    assert kept.read_bytes() == again[:-1]


def test_a_prune_that_fails_half_way_moves_everything_back(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, original, moved = tree(cache), Path.rename, []

    def rename(self: Path, target: Path) -> Path:
        if self.is_relative_to(cache):
            moved.append(self)
            if len(moved) == 4:
                raise OSError(28, "No space left on device", str(target))
        return original(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    assert run("prune", "--max-bytes", 0, "--yes", "--directory", cache) == 2
    assert len(moved) == 4
    assert tree(cache) == before
    assert [path.name for path in cache.parent.iterdir()] == ["cache"]


def test_a_killed_prune_is_undone(cache: Path, tmp_path: Path) -> None:
    before = tree(cache)
    child = os.path.join(tmp_path, "program.py")  # noqa: PTH118 - a name for the command line
    write(Path(child), KILLED)
    killed = os.spawnv(os.P_WAIT, sys.executable, [sys.executable, child, str(cache)])
    assert killed == -9
    assert 0 < len(gone(before, cache)) < len(before or {}) - 2
    assert run("prune", "--undo", "--yes", "--directory", cache) == 0
    assert tree(cache) == before


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
from diagnostics import compile_cache
cache, moved = Path(sys.argv[1]), 0
def step(event, values):
    global moved
    if event == "os.rename" and Path(values[0]).is_relative_to(cache):
        moved += 1
        if moved == 5:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(step)
compile_cache.main(["prune", "--max-bytes", "0", "--yes", "--directory", str(cache)])
"""


def test_a_prune_asks_and_takes_only_yes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    before = tree(cache)
    for answer, code in (("", 2), ("\n", 2), ("no\n", 2), ("y\n", 0)):
        assert tree(cache) == before
        monkeypatch.setattr("sys.stdin", Terminal(answer))
        assert run("prune", "--torn", "--directory", cache) == code
    assert tree(cache) != before


def test_a_prune_without_a_rule_or_with_nothing_to_do_changes_nothing(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(cache.parent)
    assert run("prune", "--yes", "--directory", cache) == 2
    assert "say what to prune" in capsys.readouterr().err
    assert run("prune", "--older-than-days", "3000", "--yes", "--directory", cache) == 0
    for rule in ("--older-than-days", "--max-bytes"):
        with pytest.raises(SystemExit, match="2"):
            run("prune", rule, "-1", "--yes", "--directory", cache)
    assert tree(cache.parent) == before


def test_a_difference_tells_what_came_went_and_was_rewritten(cache: Path, tmp_path: Path) -> None:
    snapshot, inventory, told = tmp_path / "s.tar", tmp_path / "i.json", tmp_path / "d.json"
    for path in (cache / "notes.txt", cache / "locks" / "a.lock"):
        path.unlink()
    assert run("prune", "--torn", "--foreign", "--yes", "--directory", cache) == 0
    assert run("snapshot", snapshot, "--directory", cache) == 0
    assert run("inventory", cache, "--json", inventory) == 0
    copy = Path(shutil.copytree(cache, tmp_path / "copy"))
    for before in (cache, copy, snapshot, inventory):
        assert run("diff", before, cache) == 0
    one, two = graph(tmp_path / "n", 1, ours(), kernel="one"), graph(tmp_path / "n", 2, ours(), kernel="two")
    rewritten, went, touched, same_size = (
        cache / path.relative_to(tmp_path / "n") for path in (one["fx"], two["fx"], one["aot"], two["aot"])
    )
    came = graph(cache, 9, ours(), kernel="nine")["so"]
    rewritten.write_bytes(rewritten.read_bytes() + b".")
    went.unlink()
    os.utime(touched)
    same_size.write_bytes(bytes(same_size.stat().st_size))
    for before, dates in ((snapshot, {"rewritten", "date"}), (copy, {"rewritten", "date"}), (inventory, {"date"})):
        assert run("diff", before, cache, "--json", told) == 1
        kinds = {
            cache / change["path"]: (change["kind"], change["same_content"]) for change in json.loads(told.read_text())["changes"]
        }
        assert kinds[rewritten] == ("rewritten", False)
        assert kinds[went] == ("went", None)
        assert kinds[came] == ("came", None)
        content = dates == {"rewritten", "date"}
        assert kinds[touched] == ("date", True if content else None)
        assert kinds[same_size] == (("rewritten", False) if content else ("date", None))


def test_a_file_of_another_date_and_the_same_content_is_no_difference(cache: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(cache, tmp_path / "copy"))
    for path in copy.rglob("*.py"):
        os.utime(path)
    assert run("diff", cache, copy) == 0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"kind": "x"}',
        b'{"kind": "inventories", "caches": []}',
        b'{"a":' * 100_000,
        os.urandom(3000),
        b"\x00" * 3000,
    ],
)
def test_what_is_neither_folder_snapshot_nor_inventory_is_told(cache: Path, tmp_path: Path, content: bytes) -> None:
    file = write(tmp_path / "file", content)
    before = tree(cache)
    assert run("diff", file, cache) == run("diff", cache, tmp_path / "nothing") == run("restore", file, "--yes") == 2
    assert tree(cache) == before


def test_a_folder_that_is_no_cache_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "skipped.jsonl").touch()
    os.utime(folder / "skipped.jsonl", (0, 0))
    assert run("prune", "--torn", "--yes", "--directory", folder) == 2
    assert "holds nothing that torch or Triton keeps in a compile cache" in capsys.readouterr().err
    assert (folder / "skipped.jsonl").exists()
