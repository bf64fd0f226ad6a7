"""The watch of one rank, beside beats that the test writes: no other process."""

from __future__ import annotations

import json
import os
import threading
import time
import types
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError, HashStore

from dflash.engine import stacks
from dflash.engine.loops import Doing
from dflash.engine.queue import WorkerFailed
from dflash.engine.watch import Peer, PeerLost, Watch

TIMEOUT_SECONDS = 30.0
MONOTONIC = time.monotonic


class Bench:
    """Rank 0 of three; the others are on another machine."""

    def __init__(self, directory: Path, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.store = HashStore()
        self.doing = Doing()
        self.peers = [Peer(rank=rank, worker=f"w{rank}", host=f"host{min(rank, 1)}", pid=os.getpid()) for rank in range(3)]
        self.watch = Watch(self.store, self.peers, 0, self.doing, timeout_seconds=timeout_seconds, directory=directory)

    def beat(self, rank: int, count: int, kind: str = "working", seconds: float = 0.0) -> None:
        beat = {"count": count, "kind": kind, "text": f"place {rank}", "seconds": seconds}
        self.store.set(f"beat/{rank}", json.dumps(beat))

    def look(self) -> str | None:
        failure = self.watch._look()
        return failure["text"] if failure else None


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(stacks, "write_stacks", lambda processes, path: path.write_text(str(processes)))
    return Bench(tmp_path)


def let_time_pass(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Since the real now, not since what was passed before."""
    monkeypatch.setattr(time, "monotonic", lambda: MONOTONIC() + seconds)


def test_work_that_takes_longer_than_the_time_out_is_a_hang(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with bench.doing.at("working", "gradients of micro-batch 12"):
        assert bench.look() is None
        let_time_pass(monkeypatch, TIMEOUT_SECONDS + 1)
        assert "rank 0 (w0" in (text := bench.look() or "")
        assert "gradients of micro-batch 12" in text


def test_slow_work_is_no_hang(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with bench.doing.at("slow", "saving"):
        let_time_pass(monkeypatch, 10 * TIMEOUT_SECONDS)
        assert bench.look() is None


def test_a_beat_that_stands_still_is_a_hang_of_that_rank(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.beat(1, 5)
    bench.beat(2, 5)
    assert bench.look() is None
    bench.beat(1, 6)
    let_time_pass(monkeypatch, TIMEOUT_SECONDS - 1)
    assert bench.look() is None
    let_time_pass(monkeypatch, TIMEOUT_SECONDS + 1)
    assert "rank 2 (w2" in (text := bench.look() or "")
    assert "place 2" in text


def test_when_all_wait_nobody_will_ever_go_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with bench.doing.at("waiting", "for a micro-batch"):
        let_time_pass(monkeypatch, TIMEOUT_SECONDS + 1)
        for other, kind in ((1, "working"), (2, "waiting")):
            bench.beat(other, 7, kind, TIMEOUT_SECONDS)
        bench.watch._beat()
        assert bench.look() is None
        bench.beat(1, 8, "waiting", TIMEOUT_SECONDS)
        assert "all ranks wait for each other" in (bench.look() or "")


def test_the_first_failure_is_the_one_that_is_told(bench: Bench, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first = Watch(bench.store, bench.peers, 2, Doing(text="a place"), timeout_seconds=TIMEOUT_SECONDS, directory=tmp_path)
    assert first.failed(ValueError("the reason")).code == 1
    assert bench.watch.failed(WorkerFailed("receive", PeerLost(2, RuntimeError("closed")))).code == 1
    shown = capfd.readouterr().err
    assert shown.count("error:") == 1
    assert "rank 2 (w2" in shown
    assert "ValueError: the reason; it was at: a place" in shown


def test_a_lost_connection_blames_the_other_end(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    bench.beat(1, 3)
    error = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:99. This is typically caused by a crash. GLHF!")
    assert bench.watch.failed(PeerLost(1, error)).code == 1
    shown = capfd.readouterr().err
    assert "rank 1 (w1" in shown
    assert "has left (lost the connection to rank 1: Connection closed by peer [127.0.0.1]:99)" in shown
    assert "at its last sign of life it was at: place 1" in shown


def test_a_rank_that_cannot_reach_the_store_ends_and_says_where_it_was(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def gone(*_: object) -> None:
        raise DistNetworkError("Broken pipe")

    monkeypatch.setattr(bench.watch, "_store", types.SimpleNamespace(check=gone, get=gone, set=gone))
    bench.doing.text = "gradients of micro-batch 12"
    assert bench.watch.failed(PeerLost(1, RuntimeError("closed"))).code == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: rank 0 (w0")
    assert "cannot reach torchrun's store: Broken pipe; before that: PeerLost: lost the connection to rank 1: closed" in line
    assert "it was at: gradients of micro-batch 12" in line


def test_a_rank_whose_store_never_answers_is_ended_by_the_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A network that swallows everything: the watching thread hangs in the store."""

    def no_answer(*_: object) -> None:
        silent.wait()
        raise DistNetworkError("the network is back")

    silent, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(stacks, "DUMP_SECONDS", 0.1)
    monkeypatch.setattr("dflash.engine.watch.os._exit", lambda code: ended.set() if code == 1 else None)
    bench = Bench(tmp_path, timeout_seconds=0.2)
    bench.watch.start()
    monkeypatch.setattr(bench.watch, "_store", types.SimpleNamespace(set=no_answer))
    try:
        assert ended.wait(30)
        assert "cannot reach torchrun's store: no answer for" in capfd.readouterr().err
    finally:
        bench.watch._stopped.set()
        silent.set()
        for thread in (bench.watch._guard, bench.watch._thread):
            thread.join()


def test_leaving_at_the_end_or_after_bad_input_is_no_failure(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.look()
    let_time_pass(monkeypatch, TIMEOUT_SECONDS + 1)
    for key in ("left/1", "left/2"):
        bench.store.set(key, "1")
    assert bench.look() is None


def test_who_is_interrupted_blames_nobody(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    assert bench.watch.failed(KeyboardInterrupt()).code == 130
    assert capfd.readouterr().err == "error: interrupted; checkpoints that were saved are whole\n"
    assert bench.store.check(["left/0"])
    assert not bench.store.check(["failure"])


def test_stacks_of_processes_are_written_and_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    stacks.write_stacks({"rank 0": os.getpid(), "rank 1": 2**22 + 1}, tmp_path / "stacks.txt")
    text = (tmp_path / "stacks.txt").read_text()
    assert "test_stacks_of_processes" in text or "asked it to write its stacks" in text
    assert "the process has ended" in text.partition("== rank 1")[2]
