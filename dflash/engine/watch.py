"""Does every rank still live and get on? A thread of each rank looks, and ends the rank when one does not.

Every rank puts a beat on torchrun's store: a count, and what its worker is at (`Doing`). It looks at
- itself: one micro-batch or one update that takes longer than the time-out is a hang,
- the next two ranks: a beat that has not changed for the time-out is a dead or stopped process, and so, at once, is a process of
  this machine that is gone,
- everybody, once it has waited for the time-out itself: if all wait, nobody will ever go on,
- the failure on the store. The first failure is the one that is told, by the rank that put it there.
A second thread looks whether the first one gets round: on a machine that has lost its network, it may wait for the store forever.

Then each machine's stacks are written to a file, a rank that hangs is killed (it would not hear torchrun's SIGTERM), and every
rank ends with exit code 1: by itself if its main thread can, else from here.

Known limits: hangs in `slow` work (loading, compiling, saving, decoding) are not noticed unless the whole process stands still.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from torch._C._distributed_c10d import Store

from dflash.engine import stacks
from dflash.engine.launch import Silent
from dflash.engine.loops import Doing, WorkerTimes
from dflash.engine.queue import WorkerFailed

LEAVE_SECONDS = 2.0  # for the main thread to end by itself after a failure
BEATS = 5  # within a time-out
_NEXT = 2  # ranks that each rank looks at


class PeerLost(RuntimeError):
    """The connection to another rank broke; `rank` is None where a collective does not say which."""

    def __init__(self, rank: int | None, error: BaseException) -> None:
        reason = str(error).rpartition("] ")[2].partition(". ")[0].partition("\n")[0]  # Gloo adds places in its source and advice
        super().__init__(f"lost the connection to {'another rank' if rank is None else f'rank {rank}'}: {reason or error}")
        self.rank = rank


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A rank, as messages call it."""

    rank: int
    worker: str
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.worker}, process {self.pid} on {self.host})"


class Watch:
    """The watching thread of one rank; `start` it once, `stop` it after the last collective."""

    def __init__(
        self,
        store: Store,
        peers: Sequence[Peer],
        rank: int,
        doing: Doing,
        *,
        timeout_seconds: float,
        directory: Path,
        most_beat_seconds: float = 1.0,
        nccl: bool = False,
    ) -> None:
        """`directory` gets the stacks; `store` must be a connection of its own, because waiting calls block it."""
        self._most_beat_seconds, self._nccl = most_beat_seconds, nccl
        self._store, self._peers, self._me, self._doing = store, peers, peers[rank], doing
        self._timeout_seconds, self._directory = timeout_seconds, directory
        self._stopped, self._main_leaves, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._ending = threading.Lock()
        self._beats = 0
        self._seen: dict[int, tuple[int, float]] = {}  # rank: its last count, and when that was new
        self._rounds = 0
        self._said_store_is_gone = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._guard = threading.Thread(target=self._run_guard, name="watch-guard", daemon=True)

    @property
    def beat_seconds(self) -> float:
        """Between two signs of life."""
        return min(self._most_beat_seconds, self._timeout_seconds / BEATS)

    def start(self) -> None:
        """Begin to look."""
        stacks.answer_to_signal()
        self._beat()
        self._thread.start()
        self._guard.start()

    def stop(self) -> None:
        """End without a failure."""
        self._stopped.set()
        self._thread.join()
        self._store.set(f"left/{self._me.rank}", "1")

    def failed(self, error: BaseException) -> Silent:
        """What the main thread shall raise after `error`, once the failure has been told. Returns after at most some seconds."""
        self._main_leaves.set()
        try:
            return self._failed(error)
        except RuntimeError as lost:  # what torch's stores raise
            self._say_store_is_gone(f"{lost}; before that: {type(error).__name__}: {error}")
            return Silent(1)

    def spent(self) -> list[dict[str, float] | None]:
        """Seconds that each rank has spent with each kind of `Doing`, at its last sign of life. For the main thread."""
        beats = [self._beat_of(peer.rank) for peer in self._peers]
        return [beat["spent"] if beat else None for beat in beats]

    def times(self) -> list[WorkerTimes]:
        """What the workers of all ranks did until their last sign of life. For the main thread."""
        beats = [self._beat_of(peer.rank) for peer in self._peers]
        return [WorkerTimes(**beat["times"]) for beat in beats if beat and beat["times"]]

    def _failed(self, error: BaseException) -> Silent:
        cause = error.__cause__ if isinstance(error, WorkerFailed) and error.__cause__ else error
        if isinstance(cause, PeerLost):
            self._blame(cause)
        elif isinstance(cause, KeyboardInterrupt):
            self._interrupted()
        else:
            first = self._record(self._me.rank, f"failed: {type(cause).__name__}: {cause}", hangs=False)
            if first:
                traceback.print_exception(cause, file=sys.stderr)
        failure = self._failure()
        if failure is not None:
            self._end(failure)
            return Silent(1)
        self._store.set(f"left/{self._me.rank}", "1")
        if self._me.rank == 0:
            sys.stderr.write("error: interrupted; checkpoints that were saved are whole\n")
        return Silent(130)

    def _run(self) -> None:
        while not self._stopped.wait(self.beat_seconds):
            self._rounds += 1
            try:
                self._beat()
                failure = self._failure() or self._look()
            except RuntimeError as error:  # what torch's stores raise
                failure = {"rank": None, "text": "", "by": -1}
                self._say_store_is_gone(str(error))
            if failure is not None and not self._stopped.is_set():
                self._end(failure)
                if self._main_leaves.wait(LEAVE_SECONDS):
                    threading.Event().wait(LEAVE_SECONDS)
                sys.stderr.flush()
                os._exit(1)

    def _run_guard(self) -> None:
        """End this rank if the store has answered nothing for the time-out. Counts its own naps: to be stopped is no waiting."""
        allowed = -(-(self._timeout_seconds + 2 * stacks.DUMP_SECONDS) // self.beat_seconds)
        rounds, naps = self._rounds, 0
        while not self._stopped.wait(self.beat_seconds):
            rounds, naps = (rounds, naps + 1) if rounds == self._rounds else (self._rounds, 0)
            if naps > allowed:
                self._say_store_is_gone(f"no answer for {naps * self.beat_seconds:.0f} s")
                sys.stderr.flush()
                os._exit(1)

    def _say_store_is_gone(self, reason: str) -> None:
        if self._said_store_is_gone.acquire(blocking=False):  # only once
            sys.stderr.write(
                f"error: {self._me} cannot reach torchrun's store: {reason}. Torchrun has ended, or the network is lost; it was "
                f"at: {self._doing.text}. Checkpoints that were saved are whole\n"
            )

    def _beat(self) -> None:
        self._beats += 1
        doing = self._doing
        seconds = time.monotonic() - doing.since
        times = dataclasses.asdict(doing.times) if doing.times else None
        what = {"kind": doing.kind, "text": doing.text, "seconds": seconds, "spent": doing.spent(), "times": times}
        self._store.set(f"beat/{self._me.rank}", json.dumps({"count": self._beats, **what}))

    def _look(self) -> dict[str, Any] | None:
        seconds = time.monotonic() - self._doing.since
        if self._doing.kind == "working" and seconds > self._timeout_seconds:
            self._record(self._me.rank, f"does not get on since {seconds:.0f} s", hangs=True)
        for step in range(1, min(_NEXT, len(self._peers) - 1) + 1):
            self._look_at(self._peers[(self._me.rank + step) % len(self._peers)])
        if self._doing.kind == "waiting" and seconds > self._timeout_seconds:
            self._look_at_all()
        return self._failure()

    def _look_at(self, peer: Peer) -> None:
        now = time.monotonic()
        count = (self._beat_of(peer.rank) or {"count": 0})["count"]
        last, since = self._seen.get(peer.rank, (-1, now))
        if count != last:
            self._seen[peer.rank] = (count, now)
        elif now - since > self._timeout_seconds:
            state = f", its process is {_state(peer.pid)}" if peer.host == self._me.host else ""
            self._record(peer.rank, f"has given no sign of life for {now - since:.0f} s{state}", hangs=True)
        elif peer.host == self._me.host and _state(peer.pid) == "gone":
            self._record(peer.rank, "has died", hangs=False)

    def _look_at_all(self) -> None:
        beats = [self._beat_of(peer.rank) for peer in self._peers]
        if all(beat and beat["kind"] == "waiting" and beat["seconds"] > self._timeout_seconds / 2 for beat in beats):
            places = "; ".join(f"rank {rank} {beat['text']}" for rank, beat in enumerate(beats) if beat)
            self._record(None, f"all ranks wait for each other: {places}", hangs=False)

    def _beat_of(self, rank: int) -> dict[str, Any] | None:
        key = f"beat/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _blame(self, lost: PeerLost) -> None:
        """Who is it that does not answer? A rank that failed has said so before it left; one that was killed has not."""
        if lost.rank is not None:
            self._record(lost.rank, f"has left ({lost})", hangs=False)
            return
        deadline = time.monotonic() + 2 * self._timeout_seconds
        while self._failure() is None and time.monotonic() < deadline:
            for peer in self._peers:
                if peer.host == self._me.host and peer != self._me and _state(peer.pid) == "gone":
                    self._record(peer.rank, "has died", hangs=False)
                    return
            threading.Event().wait(0.1)
        self._record(None, f"a rank that nobody could name has left: {lost}", hangs=False)

    def _interrupted(self) -> None:
        """Torchrun interrupts all ranks when one has died; otherwise a person did."""
        for peer in self._peers:
            if peer.host == self._me.host and peer != self._me and _state(peer.pid) == "gone":
                self._record(peer.rank, "has died", hangs=False)

    def _record(self, rank: int | None, what: str, *, hangs: bool) -> bool:
        """Put a failure on the store; returns whether it is the first. To leave at the end, or after bad input, is none."""
        if self._store.check(["told"]) or self._store.check([f"left/{rank}"]):
            return False
        text = what
        if rank == self._me.rank:
            text = f"{self._me} {what}; it was at: {self._doing.text}"
        elif rank is not None:
            beat = self._beat_of(rank) or {"text": "nothing known"}
            text = (
                f"{self._peers[rank]} {what}; at its last sign of life it was at: {beat['text']}; "
                f"rank {self._me.rank} ({self._me.worker}), which noticed it, was at: {self._doing.text}"
            )
        failure = json.dumps({"rank": rank, "text": text, "by": self._me.rank, "hangs": hangs})
        return bool(self._store.compare_set("failure", "", failure).decode() == failure)

    def _failure(self) -> dict[str, Any] | None:
        if not self._store.check(["failure"]):
            return None
        failure: dict[str, Any] = json.loads(self._store.get("failure"))
        return failure

    def _end(self, failure: dict[str, Any]) -> None:
        """Write stacks, tell the failure, kill what hangs: each once. Both threads may come here; the second one waits."""
        with self._ending:
            if self._ended.is_set():
                return
            with contextlib.suppress(RuntimeError):  # the store is gone: there is nobody left to share the work with
                self._end_together(failure)
            self._ended.set()

    def _end_together(self, failure: dict[str, Any]) -> None:
        host = self._me.host
        with contextlib.suppress(OSError, RuntimeError):
            stacks.write_collectives(self._directory / f"collectives_rank_{self._me.rank}", nccl=self._nccl)
        path = self._directory / f"stacks-{host}.txt"
        if self._store.add(f"dumps/{host}", 1) == 1:
            local = {f"rank {peer.rank} ({peer.worker})": peer.pid for peer in self._peers if peer.host == host}
            with contextlib.suppress(OSError):  # a full disk must not hide the failure
                stacks.write_stacks(local, path)
            self._store.set(f"dumped/{host}", "1")
            guilty = None if failure["rank"] is None else self._peers[failure["rank"]]
            if failure.get("hangs") and guilty and guilty != self._me and guilty.host == host:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(guilty.pid, signal.SIGKILL)
        self._store.wait([f"dumped/{host}"], timedelta(seconds=2 * stacks.DUMP_SECONDS))
        if failure["by"] == self._me.rank:
            sys.stderr.write(
                f"error: {failure['text']}. Stacks of all ranks: {self._directory}/stacks-HOST.txt, last collectives: "
                f"{self._directory}/collectives_rank_N. Checkpoints that were saved are whole: "
                f"torchrun --max-restarts starts again from the last one, and so does --resume\n"
            )
            sys.stderr.flush()


def _state(pid: int) -> str:
    """State of a process of this machine, `gone` when it has ended."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    return "gone" if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else str(status)
