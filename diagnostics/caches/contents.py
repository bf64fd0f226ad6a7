"""What entries say of themselves: who wrote them, for which device, which graph or kernel. Nothing is unpickled.

torch puts words into its pickles that can be found as bytes: up to 2.13 its version ("# torch version: ..."), always a hash
of its own sources ("torch_version: ..."), the device and Triton's version. Triton writes JSON beside each kernel. C++
libraries and Python code say nothing of it: they are of the graph that runs them.

Known limits: the words can be forged, so they inform and protect nothing. The CPU for which a C++ kernel was built is not
observed.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import mmap
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from diagnostics.caches import whole
from diagnostics.caches.entries import AUTOGRAD, CPP, GRAPHS, LEFT, LOCKS, PYTHON, TRITON, Entry, Writer
from diagnostics.caches.scan import File, opened

_VERSIONS = re.compile(
    rb"# torch version: ([^\n]{1,80})\n# torch cuda version: ([^\n]{1,80})\n# torch git version: ([^\n]{1,80})\n"
)
_KEY = re.compile(rb"\x8c(.)\[([a-z2-7]{40,60})\] torch_version: ", re.DOTALL)
_DEVICE = re.compile(rb"\] system_info\[device\]: (\{[^\x94]{1,300}?\})")
_TRITON = re.compile(rb"'triton': '([^']{1,40}?)[0-9a-f]{64}-")
_RUNS = re.compile(rb"cache_key\x94\x8c\x34(c[a-z2-7]{51})")
_OF_GRAPHS = re.compile(rb"\x8c\x34(f[a-z2-7]{51})\x94")
_BUNDLED = b"[REPLACE]"  # in the group files of the Triton kernels that a graph brings along
_KERNEL_FOLDER = re.compile(rb"# kernel path: (/[^\n]{1,1000})/[a-z2-7]{2}/c[a-z2-7]{51}\.py\n")
_GRAPH_NAME = re.compile(r"^# AOT ID: \['([^']+)'\]", re.MULTILINE)
_KERNEL = re.compile(r"^(\w+) = async_compile\.(\w+)\(", re.MULTILINE)
_KERNEL_PATH = re.compile(r"/(c[a-z2-7]{51})\.py\b")
_CPP_BODY = re.compile(r'extern "C".*?(?=\'\'\'|\n// Python bindings to call)', re.DOTALL)
_TRITON_NAME = re.compile(r"^def (triton_\w+)\(", re.MULTILINE)
_LIBRARY = re.compile(r"\.cpython-(\d+)[-.]")
_MAX_TEXT_BYTES = 4 << 20
_BEFORE_BYTES, _AFTER_BYTES = 64, 1200  # of a marker: where the words around it are looked for
_SYSTEM_BYTES = 1 << 14  # behind the hash of torch's sources: some 200 are the system's


def read(directory: Path, found: Sequence[Entry]) -> list[str]:
    """Fill in what the entries say; returns what could not be read."""
    unread: list[str] = []
    texts: dict[str, str] = {}
    for entry in found:
        for file in entry.files:
            try:
                _read_file(directory, entry, file, texts)
            except FileNotFoundError:
                continue  # deleted meanwhile
            except (OSError, ValueError) as error:
                unread.append(f"{file.path}: {getattr(error, 'strerror', None) or error}")
    _name_code(found, texts)
    _pass_on(found)
    return unread


def _read_file(directory: Path, entry: Entry, file: File, texts: dict[str, str]) -> None:
    if entry.part in {LOCKS, LEFT}:
        return
    with opened(directory / file.path) as stream:
        pickled = entry.part in {GRAPHS, AUTOGRAD}
        damage = whole.damage(stream, file.path, pickled=pickled)
        if damage is not None:
            entry.damage = f"{file.path}: {damage}"
            return
        if pickled:
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                _pickle(entry, content, directory)
        elif entry.part == TRITON:
            stream.seek(0)
            _triton(entry, file.path, stream.read() if file.path.endswith(".json") else b"")
        elif entry.part in {PYTHON, CPP} and file.path.endswith((".py", ".cpp")) and file.size_bytes <= _MAX_TEXT_BYTES:
            stream.seek(0)
            texts[entry.path] = stream.read().decode("utf-8", errors="replace")


def _pickle(entry: Entry, content: mmap.mmap, directory: Path) -> None:
    versions, key = _first(content, b"# torch version: ", _VERSIONS), _first(content, b"] torch_version: ", _KEY)
    # torch writes what the system is right behind the hash: to search megabytes for what is not there takes most of the time
    system = content if key is None else content[key.end() : key.end() + _SYSTEM_BYTES]
    triton, device = _first(system, b"'triton': '", _TRITON), _first(system, b"] system_info[device]: ", _DEVICE)
    entry.writer = Writer(
        torch=_word(versions, 1),
        cuda=_word(versions, 2),
        torch_git=_word(versions, 3),
        torch_key=None if key is None else _torch_key(content, key),
        torch_hash=_word(key, 2),
        triton=_word(triton, 1),
        device=_device(device[1].decode(errors="replace")) if device else None,
    )
    if entry.part == AUTOGRAD:
        entry.refers_to = tuple(sorted({match[1].decode() for match in _OF_GRAPHS.finditer(content)}))
    elif runs := _first(content, b"cache_key\x94", _RUNS):
        entry.refers_to = (runs[1].decode(),)
    if system.find(b"'triton': '") >= 0 and content.find(_BUNDLED) >= 0:
        # its autotuners name the folder in which they were compiled, and read their results there
        folder = _first(content, b"# kernel path: /", _KERNEL_FOLDER)
        entry.bound_to = os.fsdecode(folder[1]) if folder else str(directory)


def _first(content: mmap.mmap | bytes, marker: bytes, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
    """The first match of `pattern` near a `marker`: finding bytes is many times as fast as matching along megabytes."""
    at = content.find(marker)
    while at >= 0:
        if match := pattern.search(content, max(0, at - _BEFORE_BYTES), at + _AFTER_BYTES):
            return match
        at = content.find(marker, at + 1)
    return None


def _torch_key(content: mmap.mmap, match: re.Match[bytes]) -> str:
    """The hash of torch's sources as the entry spells it: bytes that are no UTF-8 are replaced."""
    end = match.start() + 2 + match[1][0]  # a short string of a pickle: its length is one byte
    return content[match.end() : end].decode("utf-8", errors="replace")


def _device(text: str) -> str | None:
    """The name in `{'name': 'NVIDIA H200'}`."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    name = value.get("name") if isinstance(value, dict) else None
    return name if isinstance(name, str) else None


def _triton(entry: Entry, path: str, content: bytes) -> None:
    name = PurePosixPath(path).name
    if library := _LIBRARY.search(name):
        entry.name = name.partition(".")[0]
        entry.writer = Writer(python=library[1])
    if not content:
        return
    value: Any = json.loads(content)
    if not isinstance(value, dict):
        return
    if name.startswith("__grp__"):
        children = value.get("child_paths")
        folders = {str(PurePosixPath(str(child)).parent) for child in children.values()} if isinstance(children, dict) else set()
        entry.bound_to = min(folders, default=None)
    elif "triton_version" in value or "target" in value:
        target = value.get("target")
        arch = f"{target.get('backend')} {_architecture(target.get('arch'))}" if isinstance(target, dict) else None
        entry.name = str(value.get("name") or PurePosixPath(path).stem)
        entry.writer = Writer(triton=_string(value.get("triton_version")), device=arch)


def _architecture(arch: object) -> str:
    return f"sm{arch}" if isinstance(arch, int) else str(arch)


def _string(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _word(match: re.Match[bytes] | None, group: int) -> str | None:
    text = match[group].decode(errors="replace").strip() if match else None
    return None if text in {None, "None"} else text


def _name_code(found: Sequence[Entry], texts: dict[str, str]) -> None:
    """Names of graphs and kernels: a graph's Python code names its kernels and holds the text of the C++ ones."""
    by_body: dict[str, str] = {}
    code = {entry.key: entry for entry in found if entry.part == PYTHON}
    for entry in code.values():
        text = texts.get(entry.path, "")
        if graph := _GRAPH_NAME.search(text):
            entry.name = f"graph {graph[1]}"
        elif kernel := _TRITON_NAME.search(text):
            entry.name = kernel[1]
        starts = [*_KERNEL.finditer(text)]
        for number, match in enumerate(starts):
            end = starts[number + 1].start() if number + 1 < len(starts) else len(text)
            if body := _CPP_BODY.search(text, match.end(), end):
                by_body[body[0].strip()] = match[1]
        entry.refers_to = tuple(sorted({*_KERNEL_PATH.findall(text)} - {entry.key}))
    bodies: dict[str, Entry] = {}
    for entry in found:
        if entry.part == CPP and (body := _CPP_BODY.search(texts.get(entry.path, ""))):
            entry.name = by_body.get(body[0].strip())
            bodies[body[0].strip()] = entry
    for entry in code.values():
        own = {bodies[body.strip()].key for body in _CPP_BODY.findall(texts.get(entry.path, "")) if body.strip() in bodies}
        entry.refers_to = tuple(sorted({*entry.refers_to, *own}))


def _pass_on(found: Sequence[Entry]) -> None:
    """Code is of the graph that runs it; a graph is called as its code; a hash of torch is of the version beside it."""
    _resolve_keys(found)
    graphs = {entry.key: entry for entry in found if entry.part == GRAPHS}
    by_key = {entry.key: entry for entry in found if entry.part in {PYTHON, CPP}}
    for graph in graphs.values():
        for key in graph.refers_to:
            if code := by_key.get(key):
                graph.name = graph.name or code.name
                for one in (code, *(by_key[inner] for inner in code.refers_to if inner in by_key)):
                    one.graphs.append(graph)
                    one.writer = one.writer or graph.writer
    for entry in found:
        if entry.part == AUTOGRAD:
            names = sorted({graphs[key].name or key[:12] for key in entry.refers_to if key in graphs})
            entry.name = ", ".join(names) or None


def _resolve_keys(found: Iterable[Entry]) -> None:
    known: dict[str, Writer] = {}
    for entry in found:
        if (writer := entry.writer) and writer.torch_key and writer.torch:
            known[writer.torch_key] = writer
    for entry in found:
        if (writer := entry.writer) and writer.torch is None and (of := known.get(writer.torch_key or "")):
            entry.writer = dataclasses.replace(writer, torch=of.torch, torch_git=of.torch_git, cuda=of.cuda)
