"""Laws of the inventory: states, writers, left-overs, users, and input that is none."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_caches import SEEN, TRITON_KEY, graph, h200_here, letters, library, ours, tree, triton_kernel, words, write

from diagnostics import compile_cache
from diagnostics.caches import here, inventory
from diagnostics.caches.entries import AUTOGRAD, CPP, GRAPHS, LEFT, OTHER, PYTHON, TRITON

WAITING = "import sys; file = open(sys.argv[1]); print('open', flush=True); sys.stdin.read()"


@pytest.fixture
def gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that is the H200's of SEEN, as NVML and torch's version.py would tell it."""
    monkeypatch.setattr(here, "fingerprint", lambda: {"python_abi": "cpython-312-x86_64-linux-gnu", **h200_here()})


def test_a_cache_of_our_own_is_warm_and_an_empty_one_cold(tmp_path: Path) -> None:
    assert inventory.take(tmp_path).states == ("cold",)
    write(tmp_path / "locks" / "x.lock", "")
    assert inventory.take(tmp_path).states == ("cold",)
    graph(tmp_path, 1, ours())
    assert inventory.take(tmp_path).states == ("warm",)


def test_what_another_torch_wrote_is_foreign_with_the_reason_down_to_its_kernels(tmp_path: Path) -> None:
    graph(tmp_path, 1, SEEN["H200"])
    found = inventory.take(tmp_path)
    assert found.states == ("cold", "foreign")
    reason = f"written by torch 2.11.0+cu130, here is {here.fingerprint()['torch']}"
    assert {entry.part: entry.foreign for entry in found.entries} == dict.fromkeys((AUTOGRAD, GRAPHS, PYTHON, CPP), reason)


def test_code_that_a_graph_of_our_own_runs_is_not_foreign(tmp_path: Path) -> None:
    graph(tmp_path, 1, SEEN["H200"])
    graph(tmp_path, 2, ours())
    found = inventory.take(tmp_path)
    assert found.states == ("warm", "foreign")
    (kernel,) = (entry for entry in found.entries if entry.part == CPP)
    assert kernel.foreign is None
    assert kernel.name == "cpp_fused_wave_0"
    assert sorted(entry.foreign is None for entry in found.entries if entry.part == PYTHON) == [False, True]


def test_an_entry_without_a_version_is_told_by_its_hash_of_torchs_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = SEEN["2.14.1"]
    graph(tmp_path, 1, seen)
    found = inventory.take(tmp_path)
    assert found.states == ("cold", "foreign")
    assert not any("name no torch" in note for note in found.notes)
    assert inventory.writers(found.entries)[0]["torch_hash"] == seen["hash"]
    monkeypatch.setattr(here, "torch_key", lambda: seen["key"])
    found = inventory.take(tmp_path)
    assert found.states == ("warm",)
    assert inventory.writers(found.entries)[0]["torch"] == here.fingerprint()["torch"]


@pytest.mark.usefixtures("gpu_here")
def test_the_device_decides_too_and_triton_tells_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph(tmp_path, 1, SEEN["H200"])
    triton_kernel(tmp_path, named=tmp_path)
    write(tmp_path / "triton" / "0" / TRITON_KEY.replace("4", "5") / "cuda_utils.cpython-312-x86_64-linux-gnu.so", library())
    assert inventory.take(tmp_path).states == ("warm",)
    values = {**here.fingerprint(), "gpus": ["NVIDIA H200 NVL (cuda sm100)"]}
    monkeypatch.setattr(here, "fingerprint", lambda: values)
    reasons = {entry.part: entry.foreign for entry in inventory.take(tmp_path).entries if entry.name != "cuda_utils"}
    assert reasons[GRAPHS] == "written for NVIDIA H200, here is NVIDIA H200 NVL (cuda sm100)"
    assert reasons[TRITON] == "written for cuda sm90, here is NVIDIA H200 NVL (cuda sm100)"
    graph(tmp_path, 1, {**SEEN["H200"], "device": "NVIDIA H200 MIG 1g.18gb"})
    values |= {"gpus": ["NVIDIA H200 (cuda sm90)"]}
    assert inventory.take(tmp_path).foreign == []
    values |= {"triton": "3.7.1", "python_abi": "cpython-313-x86_64-linux-gnu"}
    reasons = {entry.name or "": entry.foreign for entry in inventory.take(tmp_path).entries if entry.part == TRITON}
    assert reasons["addk"] == "written by triton 3.6.0, here is 3.7.1"
    assert reasons["cuda_utils"] == "written by Python 312, here is cpython-313-x86_64-linux-gnu"


def test_the_system_is_what_stands_behind_the_hash_not_what_a_programs_code_says(tmp_path: Path) -> None:
    source = [line.replace("H200", "H100").replace("3.6.0", "9.9.9") for line in words(SEEN["H200"])[2:]]
    entry = {"source": "".join(source), "lines": words(SEEN["H200"]), "padding": "x" * 70_000}
    write(tmp_path / "fxgraph/aa" / letters("f", 1) / letters("", 1), pickle.dumps(entry, protocol=4))
    (found,) = inventory.take(tmp_path).entries
    assert found.writer is not None
    assert (found.part, found.writer.device, found.writer.triton) == (GRAPHS, "NVIDIA H200", "3.6.0")


def test_left_overs_are_torn_once_their_writer_is_gone(tmp_path: Path) -> None:
    made = graph(tmp_path, 1, ours())
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    write(made["fx"].parent / f".{os.getpid()}.140000.tmp", "half")
    assert inventory.take(tmp_path).states == ("warm",)
    write(made["fx"].parent / f".{dead.pid}.140000.tmp", "half")
    write(tmp_path / "triton/0" / TRITON_KEY / f"tmp.pid_{dead.pid}_c0ffee" / "k.json", "{")
    write(tmp_path / "triton/0/tmp.123e4567-e89b-12d3-a456-426614174000/k.json", "{")
    write(tmp_path / "locks" / "soft.lock", f"{dead.pid}\n")
    found = inventory.take(tmp_path)
    assert found.states == ("warm", "torn")
    assert sorted(entry.part for entry in found.torn) == ["locks", LEFT, LEFT, LEFT]
    assert {entry.damage for entry in found.torn if str(dead.pid) in entry.path} == {
        "left by a process that ended while it wrote"
    }


def test_a_process_that_was_started_after_the_file_was_written_is_another(tmp_path: Path) -> None:
    left = write(tmp_path / "ab" / f".{os.getpid()}.140000.tmp", "half")
    os.utime(left, (10**9, 10**9))
    assert inventory.take(tmp_path).states == ("cold", "torn")


@pytest.mark.parametrize(
    ("path", "content", "why"),
    [
        ("fxgraph/ab/" + letters("f", 7) + "/x", b"\x00junk" * 50, "cut off or not a pickle"),
        ("fxgraph/ab/" + letters("f", 7) + "/x", b"", "empty"),
        ("fxgraph/ab/" + letters("f", 7) + "/x", b"\x80\x04N.more", "something follows its end"),
        (f"triton/0/{TRITON_KEY}/k.json", b'{"hash": ', "cut off or not JSON"),
        (f"triton/0/{TRITON_KEY}/k.cubin", b"text", "not an ELF library"),
        (f"triton/0/{TRITON_KEY}/k.cubin", library()[:-1], "cut off: 191 bytes of at least 192"),
        ("ab/" + "1" * 64 + ".best_config", b"{", "cut off or not JSON"),
    ],
)
def test_damage_is_named(tmp_path: Path, path: str, content: bytes, why: str) -> None:
    write(tmp_path / path, content)
    (torn,) = inventory.take(tmp_path).torn
    assert torn.damage == f"{path}: {why}"


@contextlib.contextmanager
def holding(path: Path, **variables: str) -> Iterator[int]:
    """A live process that has this file open."""
    with subprocess.Popen(
        [sys.executable, "-c", WAITING, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables},
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process.pid
        process.stdin.close()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="no /proc here: users are not observed, which the inventory says")
def test_two_live_processes_contend_and_a_cache_in_use_is_neither_replaced_nor_pruned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, snapshot = tmp_path / "cache", tmp_path / "s.tar"
    made = graph(cache, 1, ours())
    assert compile_cache.main(["snapshot", str(snapshot), "--directory", str(cache)]) == 0
    with holding(made["so"]) as one:
        assert [user.pid for user in inventory.take(cache).users] == [one]
        assert inventory.take(cache).states == ("warm",)
        with holding(made["code"]) as other:
            assert [user.pid for user in inventory.take(cache).users] == sorted([one, other])
            assert inventory.take(cache).states == ("warm", "contended")
            assert compile_cache.main(["inventory", str(cache)]) == 1
        before = tree(tmp_path)
        capsys.readouterr()
        assert compile_cache.main(["restore", str(snapshot), "--yes"]) == 1
        assert compile_cache.main(["prune", "--max-bytes", "0", "--yes", "--directory", str(cache)]) == 1
        assert capsys.readouterr().err.count(f"is in use: process {one}") == 2
        assert tree(tmp_path) == before
    assert inventory.take(cache).users == []


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="no /proc here: users are not observed, which the inventory says")
def test_a_process_that_only_names_the_folder_is_told_and_stops_nothing(tmp_path: Path) -> None:
    cache, link = tmp_path / "cache", tmp_path / "link"
    graph(cache, 1, ours())
    link.symlink_to(cache)
    with holding(write(tmp_path / "elsewhere", ""), TORCHINDUCTOR_CACHE_DIR=str(link)) as pid:
        (user,) = inventory.take(cache).users
        assert (user.pid, user.holds, user.how) == (pid, False, "has TORCHINDUCTOR_CACHE_DIR set to it")
        assert compile_cache.main(["prune", "--max-bytes", "0", "--yes", "--directory", str(cache)]) == 0


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="no /proc here: users are not observed, which the inventory says")
def test_a_shell_that_only_passes_the_folder_on_does_not_use_it(tmp_path: Path) -> None:
    graph(tmp_path, 1, ours())
    variables = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    with subprocess.Popen(("cat",), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables) as shell:
        assert shell.stdin is not None
        assert shell.stdout is not None
        shell.stdin.write(b"x")
        shell.stdin.flush()
        shell.stdout.read(1)  # it runs
        assert inventory.take(tmp_path).users == []
        shell.stdin.close()


def test_what_is_no_cache_is_told_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "file", "x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "nothing", file, tmp_path / "loop"):
        assert compile_cache.main(["inventory", str(path)]) == 2
        assert str(path) in capsys.readouterr().err
    junk = tmp_path / "junk"
    write(junk / "a" / "b.bin", os.urandom(1000))
    assert {entry.part for entry in inventory.take(junk).entries} == {OTHER}
    for command in (["snapshot", str(tmp_path / "s.tar")], ["prune", "--torn", "--foreign", "--older-than-days", "0", "--yes"]):
        assert compile_cache.main([*command, "--directory", str(junk)]) == 2
    assert tree(tmp_path) == {"file": tree(tmp_path)["file"], "junk/a/b.bin": tree(tmp_path)["junk/a/b.bin"]}  # type: ignore[index]  # it is there


def test_a_link_out_of_the_cache_is_told_and_nothing_is_done(tmp_path: Path) -> None:
    cache, outside = tmp_path / "cache", write(tmp_path / "outside" / "precious", "x")
    graph(cache, 1, ours())
    (cache / "ab").mkdir(exist_ok=True)
    (cache / "ab" / "link").symlink_to(outside.parent)
    assert inventory.take(cache).problems == ["ab/link: a symbolic link that leaves the cache: not followed"]
    before = tree(tmp_path)
    assert compile_cache.main(["inventory", str(cache)]) == 3
    assert compile_cache.main(["snapshot", str(tmp_path / "s.tar"), "--directory", str(cache)]) == 3
    assert compile_cache.main(["prune", "--max-bytes", "0", "--yes", "--directory", str(cache)]) == 3
    assert tree(tmp_path) == before


@contextlib.contextmanager
def as_a_stranger(folder: Path) -> Iterator[None]:
    """Without the right to read `folder`: root gives its rights away for a while."""
    folder.chmod(0)
    if os.geteuid() == 0:
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)
    else:
        yield
    folder.chmod(0o700)


def test_what_may_not_be_read_is_told_and_nothing_is_done(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    graph(cache, 1, ours())
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and Path(tempfile.gettempdir()) in folder.parents:
            folder.chmod(0o755)
    before, here_before = tree(cache), here.fingerprint()
    with as_a_stranger(cache / "fxgraph"):
        assert compile_cache.main(["inventory", str(cache)]) == 3
        assert compile_cache.main(["snapshot", str(tmp_path / "s.tar"), "--directory", str(cache)]) == 3
        assert compile_cache.main(["prune", "--max-bytes", "0", "--yes", "--directory", str(cache)]) == 3
    assert here.fingerprint() == here_before
    assert tree(cache) == before


def test_dates_from_the_future_are_told_and_nothing_is_pruned_by_age(tmp_path: Path) -> None:
    made = graph(tmp_path, 1, ours())
    os.utime(made["code"], (time.time() + 10**7, time.time() + 10**7))
    assert "in the future" in inventory.take(tmp_path).problems[0]
    before = tree(tmp_path)
    assert compile_cache.main(["inventory", str(tmp_path)]) == 3
    assert compile_cache.main(["prune", "--older-than-days", "0", "--yes", "--directory", str(tmp_path)]) == 3
    assert tree(tmp_path) == before


def test_the_environment_says_where_the_caches_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert here.places() == [here.default_directory(), tmp_path / ".triton" / "cache"]
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "t"))
    assert here.triton_directory() == tmp_path / "t" / ".triton" / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "i"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "i" / "triton"))
    assert here.places() == [tmp_path / "i", here.default_directory() / "precompiled_headers"]


def test_the_json_holds_what_was_found_and_no_folder_at_all_is_not_observed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(here, "places", lambda: [tmp_path / "nothing"])
    assert compile_cache.main(["inventory"]) == 3
    assert "absent" in capsys.readouterr().out
    graph(tmp_path / "cache", 1, SEEN["H200"])
    assert compile_cache.main(["inventory", str(tmp_path / "cache"), "--json", str(tmp_path / "i.json")]) == 1
    (cache,) = json.loads((tmp_path / "i.json").read_text())["caches"]
    assert cache["states"] == ["cold", "foreign"]
    assert (
        sum(part["bytes"] for part in cache["parts"])
        == cache["bytes"]
        == sum(file["bytes"] for file in cache["listing"].values())
    )
    assert {row["name"] for row in cache["kernels"]} == {"graph 1_inference", "cpp_fused_wave_0"}
    assert cache["hits"] is None


def test_the_last_runs_of_a_cache_are_read_from_their_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    cache, logs = tmp_path / "cache", tmp_path / "runs"
    graph(cache, 1, ours())
    counts = {"hits": 3, "misses": 1, "bypassed": 2}

    def event(name: str, when: float, directory: Path) -> str:
        fields = {"directory": str(directory), "state": "warm", "graphs": counts, "autograd": {}}
        return json.dumps({"kind": "record", "name": name, "time_seconds": when, "fields": fields}) + "\n"

    for name, text in {
        "old": event("compile_cache", 1.7e9, cache),
        "new": event("step", 1.8e9, cache) + event("compile_cache", 1.8e9, cache) + '{"name": "compile_cache", "fie',
        "other": event("compile_cache", 1.6e9, tmp_path / "elsewhere"),
        "killed": event("notice", 1.8e9, cache) + '{"name": "compile_cache", "fields": 3}\n"compile_cache"\n',
    }.items():
        (logs / name).mkdir(parents=True)
        (logs / name / "events.jsonl").write_text(text)
    out = tmp_path / "i.json"
    assert compile_cache.main(["inventory", str(cache), "--runs", str(logs), "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    names = [Path(run["log"]).parent.name for run in written["caches"][0]["hits"]]
    assert names == ["new", "old"]
    assert [Path(run["log"]).parent.name for run in written["runs"]] == ["new", "old", "other"]
    assert written["runs"][0]["graphs"] == counts
    shown = capsys.readouterr().out
    assert "3 + 1, 2 not cacheable" in shown
    assert f"{logs / 'killed' / 'events.jsonl'}: nothing of hits and misses" in shown


def test_folders_without_run_logs_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph(tmp_path / "cache", 1, ours())
    command = ["inventory", str(tmp_path / "cache"), "--runs"]
    assert compile_cache.main([*command, str(tmp_path / "cache")]) == 3
    assert "there is no events.jsonl in it" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        compile_cache.main([*command, str(tmp_path / "none")])


def test_a_summary_for_a_report_has_parts_and_states_or_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph(tmp_path, 1, ours())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = compile_cache.summary()
    assert (found["directory"], found["states"], found["files"]) == (str(tmp_path), ["warm"], 5)
    assert (found["num_torn"], found["num_users"]) == (0, 0)
    assert "users" not in found
    assert {row["part"] for row in found["parts"]} == {AUTOGRAD, GRAPHS, PYTHON, CPP}
    nothing = compile_cache.summary(tmp_path / "nothing")
    assert nothing["directory"] is None
    assert "TORCHINDUCTOR_CACHE_DIR would name another" in nothing["reason"]
