"""Laws of snapshot and restore: whole or not at all, only where they belong, undone, and killed at any step."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from helpers_caches import SEEN, graph, h200_here, ours, tree, triton_kernel, write

from diagnostics import compile_cache
from diagnostics.caches import archive, here, trash
from diagnostics.caches.errors import CacheError

ROOT = Path(__file__).parent.parent


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache of one graph, with dates and modes that would not come by themselves."""
    folder = tmp_path / "caches" / "cache"
    for path in graph(folder, 1, ours()).values():
        os.utime(path, ns=(1_700_000_000_123_456_789, 1_700_000_000_123_456_789))
        path.chmod(0o755 if path.suffix == ".so" else 0o640)
    folder.chmod(0o750)
    return folder


@pytest.fixture
def snapshot(cache: Path, tmp_path: Path) -> Path:
    path = tmp_path / "snapshot.tar"
    assert compile_cache.main(["snapshot", str(path), "--directory", str(cache)]) == 0
    return path


@pytest.fixture(autouse=True)
def no_power_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process has written outlives it; waiting for the disk would be most of the time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def changed(cache: Path) -> dict[str, tuple[bytes, int, int]]:
    """Give the cache another state, and return it."""
    graph(cache, 3, ours())
    found = tree(cache)
    assert found is not None
    return found


def run(*arguments: object) -> int:
    return compile_cache.main([str(argument) for argument in arguments])


def test_a_restored_cache_is_the_old_one_to_the_byte_date_and_mode(cache: Path, snapshot: Path, tmp_path: Path) -> None:
    there = tmp_path / "new" / "place"
    assert run("restore", snapshot, "--directory", there, "--yes") == 0
    assert tree(there) == tree(cache)
    assert there.stat().st_mode == cache.stat().st_mode
    assert run("diff", cache, there) == run("diff", snapshot, there) == 0


def test_a_restore_is_undone_to_what_was_there_and_the_trash_goes_only_when_told(
    cache: Path, snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapped, old = tree(cache), changed(cache)
    assert run("restore", snapshot, "--yes") == 0
    assert tree(cache) == snapped
    (thrown,) = trash.thrown(cache)
    assert f"what was there is in {thrown.content}" in capsys.readouterr().out
    assert tree(thrown.content) == old
    assert run("restore", "--undo", "--directory", cache, "--yes") == 0
    assert tree(cache) == old
    assert tree(thrown.content) == snapped
    assert run("restore", "--undo", "--directory", cache, "--yes") == 2
    assert tree(cache) == old
    assert run("prune", "--empty-trash", "--directory", cache) == 2
    assert thrown.content.is_dir()
    assert run("prune", "--empty-trash", "--directory", cache, "--yes") == 0
    assert [path.name for path in cache.parent.iterdir()] == ["cache"]
    assert tree(cache) == old


def test_a_restore_into_no_folder_is_undone_to_no_folder(cache: Path, snapshot: Path) -> None:
    there = cache.parent / "another"
    assert run("restore", snapshot, "--directory", there, "--yes") == 0
    assert run("restore", "--undo", "--directory", there, "--yes") == 0
    assert not there.exists()


def test_the_folder_behind_a_link_is_restored_and_the_link_stays(cache: Path, snapshot: Path, tmp_path: Path) -> None:
    snapped = tree(cache)
    changed(cache)
    link = tmp_path / "link"
    link.symlink_to(cache)
    assert run("restore", snapshot, "--directory", link, "--yes") == 0
    assert link.is_symlink()
    assert tree(cache) == snapped


def test_nothing_is_done_unasked(cache: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = changed(cache)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))  # no terminal: not an answer
    assert run("restore", snapshot) == run("prune", "--max-bytes", 0, "--directory", cache) == 2
    assert tree(cache) == old
    assert [path.name for path in cache.parent.iterdir()] == ["cache"]


@pytest.mark.parametrize(
    ("name", "theirs", "reason"),
    [
        ("torch", "2.12.1", "torch: 2.12.1 there"),
        ("torch_git", "70d99e998b", "torch_git: 70d99e998b there"),
        ("cuda", "12.8", "cuda: 12.8 there, none here"),
        ("triton", "3.6.0", "triton: 3.6.0 there"),
        ("python_abi", "cpython-312-x86_64-linux-gnu", "python_abi: cpython-312-x86_64-linux-gnu there"),
        ("gpus", ["NVIDIA H200 (cuda sm90)"], "gpus: only there NVIDIA H200 (cuda sm90)"),
        ("cpu_flags", ["avx2", "avx512f"], "cpu_flags: only there avx512f; only here fma"),
    ],
)
def test_a_snapshot_of_another_environment_is_refused_with_the_reason(
    cache: Path,
    snapshot: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    theirs: Any,
    reason: str,
) -> None:
    ours_now = {**archive.read(snapshot).fingerprint, "cuda": None, "gpus": [], "cpu_flags": ["avx2", "fma"], "torch": "2.13.0"}
    monkeypatch.setattr(here, "fingerprint", lambda: {**ours_now, name: theirs})
    other = cache.parent / "other.tar"
    graph(cache, 1, ours())
    assert run("snapshot", other, "--directory", cache) == 0
    monkeypatch.setattr(here, "fingerprint", lambda: ours_now)
    before = tree(cache.parent)
    assert run("restore", other, "--yes") == 1
    assert reason in capsys.readouterr().err
    assert tree(cache.parent) == before


def test_kernels_that_name_their_folder_are_restored_there_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, cache = SEEN["H200"], tmp_path / "cache"
    monkeypatch.setattr(here, "fingerprint", lambda: {"python_abi": "cpython-312", **h200_here()})
    for number, (kernel, bundle) in enumerate([(True, None), (False, cache), (False, None)]):
        graph(cache, number, seen, bundle_of=bundle)
        if kernel:
            triton_kernel(cache, named=cache)
        snapshot = tmp_path / f"{number}.tar"
        assert run("snapshot", snapshot, "--directory", cache) == 0
        assert run("restore", snapshot, "--yes") == 0
        capsys.readouterr()
        code = run("restore", snapshot, "--directory", tmp_path / f"there-{number}", "--yes")
        if kernel or bundle:
            assert code == 1
            assert f"name {cache} and are read from there" in capsys.readouterr().err
        else:
            assert code == 0
        for path in cache.rglob("*"):
            if path.is_file():
                path.unlink()


def test_a_cut_or_changed_snapshot_is_refused_or_gives_the_same_cache(cache: Path, snapshot: Path, tmp_path: Path) -> None:
    whole, snapped = snapshot.read_bytes(), tree(cache)
    there, damaged, refused = tmp_path / "there", tmp_path / "damaged.tar", 0
    cuts = [whole[:size] for size in range(0, len(whole), len(whole) // 10)]
    flips = [whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :] for at in range(0, len(whole), len(whole) // 30)]
    for number, content in enumerate((*cuts, *flips)):
        damaged.write_bytes(content)
        there.mkdir(exist_ok=True)
        try:
            archive.unpack(archive.read(damaged), there / str(number))
        except CacheError:
            refused += 1
        else:
            assert tree(there / str(number)) == snapped
    assert refused > 35
    damaged.write_bytes(whole.replace(b'"kind": "snapshot"', b'"kind": "snapshop"').replace(b'"torch": "2.', b'"torch": "3.'))
    with pytest.raises(CacheError, match="its manifest has another hash"):
        archive.read(damaged)
    old = changed(cache)
    assert run("restore", damaged, "--directory", cache, "--yes") in {0, 2}
    damaged.write_bytes(whole[: whole.index(b"\x7fELF")] + b"\x7fElF" + whole[whole.index(b"\x7fELF") + 4 :])
    assert run("restore", damaged, "--yes") == 2
    assert tree(cache) in (old, snapped)


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "a/../../outside"])
def test_a_snapshot_that_names_a_file_outside_is_refused(snapshot: Path, tmp_path: Path, name: str) -> None:
    with tarfile.open(snapshot) as tar:
        manifest = json.load(tar.extractfile("manifest.json"))  # type: ignore[arg-type]  # it is there
    digest = hashlib.sha256(b"x").hexdigest()
    manifest["files"] = {name: {"bytes": 1, "mtime_ns": 10**18, "mode": 0o644, "sha256": digest}}
    content = json.dumps(manifest).encode()
    with tarfile.open(tmp_path / "evil.tar", "w") as tar:
        for member, data in (
            (f"cache/{name}", b"x"),
            ("manifest.json", content),
            ("manifest.sha256", hashlib.sha256(content).hexdigest().encode()),
        ):
            info = tarfile.TarInfo(member)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    with pytest.raises(CacheError, match="outside the cache"):
        archive.read(tmp_path / "evil.tar")


def test_torn_foreign_and_temporary_entries_are_left_out_and_said(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = graph(cache, 5, SEEN["H200"], kernel="other")
    torn = graph(cache, 6, ours(), kernel="third")["fx"]
    torn.write_bytes(torn.read_bytes()[:-9])
    write(cache / "locks" / "a.lock", "")
    write(cache / "ab" / ".99999999.1.tmp", "half")
    assert run("snapshot", tmp_path / "s.tar", "--directory", cache) == 0
    held = archive.read(tmp_path / "s.tar").files
    gone = {
        str(path.relative_to(cache)) for path in (*foreign.values(), torn, cache / "locks/a.lock", cache / "ab/.99999999.1.tmp")
    }
    assert {*(tree(cache) or {})} - {*held} == gone
    said = capsys.readouterr().out
    for words in ("written by torch 2.11.0+cu130", "cut off", "1 locks", "1 temporary"):
        assert f"{words}" in said, words


def test_a_snapshot_does_not_replace_a_file_and_a_folder_that_is_no_cache_is_not_replaced(
    cache: Path, snapshot: Path, tmp_path: Path
) -> None:
    before = snapshot.read_bytes()
    assert run("snapshot", snapshot, "--directory", cache) == 2
    assert snapshot.read_bytes() == before
    home = write(tmp_path / "home" / "thesis.tex", "x").parent
    assert run("restore", snapshot, "--directory", home, "--yes") == 2
    assert tree(home) == {"thesis.tex": tree(home)["thesis.tex"]}  # type: ignore[index]  # it is there


KILLED = """
import ctypes, json, os, signal, sys
from pathlib import Path
from diagnostics import compile_cache
from diagnostics.caches import here, inventory, restore
arguments, watched = json.loads(sys.argv[1]), Path(sys.argv[2])
ctypes.CDLL(None)
here.fingerprint()
restore.users = inventory.users = lambda *_: ([], [])  # looking at every process, at every step, takes long
os.fsync = lambda _: None  # a killed process loses nothing that it has written
steps = {"os.rename", "os.mkdir", "os.utime", "os.chmod", "os.remove", "shutil.rmtree", "ctypes.dlsym"}

def status(number):
    "Run the command in a fork that is killed before its step of this number."
    seen = 0
    def step(event, values):
        nonlocal seen
        if event in steps or (event == "open" and (sys.argv[3] == "reads too" or values[2] & (os.O_WRONLY | os.O_RDWR))):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.addaudithook(step)
        os._exit(compile_cache.main(arguments))
    return os.waitpid(child, 0)[1]

def state():
    files = sorted(path for path in (watched, *watched.rglob("*")) if path.is_file())
    return {str(path.relative_to(watched)): path.read_bytes().hex() for path in files} if watched.exists() else None

before, number, ended = state(), 0, False
while state() == before and not ended:
    number += int(sys.argv[4])
    ended = not os.WIFSIGNALED(status(number))
print(json.dumps([number, ended, before, state()]))
"""


def killed_at_every_step(arguments: list[object], watched: Path, *, opens: str = "writes", stride: int = 1) -> tuple[Any, Any]:
    """What `watched` held while the command was killed before step `stride`, twice that and so on, and when that changed."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, json.dumps([str(one) for one in arguments]), str(watched), opens, str(stride)],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    number, _, before, after = json.loads(done.stdout)
    assert number > 15, done.stderr
    return before, after


def contents(folder: Path) -> dict[str, str] | None:
    found = tree(folder)
    return None if found is None else {name: content.hex() for name, (content, _, _) in found.items()}


def test_a_restore_killed_at_any_step_leaves_the_old_cache_or_the_new_one_and_can_be_undone(cache: Path, snapshot: Path) -> None:
    new, old = contents(cache), (changed(cache), contents(cache))[1]
    assert killed_at_every_step(["restore", snapshot, "--yes"], cache) == (old, new)
    assert run("restore", "--undo", "--directory", cache, "--yes") == 0
    assert contents(cache) == old
    assert run("restore", "--undo", "--directory", cache, "--yes") == 2  # what was killed before changed nothing


def test_a_restore_killed_on_its_way_leaves_no_folder_or_the_new_one(cache: Path, snapshot: Path) -> None:
    there = cache.parent / "there"
    assert killed_at_every_step(["restore", snapshot, "--directory", there, "--yes"], there, stride=4) == (None, contents(cache))
    assert run("restore", "--undo", "--directory", there, "--yes") == 0
    assert not there.exists()


def test_a_snapshot_killed_at_any_step_is_whole_or_not_there(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "made.tar"
    before, after = killed_at_every_step(["snapshot", path, "--directory", cache], path, opens="reads too")
    assert before is None
    assert after is not None
    assert archive.read(path).files.keys() == {*(tree(cache) or {})}
