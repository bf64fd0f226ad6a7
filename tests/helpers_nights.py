"""Invented histories of two series, kept in a real store: what a night after 60 nights looks like."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from helpers_regression import measurement, result

from regression.history import History, read
from regression.measurement import Measurement
from regression.store import Store

CPU, GPU = "tiny-cpu on CPU, 3 x 5 s", "qwen3-8b on 8 GPUs, 3 x 60 s"
NIGHTS = 60
START = datetime(2026, 1, 1, 2, tzinfo=UTC)
STAGES = {"target.forward": 0.45, "drafter.forward": 0.3, "drafter.backward": 0.6, "optimizer.step": 0.05, "queue.put": 0.01}


def rates(name: str, night: int) -> float:
    """A steady level with a lone outlier; a step down that is accepted on the CPU; a fall at the end on the GPUs."""
    noise = random.Random(f"{name} {night}").gauss(0.0, 0.006)
    level = 1.0
    if night == 17:
        level = 0.93
    if name == CPU and night >= 30:
        level = 0.95
    if name == GPU and night >= NIGHTS - 3:
        level = 0.91
    return (8_412.0 if name == GPU else 512.0) * level * (1 + noise)


def commit(night: int) -> str:
    return hashlib.sha1(str(night).encode()).hexdigest()


def one(name: str, night: int) -> Measurement:
    rate, devices = rates(name, night), 8 if name == GPU else 3
    upgraded = night >= 40
    fingerprint = {
        "machine": "x86_64",
        "gpus": [{"name": "NVIDIA H200", "memory_gib": 140}] * (8 if name == GPU else 0),
        "driver": "570.124.06" if upgraded else "570.86.15",
        "packages": {"torch": "2.13.0", "numpy": "2.4.6" if upgraded else "2.4.4"},
        "git": {"commit": commit(night), "dirty": False},
    }
    values = result(measure={"method": 1, "num_devices": devices, "tokens_per_second": rate * devices, "warmup_seconds": 21.0,
                             "tokens_per_second_per_device": rate, "segments": [segment(name, rate, devices)] * 3})  # fmt: skip
    return dataclasses.replace(
        measurement(),
        name=name,
        series=f"{name} [{'a1b2c3d4e5f6' if name == GPU else '0123456789ab'}]",
        time=(START + timedelta(days=night)).isoformat(timespec="seconds"),
        result=values,
        fingerprint=fingerprint,
        invalid=("GPU 3: thermal slowdown in 14 of 120 samples (limit 1%)",) if night == 24 else (),
        controls={"bf16_matmul_tflops": 712.0, "device_copy_gb_per_second": 3_900.0} if name == GPU else {},
        state={"gpus": [gpu(index) for index in range(8)]} if name == GPU else {"gpus": []},
    )


def segment(name: str, rate: float, devices: int) -> dict[str, Any]:
    workers = [(f"target-{n}", f"cuda:{n}") for n in range(5)] + [(f"drafter-{n}", f"cuda:{5 + n}") for n in range(3)]
    if name == CPU:
        workers = [("target-0", "cpu"), ("drafter-0", "cpu"), ("drafter-1", "cpu")]
    times = {"items": 120, "tokens": 60 * rate, "busy_seconds": 51.0, "wait_seconds": 6.0, "sync_seconds": 3.0}
    on_gpu = {"device_seconds": 48.5, "host_stall_seconds": 11.5} if name == GPU else {}
    return {
        "began": 0.0, "ended": 60.0, "seconds": 60.0, "steps": 40, "tokens": 60 * rate * devices, "padding_tokens": 1_804,
        "tokens_per_second": rate * devices, "tokens_per_second_per_device": rate, "queue_occupancy": 0.71, "compiles": 0,
        "workers": [{"worker": worker, "device": device, **times, **on_gpu} for worker, device in workers],
        "stages": [{"stage": stage, "calls": 120, "seconds": 60 * share} for stage, share in STAGES.items()],
    }  # fmt: skip


def gpu(index: int) -> dict[str, Any]:
    return {"index": index, "name": "NVIDIA H200", "sm_clock_mhz": 1_830.0, "power_cap_share": 0.12, "slowdown_share": 0.0,
            "power_watts": 655.0, "temperature_celsius": 61.0, "utilization_percent": 97.0}  # fmt: skip


FINDING = {
    "id": "F3", "severity": "hazard", "what": "Two threads traced at one time.", "who": ["drafter-0", "drafter-1"],
    "where": ["dflash/engine/threads.py:212 in run", "dflash/modeling/drafter.py:88 in forward"], "count": 2, "others": [],
    "why": "Both compiled their first micro-batch.", "what_to_do": "Use --compile.policy prewarm.", "process": "",
}  # fmt: skip


def note(measured: Measurement, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "night", "series": measured.series, "time": measured.time, "name": measured.name,
        "probed": {"findings": [FINDING], "num_findings": 1, "program_exit_code": 0, "not_observed": []},
        "commands": {"this night": "python -m regression.nightly --output nights --gpus 8"},
        "cache": {"directory": "/tmp/torchinductor_ci", "files": 412, "bytes": 93_400_000,
                  "parts": [{"part": "compiled code", "files": 400, "bytes": 91_000_000},
                            {"part": "fxgraph", "files": 12, "bytes": 2_400_000}]}, **changes,
    }  # fmt: skip


def keep(directory: Path) -> History:
    """60 nights of both series, with an accepted level, the last one confirmed by the gate."""
    store = Store(directory)
    for name in (CPU, GPU):
        for night in range(NIGHTS):
            store.add(one(name, night).to_record())
    cpu, gpu_night = one(CPU, 30), one(GPU, NIGHTS - 1)
    store.accept(cpu.series, "attention is exact now", time=one(CPU, 31).time, since=cpu.time, author="me")
    gate = {"kind": "FAIL", "sentence": "FAIL: 8.71% slower than the baseline", "pairs": 8, "baseline": commit(NIGHTS - 4)}
    store.add(note(one(CPU, NIGHTS - 1)))
    store.add(note(gpu_night, gate=gate))
    return read(store)
