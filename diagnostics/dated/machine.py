"""Reboots, driver loads and driver packages: from logs of the system, and of the running machine from /proc and /sys."""

from __future__ import annotations

import re
import time
from pathlib import Path

from diagnostics.dated.entry import Entry, Found, believable, mtime
from diagnostics.dated.stamps import Stamps
from diagnostics.logs.encodings import Unreadable
from diagnostics.logs.reader import blocks, decode, size_now

_DPKG = re.compile(
    r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (install|upgrade|remove) (\S*(?:nvidia|cuda|libnccl|linux-image)\S*) (\S+) (\S+)"
)
_KERNEL = re.compile(r"NVRM: loading NVIDIA .*?(\d+\.\d+(?:\.\d+)?)|(Linux version \S+)|(NVRM: Xid \(.*)")


def of_log(path: Path, now_seconds: float) -> Found:
    """Driver packages of dpkg.log, and boots, driver loads and Xids of the kernel's log."""
    found, stamps = Found(), Stamps(path, now_seconds)
    try:
        with path.open("rb") as file:
            for block in blocks(file, size_now(file)):
                for raw in block.splitlines():
                    _line(decode(raw), path, stamps, found)
    except (OSError, Unreadable) as error:
        found.notes.append(f"{path}: {error}: not looked at")
    found.entries = [entry for entry in found.entries if believable(entry.time_seconds, now_seconds)]
    return found


def of_this_machine(now_seconds: float) -> Found:
    """The last boot, and when the NVIDIA module was loaded."""
    found = Found()
    try:
        boot = next(line.split()[1] for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        found.entries.append(
            Entry(time_seconds=float(boot), kind="reboot", what="the machine was booted", where="/proc/stat", how="btime")
        )
    except (OSError, StopIteration):
        found.notes.append("the last boot is not known: no /proc/stat")
    module = Path("/sys/module/nvidia")
    try:
        version = (module / "version").read_text().strip()
        found.entries.append(
            Entry(
                time_seconds=mtime(module),
                kind="driver loaded",
                what=f"NVIDIA driver {version} was loaded",
                where=str(module),
                how="folder date",
            )
        )
    except OSError:
        found.notes.append("no NVIDIA driver is loaded here")
    found.entries = [entry for entry in found.entries if believable(entry.time_seconds, now_seconds)]
    return found


def _line(text: str, path: Path, stamps: Stamps, found: Found) -> None:
    package = _DPKG.match(text)
    if package is not None:
        seconds = time.mktime(time.strptime(package[1], "%Y-%m-%d %H:%M:%S"))
        kind = "reboot" if "linux-image" in package[3] else "driver installed"
        what = f"{package[2]} {package[3]}: {package[4]} -> {package[5]}"
        found.entries.append(
            Entry(
                time_seconds=seconds,
                kind="kernel installed" if kind == "reboot" else kind,
                what=what,
                where=str(path),
                how="line of the log",
            )
        )
        return
    kernel = _KERNEL.search(text)
    seconds_or_none = stamps.of(text) if kernel is not None else None
    if kernel is None or seconds_or_none is None:
        return
    kind = "driver loaded" if kernel[1] else "reboot" if kernel[2] else "GPU fault"
    what = f"NVIDIA driver {kernel[1]} was loaded" if kernel[1] else f"booted: {kernel[2]}" if kernel[2] else kernel[3][:120]
    found.entries.append(Entry(time_seconds=seconds_or_none, kind=kind, what=what, where=str(path), how="line of the log"))
