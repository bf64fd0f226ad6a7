"""Files of exact versions (`pip freeze`, constraints), and what differs between two of them.

Markers (`; python_version < "3.12"`) are read for the Python that runs this, not for `--python`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from diagnostics.bisection.outcomes import BadInput
from diagnostics.environments.masking import masked

_MAX_SHOWN = 200  # characters of a line that is refused
_HASH = re.compile(r"\s+--hash=\S+")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One package that differs. None: it is not there."""

    name: str
    before: str | None  # "1.2.3", or a URL
    after: str | None

    @property
    def sentence(self) -> str:
        """In one line."""
        return f"{self.name} {masked(self.before or 'absent')} → {masked(self.after or 'absent')}"

    def to_dict(self) -> dict[str, str | None]:
        """JSON values."""
        shown = [None if version is None else masked(version) for version in (self.before, self.after)]
        return {"name": self.name, "before": shown[0], "after": shown[1]}


def read(path: Path) -> dict[str, str]:
    """Package -> version or URL. Raises BadInput on anything that is no exact pin."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is no text: name a file of NAME==VERSION lines, as pip freeze writes") from error
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}: name a file of NAME==VERSION lines, as pip freeze writes") from error
    pins: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        content = _HASH.sub("", re.sub(r"(^|\s)#.*", "", line)).strip()
        if content:
            name, version = _pin(path, content)
            if version is not None and pins.setdefault(name, version) != version:
                raise BadInput(f"{path} pins {name} twice, to {masked(pins[name])} and {masked(version)}")
    if not pins:
        raise BadInput(f"{path} pins nothing: name a file of NAME==VERSION lines, as pip freeze writes")
    return pins


def changes(good: Mapping[str, str], bad: Mapping[str, str]) -> list[Change]:
    """What differs, by name."""
    return [
        Change(name=name, before=good.get(name), after=bad.get(name))
        for name in sorted({*good, *bad})
        if good.get(name) != bad.get(name)
    ]


def applied(good: Mapping[str, str], some: Sequence[Change]) -> tuple[str, ...]:
    """The requirement lines of `good` with some changes."""
    pins = dict(good)
    for change in some:
        pins.pop(change.name, None)
        if change.after is not None:
            pins[change.name] = change.after
    return tuple(f"{name} @ {version}" if "://" in version else f"{name}=={version}" for name, version in sorted(pins.items()))


def _pin(path: Path, content: str) -> tuple[str, str | None]:
    """Name and version; version None where a marker says that this Python does not need it."""
    if content.startswith("-"):
        option = content.split(maxsplit=1)[0]
        raise BadInput(f"{path}: {option} cannot stand there: give pip's options with --pip-option, and projects as commits")
    shown = masked(content[:_MAX_SHOWN])
    try:
        wanted = Requirement(content)
    except InvalidRequirement as error:
        raise BadInput(f"{path}: {shown!r} is no requirement ({str(error).partition(chr(10))[0]})") from error
    if wanted.extras:
        raise BadInput(f"{path}: {shown!r} asks for extras: name the packages that they bring, as pip freeze does")
    exact = [each.version for each in wanted.specifier if each.operator in {"==", "==="} and not each.version.endswith("*")]
    if wanted.url is None and (len(exact) != 1 or len(wanted.specifier) != 1):
        raise BadInput(f"{path}: {shown!r} is no exact version: write NAME==VERSION, as pip freeze does")
    name = canonicalize_name(wanted.name)
    needed = wanted.marker is None or wanted.marker.evaluate()
    return name, (wanted.url or exact[0]) if needed else None
