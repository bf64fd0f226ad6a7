"""What lies in the compile cache: files and bytes of each part. Imports no torch."""

from __future__ import annotations

import getpass
import os
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any


def inventory(directory: Path | None = None) -> dict[str, Any]:
    """Files and bytes of the compile cache as JSON values; `directory` is None, with a reason, where none is known.

    Without `directory`: TORCHINDUCTOR_CACHE_DIR, or torch's own place for this user. Files that vanish meanwhile do not count.
    """
    place = directory or _place()
    if not place.is_dir():
        return {"directory": None, "reason": f"there is no {place}; TORCHINDUCTOR_CACHE_DIR would name another"}
    parts: dict[str, list[int]] = defaultdict(list)
    for path in place.rglob("*"):
        try:
            if path.is_file():
                inner = path.relative_to(place).parts
                parts[inner[0] if len(inner) > 1 and inner[0] in _NAMED else "compiled code"].append(path.stat().st_size)
        except OSError:
            continue
    rows = [{"part": name, "files": len(sizes), "bytes": sum(sizes)} for name, sizes in sorted(parts.items())]
    return {
        "directory": str(place),
        "files": sum(row["files"] for row in rows),
        "bytes": sum(row["bytes"] for row in rows),
        "parts": rows,
    }


_NAMED = ("aotautograd", "fxgraph", "triton", "locks", "dynamo", "precompile", "mega")


def _place() -> Path:
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return Path(named) if named else Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
