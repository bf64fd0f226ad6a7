"""Laws of diagnostics.compile_cache on a cache that torch wrote: one real compile, and warm starts of fresh processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_caches import tree

from diagnostics import compile_cache
from diagnostics.caches import here, inventory
from diagnostics.caches.entries import AUTOGRAD, CPP, GRAPHS, PYTHON
from diagnostics.caches.whole import damage

ROOT = Path(__file__).parent.parent
Compile = Callable[[Path], dict[str, Any]]


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], Compile]]:
    """What torch says of itself, and a function that compiles in a fresh process with this folder as its cache."""
    variables = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("unused")),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "ATEN_CPU_CAPABILITY": "default",  # compiled in half the time
        "TORCHINDUCTOR_VEC_ISA_OK": "1",  # no trial compile
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    }
    with subprocess.Popen(
        [sys.executable, str(ROOT / "tests/programs/compile_in_forks.py")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **variables},
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def answer() -> dict[str, Any]:
            found: dict[str, Any] = json.loads(answers.readline())
            return found

        def compile_in(directory: Path) -> dict[str, Any]:
            requests.write(f"{directory}\n")
            requests.flush()
            return answer()

        yield answer(), compile_in
        requests.close()
        assert process.wait(60) == 0


@pytest.fixture(scope="module")
def cache(forks: tuple[dict[str, Any], Compile], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache after one cold start. Tests work on copies or put it back."""
    directory = tmp_path_factory.mktemp("compiled") / "cache"
    cold = forks[1](directory)
    assert (cold["graph_hits"], cold["graph_misses"], cold["cpp_compiles"]) == (0, 1, 1)
    return directory


def test_the_place_and_the_build_are_what_torch_says(forks: tuple[dict[str, Any], Compile]) -> None:
    said, ours = forks[0], here.fingerprint()
    assert str(here.default_directory()) == said["default"]
    assert (ours["torch"], ours["torch_git"], ours["cuda"]) == (said["version"], said["git"], said["cuda"])


def test_a_compiled_cache_is_warm_and_its_entries_name_their_writer_graph_and_kernel(cache: Path) -> None:
    found = inventory.take(cache)
    assert found.states == ("warm",)
    assert found.problems == []
    by_part = {entry.part: entry for entry in found.entries}
    assert {GRAPHS, AUTOGRAD, PYTHON, CPP} <= {*by_part}
    for part in (GRAPHS, AUTOGRAD, PYTHON, CPP):
        writer = by_part[part].writer
        assert writer is not None, part
        assert (writer.torch, writer.torch_git) == (here.fingerprint()["torch"], here.fingerprint()["torch_git"])
    assert by_part[GRAPHS].name == by_part[AUTOGRAD].name == by_part[PYTHON].name == "graph 0_inference"
    assert by_part[CPP].name == "cpp_fused_add_cos_sin_0"


def test_the_hash_of_torchs_sources_is_read_and_computed_as_torch_spells_it(
    cache: Path, forks: tuple[dict[str, Any], Compile]
) -> None:
    keys = {entry.writer.torch_key for entry in inventory.take(cache).entries if entry.writer}
    assert keys == {forks[0]["key"]}
    assert here.torch_key() == forks[0]["key"]


@pytest.mark.skipif(not hasattr(os, "O_NOATIME"), reason="this system has no way to read a file and keep its access time")
def test_looking_leaves_access_times_and_everything_else_as_they_were(cache: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(cache, tmp_path / "cache"))
    for path in copy.rglob("*"):
        os.utime(path, ns=(10**18, path.stat().st_mtime_ns))  # before the last change: the next read would set it
    before = tree_times(copy)
    assert compile_cache.main(["inventory", str(copy)]) == 0
    assert compile_cache.main(["snapshot", str(tmp_path / "s.tar"), "--directory", str(copy)]) == 0
    assert compile_cache.main(["diff", str(copy), str(tmp_path / "s.tar")]) == 1  # the lock is not in it
    assert tree_times(copy) == before


def tree_times(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_atime_ns, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_every_cut_of_an_entry_is_torn(cache: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(cache, tmp_path / "cache"))
    checked = 0
    for entry in inventory.take(copy).entries:
        for file in entry.files:
            if entry.part not in {GRAPHS, AUTOGRAD} and not file.path.endswith(".so"):
                continue
            whole = (copy / file.path).read_bytes()
            for size in range(0, len(whole), max(1, len(whole) // 12)):
                (copy / file.path).write_bytes(whole[:size])
                with (copy / file.path).open("rb") as cut:
                    assert damage(cut, file.path, pickled=entry.part != CPP), (file.path, size)
                checked += 1
            assert [torn.path for torn in inventory.take(copy).torn] == [entry.path]
            (copy / file.path).write_bytes(whole)
    assert checked >= 36
    assert inventory.take(copy).states == ("warm",)


def test_a_restored_cache_gives_the_warm_start_without_a_cpp_compile_also_elsewhere(
    cache: Path, forks: tuple[dict[str, Any], Compile], tmp_path: Path
) -> None:
    before, snapshot, elsewhere = tree(cache), tmp_path / "cache.tar", tmp_path / "elsewhere"
    assert before is not None
    assert compile_cache.main(["snapshot", str(snapshot), "--directory", str(cache)]) == 0
    shutil.rmtree(cache)
    assert compile_cache.main(["restore", str(snapshot), "--yes"]) == 0
    restored = tree(cache)
    assert restored == {name: value for name, value in before.items() if not name.startswith("locks/")}
    assert compile_cache.main(["restore", str(snapshot), "--directory", str(elsewhere), "--yes"]) == 0
    shutil.move(cache, tmp_path / "aside")  # what is elsewhere needs nothing of it
    warm = forks[1](elsewhere)
    assert (warm["graph_hits"], warm["autograd_hits"], warm["graph_misses"], warm["cpp_compiles"]) == (1, 1, 0, 0)
    shutil.move(tmp_path / "aside", cache)
    warm = forks[1](cache)
    assert (warm["graph_hits"], warm["autograd_hits"], warm["graph_misses"], warm["cpp_compiles"]) == (1, 1, 0, 0)
    assert {name: value for name, value in (tree(cache) or {}).items() if not name.startswith("locks/")} == restored


def test_the_last_read_is_known_where_the_file_system_tells(cache: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(cache, tmp_path / "cache"))
    now_ns = time.time_ns()
    for path in copy.rglob("*"):
        os.utime(path, ns=(now_ns - 90 * 10**9, now_ns - 90 * 10**9))
    assert inventory.to_dict(inventory.take(copy))["last_read_seconds"] is None
    (graph,) = (copy / "fxgraph").glob("*/*/*")
    os.utime(graph, ns=(now_ns - 30 * 10**9, now_ns - 90 * 10**9))
    assert inventory.to_dict(inventory.take(copy))["last_read_seconds"] == (now_ns - 30 * 10**9) / 1e9
