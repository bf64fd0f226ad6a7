"""A description of an environment as a file: written whole, read with every doubt told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diagnostics.environments.differences import PARTS

KIND = "environment"
VERSION = 1
_BESIDE = ("torch_runtime", "pip", "files")  # parts beside the fingerprint; the list of distributions there is not compared


class DocumentError(ValueError):
    """The file is no description that can be read; the message says what was found and what to do."""


def read(path: Path) -> dict[str, Any]:
    """The description in a file, or the bare fingerprint that an earlier version printed. Raises DocumentError."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DocumentError(f"{path} is no text: name a file that python -m diagnostics.environment --json wrote") from error
    except OSError as error:
        raise DocumentError(
            f"{path}: {error.strerror}: name a file that python -m diagnostics.environment --json wrote"
        ) from error
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        what = "is empty" if not text.strip() else f"is no JSON, or damaged ({error})"
        raise DocumentError(f"{path} {what}: write it again with python -m diagnostics.environment --json FILE") from error
    return _checked(path, values)


def comparable(document: dict[str, Any]) -> dict[str, Any]:
    """The parts of a description that are compared: the fingerprint, and what was looked at beside it."""
    parts = {name: document[name] for name in ("torch_runtime", "pip") if name in document}
    edited = document.get("files", {}).get("edited")
    return {**document["fingerprint"], **({"edited": edited} if edited is not None else {}), **parts}


def _checked(path: Path, values: Any) -> dict[str, Any]:
    document = _recognised(path, values)
    broken = [name for name in _BESIDE if not isinstance(document.get(name, {}), dict)]
    if not broken:
        parts = comparable(document)
        broken = [name for name in PARTS if not isinstance(parts.get(name, {}), dict)]
    if broken:
        raise DocumentError(f"{path} is damaged: {', '.join(broken)} should hold names and values: write it again")
    return document


def _recognised(path: Path, values: Any) -> dict[str, Any]:
    if isinstance(values, dict) and "kind" not in values and {"torch_git", "packages", "machine"} <= set(values):
        return {"kind": KIND, "version": 0, "fingerprint": values}
    if not isinstance(values, dict) or values.get("kind") != KIND or not isinstance(values.get("fingerprint"), dict):
        raise DocumentError(f"{path} is JSON, but no description of an environment: write one with --json FILE")
    if values.get("version") != VERSION:
        raise DocumentError(
            f"{path} has version {values.get('version')!r} of the format, this command reads {VERSION}: "
            "write it again with this version, or compare with the one that wrote it"
        )
    return values
