"""A compile cache for one kind of machine: `--compile.cache DIR`.

Everything that torch keeps from compiling (Inductor, AOTAutograd, Triton) goes to `DIR/FINGERPRINT/torch`, so that no other
torch, GPU or CPU writes beside it. torch writes each entry aside and renames it: processes and threads may share the directory.
After the warm-up the run's artefacts are saved to `DIR/FINGERPRINT/artifacts-SHA256.bin`; copied to another machine of the same
fingerprint, they are loaded there, in the main thread and before anything compiles, when its directory is empty.

At a run's end, also a failed one's, the event `compile_cache` says which cache it used and how often torch found there what it
looked for: `python -m diagnostics.compile_cache inventory --runs DIR` reads it.

Known limits: artefacts hold no C++ libraries, so on CPUs they spare less than the directory does. A warm start still traces:
it is faster, not safer. A process that is killed leaves no event, and of several processes only the leading one's is logged.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from filelock import FileLock
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from dflash import events
from dflash.files import write_whole

_COUNTED = {"graphs": ("inductor", "fxgraph_cache_"), "autograd": ("aot_autograd", "autograd_cache_")}
_OUTCOMES = {"hits": "hit", "misses": "miss", "bypassed": "bypass"}  # as they are recorded, and as torch names them
_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


class CompileCache:
    """The cache directory of a run, or torch's own place when `directory` is None."""

    def __init__(self, directory: Path | None) -> None:
        self._home = directory / fingerprint() if directory else None
        self.state = "torch's own"  # "cold", "warm" or "restored" with a directory

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Compile into this cache inside the block. Enter it before anything compiles, in the main thread."""
        before = _lookups()
        with self._placed():
            directory = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()
            try:
                yield
            finally:
                counted = {
                    part: {outcome: count - before[part][outcome] for outcome, count in now.items()}
                    for part, now in _lookups().items()
                }
                events.record("compile_cache", directory=directory, state=self.state, **counted)

    @contextlib.contextmanager
    def _placed(self) -> Iterator[None]:
        if self._home is None:
            yield
            return
        kept = self._home / "torch"
        self.state = "warm" if kept.is_dir() and any(kept.iterdir()) else "cold"
        kept.mkdir(parents=True, exist_ok=True)
        before = {name: os.environ.get(name) for name in _VARIABLES}
        os.environ.update(TORCHINDUCTOR_CACHE_DIR=str(kept.absolute()), TRITON_CACHE_DIR=str(kept.absolute() / "triton"))
        try:
            if self.state == "cold" and self._restore():
                self.state = "restored"
            events.record("notice", text=f"compile cache {self._home}: {self.state}")
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def save(self) -> None:
        """Write what has been compiled since the start as one file, replacing older ones. Call it when nothing compiles."""
        if self._home is None or self.state == "warm":
            return
        artifacts = torch.compiler.save_cache_artifacts()
        if artifacts is None:
            return
        content = artifacts[0]
        name = f"artifacts-{hashlib.sha256(content).hexdigest()}.bin"
        with FileLock(self._home / "lock"):
            older = [path for path in self._home.glob("artifacts-*.bin") if path.name != name]
            write_whole(self._home / name, content)
            for path in older:
                path.unlink(missing_ok=True)

    def _restore(self) -> bool:
        assert self._home is not None
        for path in sorted(self._home.glob("artifacts-*.bin")):
            content = path.read_bytes()
            if path.name != f"artifacts-{hashlib.sha256(content).hexdigest()}.bin":
                events.record("notice", text=f"{path} is damaged, its content has another hash: not loaded; delete it")
            elif torch.compiler.load_cache_artifacts(content) is not None:
                return True
        return False


def _lookups() -> dict[str, dict[str, int]]:
    """How often this process looked into the caches of graphs so far, by outcome."""
    return {
        part: {outcome: counters[group][prefix + word] for outcome, word in _OUTCOMES.items()}
        for part, (group, prefix) in _COUNTED.items()
    }


def fingerprint() -> str:
    """A directory name: equal only where compiled code may be shared."""
    gpus = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
    parts = (
        torch.__version__,
        str(torch.version.git_version),
        str(torch.version.cuda),
        f"python {sys.version_info.major}.{sys.version_info.minor}",
        f"{platform.system()} {platform.machine()}",
        torch.backends.cpu.get_cpu_capability(),
        *gpus,
    )
    return f"torch-{torch.__version__}-{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:12]}"
