"""Compiles one small function in a fresh fork for each folder on standard input: torch is imported once for all of them.

Prints lines of JSON: first what torch says of itself, then for each folder the hits and misses of the FX graph cache and of
AOTAutograd's, and the number of C++ compiles.
"""

import json
import os
import subprocess
import sys

import torch
import torch._functorch.aot_autograd
import torch._inductor.compile_fx
from torch._dynamo.utils import counters
from torch._inductor.codecache import torch_key
from torch._inductor.runtime.cache_dir_utils import default_cache_dir


def wave(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() + 1).cos()


def compile_once(directory: str) -> dict[str, object]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory
    started: list[str] = []
    original = subprocess.Popen.__init__

    def noted(self: subprocess.Popen[bytes], command: object, *more: object, **options: object) -> None:
        started.append(command if isinstance(command, str) else " ".join(map(str, command)))  # type: ignore[call-overload]
        original(self, command, *more, **options)  # type: ignore[arg-type]  # passed on as it came

    subprocess.Popen.__init__ = noted  # type: ignore[method-assign]
    torch.compile(wave)(torch.ones(64))
    return {
        "graph_hits": counters["inductor"]["fxgraph_cache_hit"],
        "graph_misses": counters["inductor"]["fxgraph_cache_miss"],
        "autograd_hits": counters["aot_autograd"]["autograd_cache_hit"],
        "cpp_compiles": sum(" -shared" in command or "c++-header" in command for command in started),
    }


def answer(values: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


said = {
    "default": default_cache_dir(),
    "version": torch.__version__,
    "git": torch.version.git_version,
    "cuda": torch.version.cuda,
}
answer({**said, "key": torch_key().decode("utf-8", errors="replace")})
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        answer(compile_once(line.strip()))
        os._exit(0)
    os.waitpid(child, 0)
os._exit(0)  # what torch does at exit takes seconds
