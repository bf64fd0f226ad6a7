"""What has to be equal for two numbers to be comparable, and what is worth knowing when they differ.

`fingerprint` is JSON-ready and names no machine: the host is a hash. `series_key` is the part that must be equal; the rest
is recorded, so that a change can be explained.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from diagnostics import gpu

PACKAGES = (
    "accelerate",
    "datasets",
    "liger-kernel",
    "numpy",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "pyarrow",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
)
_COMPARED = ("machine", "cpu", "cores", "gpus", "cuda", "torch_git", "system", "omp_num_threads")
_COMPARED_PACKAGES = tuple(name for name in PACKAGES if name.startswith(("nvidia-", "torch", "transformers", "triton", "liger")))


def fingerprint() -> dict[str, Any]:
    """Describe this machine, its software, and the code in the current directory."""
    state = gpu.snapshot()
    return {
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpus": [{"name": one.name, "memory_gib": round(one.memory_total_bytes / 2**30)} for one in state.gpus],
        "gpus_unavailable": state.unavailable,
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "driver": state.driver,
        "cuda": torch.version.cuda,
        "torch_git": torch.version.git_version,
        "python": platform.python_version(),
        "system": platform.system(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "git": _git(),
        "host": hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12],
    }


def series_key(values: dict[str, Any]) -> str:
    """A short hash of what must be equal: two fingerprints with one key may be compared."""
    compared = {key: values.get(key) for key in _COMPARED}
    compared["driver_major"] = str(values.get("driver")).partition(".")[0]
    compared["python_minor"] = str(values.get("python")).rpartition(".")[0]
    compared["packages"] = {name: values.get("packages", {}).get(name) for name in _COMPARED_PACKAGES}
    return hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest()[:12]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Hardware"))]
    return names[0] if names else platform.processor() or "unknown"


def _git() -> dict[str, Any] | None:
    """Commit of the current directory's repository and whether files differ from it; None without repository or git."""
    try:
        commit = _run("rev-parse", "HEAD").strip()
        return {"commit": commit, "dirty": bool(_run("status", "--porcelain").strip())}
    except (OSError, subprocess.SubprocessError):
        return None


def _run(*arguments: str) -> str:
    git = shutil.which("git")
    if git is None:
        raise FileNotFoundError("git")
    return subprocess.run((git, *arguments), capture_output=True, text=True, check=True, timeout=30).stdout


if __name__ == "__main__":
    sys.stdout.write(json.dumps(fingerprint(), indent=1) + "\n")
