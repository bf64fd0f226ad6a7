"""Laws of validity: what makes a number worthless, from samples in their recorded shape."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
from helpers_regression import result, segment

from diagnostics.gpu import Gpu
from regression import sampler as sampler_module
from regression.sampler import Sampler
from regression.validity import Sample, run_reasons, sample_reasons, summary, window

WORKERS = ("target-0", "drafter-0", "drafter-1")


def gpu(**changes: Any) -> Gpu:
    """As an H200 under load looks: capped by its power limit, which is normal."""
    values: dict[str, Any] = {
        "index": 0, "name": "NVIDIA H200", "memory_total_bytes": 150 * 10**9, "memory_used_bytes": 40 * 10**9,
        "sm_clock_mhz": 1900, "sm_clock_max_mhz": 1980, "clock_event_bits": 0x4, "processes": (4242,), "uuid": "GPU-1",
        "uncorrected_ecc_errors": 0, "utilization_percent": 97, "power_watts": 690.0, "temperature_celsius": 61,
    }  # fmt: skip
    return Gpu(**{**values, **changes})


def sample(number: int = 0, *gpus: Gpu, **changes: Any) -> Sample:
    values: dict[str, Any] = {"own_processes": (4242,), "foreign_cpu_share": 0.02, "cpus": 16, "swapped_bytes": 0}
    return Sample(time_seconds=float(number), gpus=gpus or (gpu(),), **{**values, **changes})


BEFORE = sample(0, gpu(processes=(), utilization_percent=0), own_processes=())


def reasons(*samples: Sample, before: Sample = BEFORE, num_gpus: int = 1, **options: Any) -> list[str]:
    return sample_reasons(before, samples, num_gpus=num_gpus, **options)


def test_a_quiet_machine_under_its_power_cap_counts() -> None:
    assert reasons(*(sample(n) for n in range(100)), baseline_clock_mhz=1900.0) == []
    assert reasons(*(sample(n) for n in range(100)), num_gpus=0) == []


@pytest.mark.parametrize("bit", [0x8, 0x20, 0x40, 0x80])
@pytest.mark.parametrize(("slowed", "counts"), [(1, True), (2, False)])
def test_slowdowns_in_over_1_percent_of_the_samples_do_not_count(bit: int, slowed: int, counts: bool) -> None:
    samples = [sample(n, gpu(clock_event_bits=bit | 0x4 if n < slowed else 0x4)) for n in range(100)]
    assert (reasons(*samples) == []) == counts


@pytest.mark.parametrize("bit", [0x1, 0x2, 0x4, 0x10, 0x100, 0x200, 0x400])
def test_what_is_normal_under_load_counts(bit: int) -> None:
    assert reasons(*(sample(n, gpu(clock_event_bits=bit)) for n in range(9))) == []


@pytest.mark.parametrize(("clock", "counts"), [(1844, True), (1842, False)])
def test_an_sm_clock_below_0_97_of_the_baselines_does_not_count(clock: int, counts: bool) -> None:
    samples = [sample(n, gpu(sm_clock_mhz=clock)) for n in range(9)]
    assert (reasons(*samples, baseline_clock_mhz=1900.0) == []) == counts
    assert reasons(*samples) == []  # without a baseline there is nothing to compare with


def test_foreign_processes_on_a_gpu_do_not_count() -> None:
    (before,) = reasons(sample(1), before=sample(0, gpu(processes=(77,)), own_processes=()))
    assert "processes 77 were on it before the run" in before
    (during,) = reasons(sample(1), sample(2, gpu(processes=(77, 4242))))
    assert during == "GPU 0: foreign processes 77"


def test_in_a_container_processes_are_only_counted() -> None:
    seen = [sample(n, gpu(processes=(900001,))) for n in range(3)]  # the host's number of our own process
    assert reasons(*seen) == []
    (reason,) = reasons(*seen, sample(4, gpu(processes=(900001, 900002))))
    assert reason == "GPU 0: 2 processes, the run has 1"


def test_errors_of_the_hardware_do_not_count() -> None:
    assert reasons(sample(1, gpu(uncorrected_ecc_errors=2))) == ["GPU 0: 2 uncorrected ECC errors during the run"]
    old = sample(0, gpu(processes=(), uncorrected_ecc_errors=2), own_processes=())
    assert reasons(sample(1, gpu(uncorrected_ecc_errors=2)), before=old) == []
    assert reasons(sample(1, xids=("GPU 0: XID 79",))) == ["GPU 0: XID 79"]


def test_a_gpu_that_nvml_cannot_see_does_not_count_for_gpu_runs_only() -> None:
    unseen = Sample(time_seconds=1.0, gpus_unavailable="no NVML on this machine")
    assert reasons(unseen, before=unseen) == ["no NVML on this machine"]
    assert reasons(unseen, before=unseen, num_gpus=0) == []
    gone = Sample(time_seconds=2.0, cpus=16)
    assert reasons(gone) == ["GPU 0: not seen while the segments ran"]
    assert reasons(sample(1), num_gpus=2) == ["NVML shows 1 of the 2 GPUs of the run: the state of the others is unknown"]


def test_a_busy_machine_does_not_count() -> None:
    assert reasons(*(sample(n, foreign_cpu_share=0.14) for n in range(9))) == []
    (reason,) = reasons(*(sample(n, foreign_cpu_share=0.6) for n in range(9)), num_gpus=0)
    assert "60%" in reason
    assert reasons(sample(1, foreign_cpu_share=0.9), *(sample(n, foreign_cpu_share=0.0) for n in range(9))) == []


def test_a_changed_number_of_cpus_and_swapping_do_not_count() -> None:
    assert "between 8 and 16" in reasons(sample(1), sample(2, cpus=8))[0]
    assert "swapped 32 MiB" in reasons(sample(1, swapped_bytes=2**30), sample(2, swapped_bytes=2**30 + 2**25))[0]


def test_without_samples_nothing_is_known() -> None:
    assert len(reasons()) == 1
    assert window([sample(1), sample(5), sample(9)], 2.0, 8.0) == [sample(5)]


def run(**changes: Any) -> list[str]:
    options: dict[str, Any] = {"workers": WORKERS, "key_before": "a", "key_after": "a"}
    given = {**options, **{key: changes.pop(key) for key in list(changes) if key in options}}
    measure = {**result()["measure"], **changes}
    return run_reasons(result(measure=measure), **given)


def test_a_run_that_measured_everything_counts() -> None:
    assert run() == []


def test_what_the_run_itself_says_can_make_it_worthless() -> None:
    assert run(incomplete="never steady: why", segments=[]) == ["never steady: why"]
    assert run(segments=[segment(0), segment(1, compiles=2)]) == ["2 compile phases ended inside the segments"]
    assert run(workers=(*WORKERS, "drafter-2")) == [f"segment {number}: drafter-2 did nothing" for number in (1, 2)]
    idle = segment(1, workers=[{"worker": worker, "items": 5 * (worker != "drafter-1")} for worker in WORKERS])
    assert run(segments=[segment(0), idle]) == ["segment 2: drafter-1 did nothing"]
    assert "from a to b" in run(key_after="b")[0]
    assert run_reasons({}, workers=(), key_before="a", key_after="a") == ["the run measured nothing"]


def test_the_summary_keeps_what_explains_a_number() -> None:
    kept = summary([sample(1), sample(2, gpu(clock_event_bits=0, temperature_celsius=70, sm_clock_mhz=1800))])
    assert kept["foreign_cpu_share"] == pytest.approx(0.02)
    assert kept["sm_clock_mhz"] == 1850.0
    assert (kept["gpus"][0]["power_cap_share"], kept["gpus"][0]["temperature_celsius"]) == (0.5, 70.0)
    assert summary([])["sm_clock_mhz"] is None


def test_a_child_is_ours_and_its_cpu_time_is_not_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "INTERVAL_SECONDS", 0.05)
    code = "import subprocess, sys; subprocess.run((sys.executable, '-c', 'print(1, flush=True); input()'))"
    with Sampler(None) as sampler:
        child = subprocess.Popen((sys.executable, "-c", code), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        sampler.started(child.pid)
        assert child.stdout is not None
        child.stdout.readline()
        seen = len(sampler.samples)
        while len(sampler.samples) < seen + 3:
            threading.Event().wait(0.01)
        child.communicate(b"\n")
    during = sampler.samples[seen + 1]
    assert len(during.own_processes) == 2
    assert child.pid in during.own_processes
    assert sampler.before.foreign_cpu_share is None
    assert all(0 <= (one.foreign_cpu_share or 0) <= 1 for one in sampler.samples)


def test_a_sampler_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "INTERVAL_SECONDS", 0.0)

    def broken(_sampler: Sampler) -> Sample:
        raise OSError("gone")

    sampler = Sampler(None).__enter__()
    monkeypatch.setattr(Sampler, "_sample", broken)
    sampler._thread.join()
    with pytest.raises(RuntimeError, match="sampling failed: gone"):
        sampler.__exit__(None, None, None)
