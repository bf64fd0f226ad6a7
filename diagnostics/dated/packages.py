"""When packages were installed: the dates of what pip and uv write last into NAME-VERSION.dist-info.

An upgrade leaves only its own date: what was there before is gone. What does remain of it is looked for: a second dist-info
of one package, a folder that pip renamed (`~orch`), libraries of another CUDA than torch's own build. Limits: conda and
system packages may keep the date of their archive; a file touched later looks newer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from diagnostics.dated.entry import Entry, Found, believable, mtime

_ONE_INSTALL_SECONDS = 300.0  # between two packages of one pip run
_WRITTEN_LAST = ("RECORD", "INSTALLER", "direct_url.json", "METADATA")
_COMPILE = ("torch", "triton", "pytorch-triton")
_STACK = (
    "transformers",
    "accelerate",
    "flash-attn",
    "sglang",
    "vllm",
    "liger-kernel",
    "numpy",
    "tokenizers",
    "safetensors",
    "datasets",
    "deepspeed",
    "xformers",
)
_CUDA = re.compile(r"-cu(\d\d)$")
_BUILD = re.compile(r"\+cu(\d\d)\d")


@dataclass(frozen=True, kw_only=True)
class Package:
    """One installed distribution."""

    name: str
    version: str
    seconds: float
    how: str


def find(site_packages: Path, now_seconds: float) -> Found:
    """The installs of one site-packages folder."""
    found = Found()
    packages: list[Package] = []
    try:
        names = sorted(path for path in site_packages.iterdir() if path.name.endswith(".dist-info") or path.name.startswith("~"))
    except OSError as error:
        return Found(notes=[f"{site_packages}: {error.strerror}: its packages were not looked at"])
    for path in names:
        try:
            packages += _package(path)
        except OSError as error:
            found.notes.append(f"{path}: {error.strerror}: no date")
    doubted = [package for package in packages if not believable(package.seconds, now_seconds)]
    if doubted:
        found.notes.append(
            f"{site_packages}: dates of {len(doubted)} packages not believed (before 2000, or in the future), the first is "
            f"{doubted[0].name}"
        )
    believed = sorted((package for package in packages if package not in doubted), key=lambda package: package.seconds)
    found.entries += [_entry(group, site_packages) for group in _installs(believed)]
    found.entries += _leftovers(site_packages, believed)
    return found


def _package(path: Path) -> list[Package]:
    if path.name.startswith("~"):
        return [Package(name="~", version=path.name, seconds=mtime(path), how="folder date")]
    name, _, version = path.name.removesuffix(".dist-info").partition("-")
    dates = {file: mtime(path / file) for file in _WRITTEN_LAST if (path / file).exists()} or {"folder": mtime(path)}
    last = max(dates, key=lambda file: dates[file])
    return [
        Package(name=name.replace("_", "-").lower(), version=version, seconds=dates[last], how=f"date of {last} in {path.name}")
    ]


def _installs(packages: list[Package]) -> Iterable[list[Package]]:
    group: list[Package] = []
    for package in (each for each in packages if each.name != "~"):
        if group and package.seconds - group[-1].seconds > _ONE_INSTALL_SECONDS:
            yield group
            group = []
        group.append(package)
    if group:
        yield group


def _entry(group: list[Package], site_packages: Path) -> Entry:
    ranked = sorted(group, key=lambda package: (_rank(package.name), package.name))
    named = ", ".join(f"{package.name} {package.version}" for package in ranked[:6])
    more = f" and {len(group) - 6} more" if len(group) > 6 else ""
    kind = ("torch installed", "compile stack installed", "stack installed", "packages installed")[_rank(ranked[0].name)]
    last = max(package.seconds for package in group if _rank(package.name) == _rank(ranked[0].name))
    how = next(package.how for package in ranked if package.seconds == last)
    return Entry(
        time_seconds=last,
        kind=kind,
        what=f"installed: {named}{more}",
        where=str(site_packages),
        how=how,
        fields={"packages": {package.name: package.version for package in group}},
    )


def _rank(name: str) -> int:
    if name == "torch":
        return 0
    if name in _COMPILE or name.startswith("nvidia-"):
        return 1
    return 2 if name in _STACK else 3


def _leftovers(site_packages: Path, packages: list[Package]) -> list[Entry]:
    """Traces of builds that were replaced."""
    by_name: dict[str, list[Package]] = defaultdict(list)
    for package in packages:
        by_name[package.name].append(package)
    entries = [
        Entry(
            time_seconds=package.seconds,
            kind="leftover",
            what=f"pip left {package.version} behind: an install was broken off",
            where=str(site_packages),
            how="folder date",
        )
        for package in by_name.pop("~", [])
    ]
    for name, several in by_name.items():
        if len(several) > 1:
            versions = ", ".join(package.version for package in several)
            kind = "torch replaced" if name == "torch" else "leftover"
            entries.append(
                Entry(
                    time_seconds=several[-1].seconds,
                    kind=kind,
                    what=f"{name} is there twice ({versions}): one was installed over the other",
                    where=str(site_packages),
                    how=several[-1].how,
                )
            )
    build = _BUILD.search(by_name["torch"][-1].version) if by_name.get("torch") else None
    others = [
        package
        for name, several in by_name.items()
        for package in several
        if build and (cuda := _CUDA.search(name)) and cuda[1] != build[1]
    ]
    if others and build is not None:
        first = min(others, key=lambda package: package.seconds)
        cuda = _CUDA.search(first.name)
        entries.append(
            Entry(
                time_seconds=first.seconds,
                kind="torch replaced",
                where=str(site_packages),
                how=first.how,
                what=f"libraries of CUDA {cuda[1] if cuda else '?'} came ({len(others)}, such as {first.name} "
                f"{first.version}), but torch is built for CUDA {build[1]}: "
                "another build of torch was installed then, and has been replaced since",
            )
        )
    return entries
