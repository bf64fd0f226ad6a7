"""Stacks of all threads, printed by faulthandler, by a fatal signal or by `py-spy dump`, and who waits for whom in them.

Both print the innermost call first. What a thread waits for is told by the names of functions, since the torch of the log
need not be here: innermost in Dynamo's convert_frame.py, a thread waits for the compile lock; further in than its compile
function, it holds it; innermost in `_engine_run_backward`, it waits for autograd's device threads.

Limits: one look cannot tell a wait from a slow moment, so nothing here is certain; `diagnostics.hang` looks at a live process
twice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from diagnostics.logs.reader import Line
from diagnostics.logs.shapes import DumpPart, Frame

_MAX_THREADS = 2000
_MAX_FRAMES = 200
_MAX_OTHER_LINES = 5
_MAX_QUIET_LINES = 1000
_LOCK_FILE = "torch/_dynamo/convert_frame.py"
_COMPILES = {"_compile", "compile_inner", "_compile_inner"}
_DISTRIBUTED = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")


@dataclass(kw_only=True, slots=True)
class Thread:
    """One thread; `frames` begin with the innermost."""

    name: str
    active: bool
    frames: list[Frame] = field(default_factory=list)

    @property
    def waits(self) -> str:
        """One of "the compile lock", "autograd", "a collective", or nothing that is known."""
        if not self.frames or self.active:
            return ""
        inner = self.frames[0]
        if inner.file.endswith(_LOCK_FILE):
            return "the compile lock"
        if _name(inner) == "_engine_run_backward":
            return "autograd"
        if any(frame.file.endswith(_DISTRIBUTED) for frame in self.frames[:3]):
            return "a collective"
        return ""

    @property
    def holds_lock(self) -> bool:
        """It is inside a compile."""
        return any(frame.file.endswith(_LOCK_FILE) and _name(frame) in _COMPILES for frame in self.frames[1:])

    @property
    def of_autograd(self) -> bool:
        """Autograd started it for a device: Python sees first what autograd calls."""
        return self.name.startswith("pt_autograd") or (
            bool(self.frames) and self.frames[-1].file.endswith("torch/autograd/function.py")
        )

    @property
    def program_line(self) -> str:
        """The innermost line outside torch and the standard library."""
        outside = [
            frame
            for frame in self.frames
            if not re.search(r"(?:^|/)torch/|/lib/python[\d.]+/(?!site|dist)|^<frozen|^threading", frame.file)
        ]
        return f"{outside[0].file}:{outside[0].line} in {outside[0].function}" if outside else ""


@dataclass(kw_only=True, slots=True)
class Dump:
    """The threads of one process at one moment. `cause` is why it was printed, as printed."""

    stream: str
    first_line: int
    last_line: int
    cause: str = ""
    threads: list[Thread] = field(default_factory=list)

    @property
    def deadlock(self) -> tuple[Thread, Thread] | None:
        """Who holds the compile lock and waits for autograd, and autograd's thread that waits for the lock."""
        holders = [thread for thread in self.threads if thread.holds_lock and thread.waits == "autograd"]
        waiters = [thread for thread in self.threads if thread.waits == "the compile lock" and thread.of_autograd]
        return (holders[0], waiters[0]) if holders and waiters else None

    @property
    def in_collectives(self) -> list[Thread]:
        """The threads that wait for other ranks."""
        return [thread for thread in self.threads if thread.waits == "a collective"]

    @property
    def stack(self) -> list[Frame]:
        """Calls of the thread that was running, or of the last one; the innermost last, as in a traceback."""
        return list(reversed(self.threads[-1].frames)) if self.threads else []


class DumpReader:
    """Feed it lines; it hands over each dump once its end is known."""

    def __init__(self) -> None:
        self.open: dict[str, Dump] = {}  # by stream

    def feed(self, line: Line, number: int, done: list[Dump]) -> bool:
        """Whether line `number` belongs to a dump; dumps that it ends are added to `done`."""
        dump, part = self.open.get(line.stream), line.shape.dump
        if dump is None:
            if part is None or not part.begins:
                return False
            dump = Dump(stream=line.stream, first_line=number, last_line=number, cause=part.cause)
            self.open[line.stream] = dump
            return bool(part.cause) or _add(dump, part)
        if part is None:
            return self._other(dump, line, number, done)
        if part.cause and (dump.threads or part.cause.startswith(("Fatal", "Timeout"))):
            self.open[line.stream] = Dump(stream=line.stream, first_line=number, last_line=number, cause=part.cause)
            done.append(dump)
            return True
        if not _add(dump, part) and not part.cause:
            return self._other(dump, line, number, done)
        dump.last_line = number
        return True

    def _other(self, dump: Dump, line: Line, number: int, done: list[Dump]) -> bool:
        if line.text and number - dump.last_line > _MAX_OTHER_LINES:
            done.append(self.open.pop(line.stream))
        return False

    def sweep(self, number: int) -> list[Dump]:
        """Hand over what was last touched long before line `number`; call it now and then."""
        names = [name for name, dump in self.open.items() if number - dump.last_line > _MAX_QUIET_LINES]
        return [self.open.pop(name) for name in names]

    def finish(self) -> list[Dump]:
        """What is still open at the end of the log."""
        done = list(self.open.values())
        self.open.clear()
        return done


def _add(dump: Dump, part: DumpPart) -> bool:
    if part.thread is not None:
        if len(dump.threads) < _MAX_THREADS:
            dump.threads.append(Thread(name=part.thread.name, active=part.thread.active))
        return True
    frame = part.frame or part.py_spy_frame
    if frame is None:
        return False
    if not dump.threads:
        dump.threads.append(Thread(name="cut off", active=False))
    if len(dump.threads[-1].frames) < _MAX_FRAMES:
        dump.threads[-1].frames.append(frame)
    return True


def _name(frame: Frame) -> str:
    return frame.function.rpartition(".")[2]
