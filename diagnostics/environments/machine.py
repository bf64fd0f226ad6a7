"""The machine under the program: CPUs that it may use, memory, kernel, container. Names no machine and no user."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
NOT_OBSERVED = "not observed: "


def cpu_model() -> str:
    """The CPU's name, "unknown" where nothing tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Hardware"))]
    return names[0] if names else platform.processor() or "unknown"


def details() -> dict[str, Any]:
    """What is worth knowing beside the CPU's name."""
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()).strip() or "unknown",
        "usable_cpus": len(affinity(0)) if affinity is not None else f"{NOT_OBSERVED}this system has no CPU affinity",
        "cpu_quota": _cpu_quota(),
        "memory_limit": _read(_cgroup("memory.max")),
        "cpu_governor": _read(_GOVERNOR),
        "huge_pages": _chosen(_read(_HUGE_PAGES)),
        "container": _container(),
        "swap_gib": round(psutil.swap_memory().total / 2**30),
    }


def _cgroup(name: str) -> Path:
    """The file of this process's control group (version 2), or of the outermost one."""
    lines = _read(Path("/proc/self/cgroup")).splitlines()
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    inner = _CGROUPS / own.strip("/") / name
    return inner if inner.exists() else _CGROUPS / name


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        return f"{NOT_OBSERVED}{path}: {error.strerror}"


def _chosen(text: str) -> str:
    """The word in brackets of `always [madvise] never`."""
    return text.partition("[")[2].partition("]")[0] or text


def _cpu_quota() -> str:
    """CPUs that the container may use at once, "none" without a limit."""
    text = _read(_cgroup("cpu.max"))
    quota, _, period = text.partition(" ")
    if quota == "max":
        return "none"
    return f"{int(quota) / int(period):g}" if quota.isdigit() and period.isdigit() and int(period) else text


def _container() -> str:
    """The kind of container, "none seen" outside of one."""
    if Path("/.dockerenv").exists():
        return "docker"
    if Path("/run/.containerenv").exists():
        return "podman"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    named = _read(Path("/run/systemd/container"))
    if not named.startswith(NOT_OBSERVED):
        return named
    return "singularity" if "SINGULARITY_NAME" in os.environ or "APPTAINER_NAME" in os.environ else "none seen"
