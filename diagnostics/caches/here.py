"""This environment as a compile cache sees it: torch's build, Triton, Python's ABI, CPU and GPUs. Imports no torch.

`fingerprint` is the key of a snapshot: equal only where compiled code may be shared. torch's build is read from its `version.py`.
"""

from __future__ import annotations

import ast
import functools
import getpass
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import pynvml

from diagnostics.caches.entries import Writer
from diagnostics.caches.sources import UnknownTorch, hash_of_sources

# Instruction sets: -march=native lets the compiler use all of them. Other flags tell of bugs and virtual machines.
_INSTRUCTIONS = re.compile(
    r"^(?:sse\w*|ssse3|pni|avx\w*|fma|f16c|bmi\d|amx_?\w*|adx|v?aes|v?pclmulqdq|sha\w*|gfni|popcnt|movbe|abm|lzcnt|cx16|rdrand|rdseed|"
    r"fsgsbase|clflushopt|clwb|xsave\w*|neon|asimd\w*|sve\w*|sme\w*|i8mm|bf16|atomics|fphp|crc32)$"
)
_TRITONS = ("triton", "pytorch-triton", "triton-rocm", "pytorch-triton-rocm", "triton-xpu", "pytorch-triton-xpu")


def inductor_directory() -> Path:
    """Where torch puts Inductor's, AOTAutograd's and the FX graphs' entries; torch's own function would make the folder."""
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return Path(named).absolute() if named else default_directory()


def default_directory() -> Path:
    """The place that torch has for this user: precompiled headers are there also when TORCHINDUCTOR_CACHE_DIR names another."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    return Path(tempfile.gettempdir()) / ("torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def triton_directory() -> Path:
    """Where Triton kernels of a program's own are kept; those of Inductor are in its folder unless TRITON_CACHE_DIR is set."""
    named = os.environ.get("TRITON_CACHE_DIR")
    return Path(named).absolute() if named else Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


def places() -> list[Path]:
    """All of them, each once, whether they are there or not."""
    headers = default_directory() / "precompiled_headers"
    inductor = inductor_directory()
    found = [inductor, triton_directory(), *([] if headers.is_relative_to(inductor) else [headers])]
    return [place for number, place in enumerate(found) if not any(place.is_relative_to(one) for one in found[:number])]


@functools.cache
def fingerprint() -> dict[str, Any]:
    """What has to be equal where compiled code is shared, as JSON values; None is "not observed"."""
    version = _torch_version()
    return {
        "torch": version.get("__version__"),
        "torch_git": version.get("git_version"),
        "cuda": version.get("cuda"),
        "hip": version.get("hip"),
        "triton": next((found for name in _TRITONS if (found := _package(name)) is not None), None),
        "python_abi": sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_flags": _cpu_flags(),
        "gpus": _gpus() if version.get("hip") is None and version.get("xpu") is None else None,
    }


def key(values: dict[str, Any]) -> str:
    """A short hash of a fingerprint."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """What is not equal, as sentences."""
    found = []
    for name in sorted({*theirs, *ours}):
        one, other = theirs.get(name), ours.get(name)
        if one == other:
            continue
        if isinstance(one, list) and isinstance(other, list):
            gone = [str(item) for item in one if item not in other]
            new = [str(item) for item in other if item not in one]
            found.append(f"{name}: {'only there ' + ', '.join(gone) if gone else ''}{'; ' if gone and new else ''}"
                         f"{'only here ' + ', '.join(new) if new else ''}")  # fmt: skip
        else:
            found.append(f"{name}: {_shown(one)} there, {_shown(other)} here")
    return found


def foreign(writer: Writer | None, *, torch_key: str | None = None) -> str | None:
    """Why what `writer` wrote is of no use here, or None: it is, or that is not observed."""
    if writer is None:
        return None
    ours = fingerprint()
    for name in ("torch", "torch_git", "cuda", "triton"):
        theirs = getattr(writer, name)
        if theirs is not None and theirs != ours[name]:
            return f"written by {name} {theirs}, here is {_shown(ours[name])}"
    if writer.torch is None and None not in {writer.torch_key, torch_key} and writer.torch_key != torch_key:
        return f"written by another torch than {_shown(ours['torch'])}: its hash of torch's sources is another"
    if writer.python is not None and ours["python_abi"] and f"cpython-{writer.python}" not in f"{ours['python_abi']}-":
        return f"written by Python {writer.python}, here is {ours['python_abi']}"
    gpus = ours["gpus"]
    if writer.device is not None and gpus is not None and not any(_is(gpu, writer.device) for gpu in gpus):
        return f"written for {writer.device}, here is {', '.join(gpus) or 'no GPU'}"
    return None


@functools.cache
def torch_key() -> str:
    """The hash of torch's own sources, spelled as in its entries. Raises UnknownTorch where it cannot be told."""
    folder, version = torch_folder(), _torch_version().get("__version__")
    if folder is None or version is None:
        raise UnknownTorch("no torch is installed here" if folder is None else f"{folder}/version.py names no version")
    return hash_of_sources(Path(folder), version).decode("utf-8", errors="replace")


def torch_folder() -> str | None:
    """Where torch is installed: the commands that compile C++ kernels name it."""
    spec = importlib.util.find_spec("torch")
    return None if spec is None or spec.origin is None else str(Path(spec.origin).parent)


def _torch_version() -> dict[str, str | None]:
    """The constants in torch's version.py."""
    folder = torch_folder()
    found: dict[str, str | None] = {}
    if folder is None:
        return found
    try:
        tree = ast.parse((Path(folder) / "version.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return found
    for node in tree.body:
        target, value = (node.targets[0], node.value) if isinstance(node, ast.Assign) else (None, None)
        if isinstance(node, ast.AnnAssign):
            target, value = node.target, node.value
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            found[target.id] = None if value.value is None else str(value.value)
    return found


def _package(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_flags() -> list[str] | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return sorted(flag for flag in flags if _INSTRUCTIONS.match(flag))


def _is(gpu: str, device: str) -> bool:
    """Whether a device that an entry names is `gpu`, or a part of it."""
    name, _, architecture = gpu.partition(" (")
    return device in {name, architecture.rstrip(")")} or device.startswith(f"{name} MIG ")


def _gpus() -> list[str]:
    """Kinds of GPUs of this machine, as "NVIDIA H200 (cuda sm90)"; CUDA_VISIBLE_DEVICES hides none from NVML."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        kinds = set()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name = pynvml.nvmlDeviceGetName(handle)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            kinds.add(f"{name.decode() if isinstance(name, bytes) else name} (cuda sm{major}{minor})")
        return sorted(kinds)
    finally:
        pynvml.nvmlShutdown()


def _shown(value: object) -> str:
    return "none" if value is None else str(value)
