"""Compile caches made by hand, in the layout and with the words that real ones were seen to have.

SEEN are facts read from caches that torch wrote: 2.11.0+cu130 with Triton 3.6.0 on an NVIDIA H200, and 2.14.1 on a CPU, whose
entries name no version.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

from diagnostics.caches import here

SEEN: dict[str, dict[str, Any]] = {
    "H200": {
        "torch": "2.11.0+cu130",
        "git": "70d99e998b4955e0049d13a98d77ae1b14db1f45",
        "cuda": "13.0",
        "triton": "3.6.0",
        "device": "NVIDIA H200",
        "hash": "bhbxfhoxf5hkmujdjpm36xihaazrhcnnqhkwzuzb2mhe4uyuamb",
        # bytes that are no UTF-8 are replaced by torch itself
        "key": "6\ufffd\ufffd\x127\ufffdf\ufffd\ufffd\ufffdJ\ufffdr\ufffd\x06\ufffda\ufffdA>"
        "\ufffd\ufffd_\x12z\ufffd[\x11\ufffd!\x08",
    },
    "2.14.1": {
        "torch": None,
        "hash": "4d5hw3qo6n7ndqx6zagncfknodloto366xf5lafqoh3wkwthu3t",
        "key": "o\ufffd\ufffd\u0113\ufffd\x08\x10'Ymn \ufffd_1\\\ufffdv4\ufffdR\ufffd\ufffd0\x1fo\ufffd\u0430@",
    },
}
TRITON_KEY = "4GVOKO52W4HMXAJT7MKAEXW6QUJ3QSAVVGM2SQIDATNE2SGWRV2Q"


def ours() -> dict[str, Any]:
    """A writer like the installed torch."""
    values = here.fingerprint()
    return {"torch": values["torch"], "git": values["torch_git"], "cuda": values["cuda"], "hash": "a" * 51, "key": "ours"}


def letters(first: str, number: int) -> str:
    """A key as torch makes them: 52 letters and digits."""
    digits = "".join("abcdefghijklmnopqrstuvwxyz234567"[(number >> (5 * place)) % 32] for place in range(51))
    return first + digits


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def library() -> bytes:
    """The head of an ELF library whose section table ends where the file does."""
    head = bytearray(64)
    head[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", head, 40, 64)
    struct.pack_into("<HH", head, 58, 64, 2)
    return bytes(head) + bytes(128)


def words(writer: dict[str, Any]) -> list[str]:
    """The lines by which an entry tells its writer."""
    found = [f"[{writer['hash']}] torch_version: {writer['key']}"]
    if writer.get("torch"):
        cuda = writer.get("cuda")
        found.append(
            f"#\n# torch version: {writer['torch']}\n# torch cuda version: {cuda}\n# torch git version: {writer['git']}\n\n"
        )
    if writer.get("device"):
        found.append(f"[{'j' * 51}] system_info[device]: {{'name': '{writer['device']}'}}")
        found.append(
            f"[{'k' * 51}] system_info[version]: {{'triton': '{writer['triton']}{'0' * 64}-{'1' * 64}', 'cuda': '13.0'}}"
        )
    return found


def graph(
    folder: Path, number: int, writer: dict[str, Any], *, kernel: str = "wave", bundle_of: Path | None = None
) -> dict[str, Path]:
    """One FX graph with its AOTAutograd entry, its Python code and its C++ kernel, which graphs of one `kernel` share."""
    fx, code, cpp = letters("f", number), letters("c", number), letters("c", 10_000 + sum(kernel.encode()))
    body = f'extern "C"  void  kernel(const float* {kernel})\n{{\n}}'
    text = (
        f"# AOT ID: ['{number}_inference']\ncpp_fused_{kernel}_0 = async_compile.cpp_pybinding(['float*'], r'''\n{body}\n''')\n"
    )
    content: dict[str, Any] = {"cache_key": code, "lines": words(writer), "source": text, "padding": b"x" * 70_000}
    if bundle_of is not None:
        content["source"] = f"# kernel path: {bundle_of}/ab/{letters('c', 5)}.py\n" + text
        content["bundle"] = b'{"child_paths": {"k.cubin": "[REPLACE]/k.cubin"}}'
    lines = [line for line in words(writer) if "# torch version" not in line]
    return {
        "fx": write(folder / "fxgraph" / fx[1:3] / fx / letters("", number), pickle.dumps(content, protocol=4)),
        "aot": write(
            folder / "aotautograd" / letters("a", number) / "entry", pickle.dumps({"graph": fx, "l": lines}, protocol=4)
        ),
        "code": write(folder / code[1:3] / f"{code}.py", text),
        "cpp": write(folder / cpp[1:3] / f"{cpp}.main.cpp", f"#include <x>\n{body}\n// Python bindings to call kernel():\n"),
        "so": write(folder / cpp[1:3] / f"{cpp}.main.so", library()),
    }


def triton_kernel(folder: Path, *, named: Path, version: str = "3.6.0", arch: int = 90) -> Path:
    """A Triton kernel in Inductor's folder; its group file names files below `named`."""
    place = folder / "triton" / "0" / TRITON_KEY
    told = {"hash": "e1", "target": {"backend": "cuda", "arch": arch, "warp_size": 32}, "triton_version": version, "name": "addk"}
    write(place / "addk.json", json.dumps(told))
    child = named / "triton" / "0" / TRITON_KEY / "addk.cubin"
    write(place / "__grp__addk.json", json.dumps({"child_paths": {"addk.cubin": str(child)}}))
    write(place / "addk.cubin", library())
    return place


def quietly_read(path: Path) -> bytes:
    """Its content, its access time left as it was: by that, prune knows what is in use."""
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOATIME", 0)), "rb") as file:  # noqa: PTH123 - of a descriptor
        return file.read()


def tree(folder: Path) -> dict[str, tuple[bytes, int, int]] | None:
    """Everything about the files of a folder: content, mode, time."""
    if not folder.exists():
        return None
    return {
        str(path.relative_to(folder)): (quietly_read(path), path.stat().st_mode, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def h200_here() -> dict[str, Any]:
    """What `here.fingerprint` would say on the machine of SEEN["H200"], the Python's ABI apart."""
    seen = SEEN["H200"]
    gpus = ["NVIDIA H200 (cuda sm90)"]
    return {"torch": seen["torch"], "torch_git": seen["git"], "cuda": "13.0", "triton": "3.6.0", "gpus": gpus}
