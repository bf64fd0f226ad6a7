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
from diagnostics.logs.traceback import Frame

_MAX_THREADS = 2000
_MAX_FRAMES = 200
_MAX_OTHER_LINES = 5
_MAX_QUIET_LINES = 1000
_FAULTHANDLER = re.compile(r"^(?:Current thread|Thread) 0x(?P<id>[0-9a-f]+)(?: \[(?P<name>.*)\])? \(most recent call first\):")
_PY_SPY = re.compile(r'^Thread (?P<id>\w+) \((?P<state>idle|active)[^)]*\)(?:: "(?P<name>.*)")?$')
_FRAME = re.compile(r'^\s+File "(?P<file>.+?)", line (?P<line>\d+) in (?P<function>.+)$')
_PY_SPY_FRAME = re.compile(r"^\s+(?P<function>\S.*) \((?P<file>[^()]+):(?P<line>\d+)\)$")
_CAUSE = re.compile(r"^(?P<cause>Fatal Python error: .+|Timeout \(.+\)!|Process \d+: .*|Python v\d.*)$")
_BEGINNINGS = ("Thread ", "Current thread ", "Fatal Python error", "Timeout (", "Process ", '  File "')
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
        self._open: dict[str, Dump] = {}

    @property
    def idle(self) -> bool:
        """No dump is open."""
        return not self._open

    def feed(self, line: Line) -> tuple[bool, list[Dump]]:
        """Whether the line belongs to a dump, and the dumps that it ends."""
        dump = self._open.get(line.stream)
        if dump is None and not line.text.startswith(_BEGINNINGS):
            return False, []
        cause, thread = _CAUSE.match(line.text), _thread(line.text)
        if cause is not None and (dump is None or dump.threads or cause["cause"].startswith(("Fatal", "Timeout"))):
            self._open[line.stream] = Dump(
                stream=line.stream, first_line=line.number, last_line=line.number, cause=cause["cause"]
            )
            return True, [dump] if dump is not None else []
        frame = _FRAME.match(line.text) or (_PY_SPY_FRAME.match(line.text) if dump is not None else None)
        if dump is None and (thread is not None or frame is not None):
            dump = self._open[line.stream] = Dump(stream=line.stream, first_line=line.number, last_line=line.number)
        if dump is None:
            return False, []
        if _add(dump, thread, frame) or cause is not None:
            dump.last_line = line.number
            return True, []
        if line.text and line.number - dump.last_line > _MAX_OTHER_LINES:
            return False, [self._open.pop(line.stream)]
        return False, []

    def sweep(self, number: int) -> list[Dump]:
        """Hand over what was last touched long before line `number`; call it now and then."""
        names = [name for name, dump in self._open.items() if number - dump.last_line > _MAX_QUIET_LINES]
        return [self._open.pop(name) for name in names]

    def finish(self) -> list[Dump]:
        """What is still open at the end of the log."""
        done = list(self._open.values())
        self._open.clear()
        return done


def _add(dump: Dump, thread: Thread | None, frame: re.Match[str] | None) -> bool:
    if thread is not None:
        if len(dump.threads) < _MAX_THREADS:
            dump.threads.append(thread)
        return True
    if frame is None:
        return False
    if not dump.threads:
        dump.threads.append(Thread(name="cut off", active=False))
    if len(dump.threads[-1].frames) < _MAX_FRAMES:
        dump.threads[-1].frames.append(Frame(frame["file"], int(frame["line"]), frame["function"]))
    return True


def _thread(text: str) -> Thread | None:
    found = _FAULTHANDLER.match(text)
    if found is not None:
        return Thread(name=found["name"] or f"thread 0x{found['id'].lstrip('0')}", active=False)
    found = _PY_SPY.match(text)
    return Thread(name=found["name"] or f"thread {found['id']}", active=found["state"] == "active") if found is not None else None


def _name(frame: Frame) -> str:
    return frame.function.rpartition(".")[2]
