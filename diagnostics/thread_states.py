"""What each thread of a dumped process does: compiles, traces, waits (for what), runs or idles. Pure but for reading sources.

A stack says where a thread is, not what it waits for. That is read from the source: a thread whose innermost Python line is
the head of `with compile_lock` waits for the lock, a thread in the body of such a statement, or further in, holds it.

Limits: the source must be readable here at the path that the process has; locks taken by `acquire()` have no visible holder;
`idle` is every other wait (queues, conditions, files, sockets, sleep, the GIL) and C code that the tables below do not know.
Without native frames a wait in C++ looks like its Python caller. This module imports no torch.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from diagnostics.stacks import DEVICE_THREAD, Frame, Stack

State = Literal[
    "waits for the compile lock",
    "waits in autograd",  # in run_backward, for autograd's device threads
    "waits for a lock",  # another one
    "in a collective",
    "synchronises with a device",
    "compiling",
    "tracing",
    "running",
    "idle",
]
Lock = Literal["waits", "holds"]
_LOCK = "compile_lock"
_MAX_LINES = 3
_COMPILING = {  # file -> functions; other functions of these files also run compiled code
    "torch/_dynamo/convert_frame.py": ("_compile", "compile_inner"),
    "torch/_inductor/compile_fx.py": ("compile_fx", "compile_fx_inner", "compile_fx_forward", "compile_fx_backward"),
    "torch/_functorch/_aot_autograd/graph_compile.py": ("aot_stage1_graph_capture", "aot_stage2_compile"),
}
_TRACING = {
    "torch/fx/_symbolic_trace.py": ("trace",),
    "torch/fx/experimental/proxy_tensor.py": ("trace", "_trace_inner", "dispatch_trace"),
}
_COLLECTIVE = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_NATIVE_COLLECTIVE = re.compile(r"c10d::|nccl|gloo::", re.IGNORECASE)
_NATIVE_SYNCHRONISATION = re.compile(r"cu(da)?(Device|Stream|Event|Ctx)Synchronize|hip\w+Synchronize")
_SYNCHRONISES = re.compile(r"synchronize\(|\.(item|tolist|cpu)\(\)")
_ACQUIRES = re.compile(r"\.acquire\(")
_STANDARD_LIBRARY = re.compile(r"^<frozen |/lib/python[\d.]+/(?!(site|dist)-packages/)")
_TORCH = re.compile(r"(site-packages|dist-packages|pytorch)/torch/")


@dataclass(frozen=True, kw_only=True)
class ThreadState:
    """One thread, read by a person: `inside` is what it has begun further out."""

    name: str
    native_id: int
    state: State
    inside: tuple[str, ...]
    at: str  # the innermost Python line, empty outside Python
    where: tuple[str, ...]  # lines of the program, the innermost last
    holds_compile_lock: bool
    holds_gil: bool
    device_thread: bool  # started by autograd for a device
    in_python: bool  # an autograd device thread without work has no Python frames

    @property
    def label(self) -> str:
        """The thread in a sentence."""
        kind = "autograd's device thread" if self.device_thread else "thread"
        return f"{kind} {self.name} ({self.native_id})"


def classify(stack: Stack) -> ThreadState:
    """Say what one thread does."""
    frames = stack.python_frames
    lock = compile_lock(frames)
    inside = [
        name
        for name, table in (("compiling", _COMPILING), ("tracing", _TRACING))
        if any(_one_of(frame, table) for frame in frames)
    ]
    return ThreadState(
        name=stack.name,
        native_id=stack.native_id,
        state=_state(stack, lock, inside),
        inside=tuple(inside),
        at=_line(frames[0]) if frames else "",
        where=program_lines(frames),
        holds_compile_lock=lock == "holds",
        holds_gil=stack.owns_gil,
        device_thread=is_device_thread(stack),
        in_python=bool(frames),
    )


def compile_lock(frames: tuple[Frame, ...]) -> Lock | None:
    """Whether a thread, innermost frame first, waits for Dynamo's compile lock or holds it (it may take it again)."""
    waits = False
    for number, frame in enumerate(frames):
        for head, body in with_statements(frame.file, _LOCK):
            if frame.line in head and number == 0:
                waits = True
            elif frame.line in head or frame.line in body:
                return "holds"
    return "waits" if waits else None


@functools.lru_cache(maxsize=4096)
def with_statements(file: str, name: str) -> tuple[tuple[range, range], ...]:
    """The lines of heads and bodies of `with ...name:` in a source file; none where it cannot be read."""
    text = "\n".join(_source(file))
    if name not in text:
        return ()
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return ()
    return tuple(_with_statements(tree, name))


def is_device_thread(stack: Stack) -> bool:
    """A thread that autograd started for a device, by its native name or by what Python calls it first."""
    if DEVICE_THREAD.fullmatch(stack.name):
        return True
    frames = stack.python_frames
    return bool(frames) and stack.name.startswith("native thread") and frames[-1].file.endswith("torch/autograd/function.py")


def program_lines(frames: tuple[Frame, ...], limit: int = _MAX_LINES) -> tuple[str, ...]:
    """The program's last `limit` lines, the innermost last; torch's and Python's own where there are no others."""
    program = [frame for frame in frames if not (_TORCH.search(frame.file) or _STANDARD_LIBRARY.search(frame.file))]
    chosen = (program or list(frames))[:limit]
    return tuple(_line(frame) for frame in reversed(chosen))


def unreadable(stacks: tuple[Stack, ...]) -> tuple[str, ...]:
    """Files on these stacks that may take the compile lock and whose source cannot be read: its holder may be missed."""
    files = {frame.file for stack in stacks for frame in stack.python_frames}
    return tuple(sorted(file for file in files if file.endswith(tuple(_COMPILING)) and not _source(file)))


def _state(stack: Stack, lock: Lock | None, inside: list[str]) -> State:
    frames = stack.python_frames
    if lock == "waits" and not stack.active:
        return "waits for the compile lock"
    waiting = _waiting_state(stack, frames[0]) if frames else None
    if waiting is not None:
        return waiting
    if "compiling" in inside:
        return "compiling"
    if "tracing" in inside:
        return "tracing"
    return "running" if stack.active and frames else "idle"


def _waiting_state(stack: Stack, innermost: Frame) -> State | None:
    """What the innermost frames wait for. Synchronising and collectives may use the CPU meanwhile; the others do not."""
    native = " ".join(frame.name for frame in itertools.takewhile(lambda frame: frame.native, stack.frames))
    line = _source_line(innermost)
    if innermost.file.endswith(_COLLECTIVE) or _NATIVE_COLLECTIVE.search(native):
        return "in a collective"
    if _function(innermost) == "synchronize" or _NATIVE_SYNCHRONISATION.search(native) or _SYNCHRONISES.search(line):
        return "synchronises with a device"
    if stack.active:
        return None
    if _is_backward(innermost):
        return "waits in autograd"
    if _STANDARD_LIBRARY.search(innermost.file):  # conditions, and queues whose readers take turns at a lock
        return None
    at_lock = any(innermost.line in head for head, _ in with_statements(innermost.file, ""))
    return "waits for a lock" if at_lock or _ACQUIRES.search(line) else None


def _is_backward(frame: Frame) -> bool:
    return _function(frame) == "_engine_run_backward" or ".run_backward(" in _source_line(frame)


def _function(frame: Frame) -> str:
    return frame.name.rpartition(".")[2]  # py-spy prints qualified names from Python 3.11


def _one_of(frame: Frame, table: dict[str, tuple[str, ...]]) -> bool:
    return any(frame.file.endswith(file) and _function(frame) in names for file, names in table.items())


def _with_statements(tree: ast.Module, name: str) -> Iterator[tuple[range, range]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.With | ast.AsyncWith):
            takes = [
                ast.unparse(item.context_expr) for item in node.items if isinstance(item.context_expr, ast.Name | ast.Attribute)
            ]
            if any(not name or text.rpartition(".")[2] == name for text in takes):
                first = node.body[0].lineno
                yield range(node.lineno, max(first, node.lineno + 1)), range(first, (node.body[-1].end_lineno or first) + 1)


@functools.lru_cache(maxsize=4096)
def _source(file: str) -> tuple[str, ...]:
    try:
        return tuple(Path(file).read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError):
        return ()


def _source_line(frame: Frame) -> str:
    lines = _source(frame.file)
    return lines[frame.line - 1].strip() if 0 < frame.line <= len(lines) else ""


def _line(frame: Frame) -> str:
    file = frame.file.rpartition("site-packages/")[2].removeprefix(f"{Path.cwd()}/")
    return f"{file}:{frame.line} {frame.name}"
