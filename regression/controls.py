"""Control workloads: fixed work without any of our code, in a process of its own right before and right after each measurement.

They never run beside the workload, so that a slower workload cannot slow them, nor leave them more of the machine. The watch
(`regression.watch`) divides a throughput by their speed. On GPUs: a bf16 matmul and a device copy on each GPU, and an
all-reduce over all of them where there are several. On a CPU: a loop of the interpreter, a float32 matmul and a copy of numpy.
`python -m regression.controls [--gpus N]` prints one JSON line of rates, larger is better; of several GPUs the slowest counts.

Known limit: what changes only while the workload runs (a neighbour that came and went) is not seen by them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dflash.standard_output import outlive_reader
from regression.child import ChildFailed, Place, run_json
from regression.spec import RunSpec

ROUNDS = 7
_LOOPS = 1_000_000
_TIMEOUT_SECONDS = 300.0


def run(spec: RunSpec, directory: Path, when: str) -> dict[str, float]:
    """The controls on the GPUs (or the CPU) of `spec`, in a fresh process; empty when they failed (`controls-WHEN.log`)."""
    command = [sys.executable, "-m", "regression.controls", "--gpus", str(spec.gpus)]
    log = directory / f"controls-{when}.log"
    try:
        child = run_json(command, log=log, timeout_seconds=_TIMEOUT_SECONDS, place=Place(variables=spec.variables))
    except ChildFailed:
        return {}
    return {name: float(value) for name, value in child.result.items()}


def between(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """The rates of what ran before and after: geometric means. Empty where the two did not run the same."""
    if before.keys() != after.keys():
        return {}
    return {name: math.sqrt(rate * after[name]) for name, rate in before.items()}


def cpu_rates() -> dict[str, float]:
    """Million rounds of a loop, GFLOP/s of a 512 x 512 float32 matmul, GB/s of copying 64 MiB: each the median of 7 rounds."""
    matrix = np.ones((512, 512), dtype=np.float32)
    source, target = np.ones(2**24, dtype=np.float32), np.empty(2**24, dtype=np.float32)
    loop = _median_seconds(_loop, inner=1)
    matmul = _median_seconds(lambda: matrix @ matrix, inner=10)
    copy = _median_seconds(lambda: np.copyto(target, source), inner=4)
    return {
        "python_loop_million_per_second": _LOOPS / loop / 1e6,
        "numpy_matmul_gflops": 2 * 512**3 / matmul / 1e9,
        "numpy_copy_gb_per_second": 2 * source.nbytes / copy / 1e9,
    }


def _loop() -> int:
    total = 0
    for number in range(_LOOPS):
        total += number & 7
    return total


def gpu_rates(gpus: int) -> dict[str, float]:
    """TFLOP/s of an 8192 x 8192 bf16 matmul, GB/s of copying 1 GiB on the device, GB/s of an all-reduce of 1 GiB."""
    import torch  # noqa: PLC0415 - the CPU controls need none

    matmuls, copies = [], []
    for index in range(gpus):
        with torch.cuda.device(index):
            matrix = torch.zeros(8192, 8192, dtype=torch.bfloat16, device="cuda")
            source = torch.zeros(2**28, dtype=torch.float32, device="cuda")
            target = torch.empty_like(source)
            matmul = _gpu_seconds(torch, partial(torch.mm, matrix, matrix))
            copy = _gpu_seconds(torch, partial(target.copy_, source))
        matmuls.append(2 * 8192**3 / matmul / 1e12)
        copies.append(2 * source.nbytes / copy / 1e9)
    rates = {"bf16_matmul_tflops": min(matmuls), "device_copy_gb_per_second": min(copies)}
    if gpus > 1:
        from torch.cuda import nccl  # noqa: PLC0415 - see above

        parts = [torch.zeros(2**28, dtype=torch.float32, device=f"cuda:{index}") for index in range(gpus)]

        def reduce() -> None:
            nccl.all_reduce(parts)  # type: ignore[no-untyped-call]  # torch does not annotate it
            for index in range(gpus):
                torch.cuda.synchronize(index)

        rates["all_reduce_gb_per_second"] = parts[0].nbytes / _median_seconds(reduce, inner=4) / 1e9
    return rates


def _median_seconds(work: Callable[[], Any], *, inner: int) -> float:
    """Of one call of `work`: the median of 7 rounds of `inner` calls, after one to warm up."""
    times = []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        for _ in range(inner):
            work()
        times.append((time.perf_counter() - started) / inner)
    return statistics.median(times[1:])


def _gpu_seconds(torch: Any, work: Callable[[], Any], *, inner: int = 10) -> float:
    """Of one call, by CUDA events on the current stream; as `_median_seconds`."""
    times: list[float] = []
    for _ in range(ROUNDS + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(inner):
            work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / inner)
    return statistics.median(times[1:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rates."""
    parser = argparse.ArgumentParser(prog="python -m regression.controls", description=__doc__)
    parser.add_argument("--gpus", type=int, default=0, metavar="N")
    gpus = parser.parse_args(arguments).gpus
    sys.stdout.write(json.dumps(gpu_rates(gpus) if gpus else cpu_rates()) + "\n")
    return 0


if __name__ == "__main__":
    outlive_reader()
    sys.exit(main())
