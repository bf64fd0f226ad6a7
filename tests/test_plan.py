from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from dflash import __main__ as command
from dflash import plan
from dflash.config import CompileConfig, ConfigError, RunConfig
from dflash.modeling.random_targets import RANDOM_TARGETS
from dflash.modeling.target import TargetRunner
from dflash.plan import Rates
from dflash.plan_speed import levers_of
from dflash.presets import qwen3_8b, smollm2_135m
from regression.bench.settings import LEVERS, Settings

BASELINES = Path(__file__).parent.parent / "regression" / "baselines"
SMOLLM2 = LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
)  # fmt: skip
PLAIN = dataclasses.replace(qwen3_8b(), compile=CompileConfig())  # as the committed run was
TINY = dataclasses.replace(
    PLAIN,
    target=dataclasses.replace(PLAIN.target, path="random:qwen3", mask_token_id=511),
    topology="2t+1d",
    devices="cuda",
)
RATES = Rates(drafter_tflops=2.0, target_tflops=4.0, compiled_target_tflops=5.0, update_seconds_per_parameter=1e-9)


NEAR = 0.05


@pytest.mark.parametrize(
    ("config", "target"),
    [(PLAIN, RANDOM_TARGETS["qwen3-8b"]()), (smollm2_135m(), SMOLLM2)],
    ids=["qwen3-8b", "smollm2-135m"],
)
def test_memory_of_a_run_is_what_an_h200_was_measured_to_hold(
    config: RunConfig, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = _measured_run(config)["peak_memory_bytes"]["cuda:0"]
    monkeypatch.setattr(plan, "_target_config", lambda _config: target)
    assert plan.plan(config)["memory_gib"]["cuda:0"] == pytest.approx(measured / 2**30, rel=NEAR)


@pytest.mark.parametrize(
    ("run", "levers", "activation_memory", "near"),
    [
        ("plain", (), 1.0, NEAR),
        ("loss", ("loss",), 1.0, NEAR),
        ("loss and copies", ("loss", "copies"), 1.0, NEAR),
        ("loss and copies, activation budget 0.75", ("loss", "copies"), 0.75, NEAR),
        ("loss, copies, fp8, memory", ("loss", "copies", "fp8"), 0.75, NEAR),
        ("loss, copies, fp8, activation memory 0.5", ("loss", "copies", "fp8"), 0.5, NEAR),
        ("loss, activation memory 0.5", ("loss",), 0.5, 0.10),  # counted as 0.75
    ],
)
def test_memory_of_a_step_follows_the_levers_as_on_an_h200(
    run: str, levers: tuple[str, ...], activation_memory: float, near: float
) -> None:
    config = with_levers(*levers)
    compiling = dataclasses.replace(config.compile, activation_memory=activation_memory)
    config = dataclasses.replace(config, compile=compiling, devices="cuda:0,cuda:1")
    parts = plan.plan(config)["memory_parts_gib"]["cuda:1"]
    weights = parts["drafter: fp32 weights and gradients"] / 2
    held = parts["features of two micro-batches"] / 2  # a bench gives the same one again and again
    planned = sum(parts.values()) - weights - parts["drafter: moments"] - held
    assert planned == pytest.approx(bench_figures(run)["peak beyond fp32 weights and moments"], rel=near)


def test_fp8_holds_the_head_twice_more_and_scores_in_fewer_bytes_only_where_one_kernel_makes_them() -> None:
    plain, fp8, both, loss = (
        plan.plan(with_levers(*levers))["memory_parts_gib"]["cuda:0"] for levers in ((), ("fp8",), ("fp8", "loss"), ("loss",))
    )
    head = 151_936 * 4096 / 2**30
    assert fp8["drafter: frozen ends"] - plain["drafter: frozen ends"] == pytest.approx(2 * head, abs=0.002)
    assert both["drafter: a step"] < loss["drafter: a step"] < plain["drafter: a step"] < fp8["drafter: a step"]


def test_tokens_per_second_of_a_run_are_what_an_h200_was_measured_to_do() -> None:
    found = plan.plan(PLAIN, rates_of("plain"))["speed"]
    assert found["tokens_per_second"] == pytest.approx(_measured_run(qwen3_8b())["tokens_per_second"], rel=NEAR)
    assert found["cautions"] == []


def test_speed_and_memory_of_a_run_with_levers_are_what_an_h200_was_measured_to_do() -> None:
    found = plan.plan(with_levers("loss", "copies", "target"), rates_of("loss and copies, tiles made ahead", "loss", "copies"))
    measured = bench_figures("pipeline, loss copies target")
    assert found["speed"]["tokens_per_second"] == pytest.approx(measured["pipeline"], rel=NEAR)
    assert found["speed"]["milliseconds_of_a_micro_batch"]["target"] == pytest.approx(1000 * 4096 / 42_573, rel=0.001)
    assert found["speed"]["cautions"] == []
    assert found["memory_gib"]["cuda:0"] == pytest.approx(measured["peak memory"], rel=NEAR)


def test_rates_of_other_levers_and_sizes_are_told() -> None:
    for lever in set(LEVERS) - {"target"}:
        assert levers_of(with_levers(lever)) == {lever}
    assert levers_of(with_levers("target")) == set()
    rates = dataclasses.replace(RATES, levers=frozenset({"loss"}), hidden_size=4096)
    first, second = plan.plan(TINY, rates)["speed"]["cautions"]
    assert "the levers loss, this run has none" in first
    assert "hidden size 4096" in second


def with_levers(*levers: str) -> RunConfig:
    """The run that the benches take for Qwen3-8B's shape, with levers by their names there."""
    return Settings(shape="qwen3-8b", device=torch.device("cuda:0"), rounds=1, levers=levers).config()


def bench_figures(run: str) -> dict[str, float]:
    """Figures that were measured on an H200."""
    figures = json.loads((BASELINES / "h200-bench.json").read_text())["runs"][run]["figures"]
    return {name: figure["value"] for name, figure in figures.items()}


def rates_of(run: str, *levers: str) -> Rates:
    """Rates of a drafter's step, and of the target in tokens per second as printed on that GPU (dflash/README.md)."""
    step, tflop_per_token = bench_figures(run), 58.41 / 4096
    return Rates(
        drafter_tflops=step["useful work"],
        target_tflops=32_207 * tflop_per_token,
        compiled_target_tflops=42_573 * tflop_per_token,
        update_seconds_per_parameter=step["optimizer step"] / 1e3 / 1_048_626_432,
        levers=frozenset(levers),
        hidden_size=4096,
    )


def _measured_run(config: RunConfig) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((BASELINES / f"h200-{config.preset}.json").read_text())["result"]
    return result


def test_parameters_are_those_that_run() -> None:
    found = plan.plan(TINY)
    real = AutoModelForCausalLM.from_config(RANDOM_TARGETS["qwen3"]())
    runner = TargetRunner(real, (1, 2, 3, 4, 5), keep_final_hidden=False)
    run = [*runner.decoder.embed_tokens.parameters(), *runner.decoder.layers.parameters()]
    assert found["target_parameters"] == sum(parameter.numel() for parameter in run)


def test_workers_that_share_a_device_share_its_time_and_its_memory() -> None:
    apart, together = (
        plan.plan(dataclasses.replace(TINY, topology="1t+1d", devices=devices), RATES)
        for devices in ("cuda:0,cuda:1", "cuda:0,cuda:0")
    )
    times = apart["speed"]["milliseconds_of_a_micro_batch"]
    drafter = times["drafter"] + times["update"]
    assert apart["speed"]["fullest_device"] == "cuda:1"
    assert apart["speed"]["tokens_per_second"] == pytest.approx(4096 / (max(times["target"], drafter) / 1e3))
    assert together["speed"]["tokens_per_second"] == pytest.approx(4096 / ((times["target"] + drafter) / 1e3))
    features = apart["memory_parts_gib"]["cuda:1"]["features of two micro-batches"]
    assert together["memory_gib"]["cuda:0"] == pytest.approx(sum(apart["memory_gib"].values()) - features, abs=0.03)


def features_of(config: RunConfig) -> dict[str, float]:
    """GiB of features by device, in micro-batches of Qwen3-8B's shape."""
    one = 4096 * 5 * 4096 * 2 / 2**30
    parts = plan.plan(config)["memory_parts_gib"]
    return {
        device: round(sum(size for name, size in of_device.items() if name.startswith("features")) / one, 1)
        for device, of_device in parts.items()
    }


def test_a_drafter_in_threads_holds_the_micro_batch_before_until_its_gpu_is_done_with_it() -> None:
    """The queue has room for two; what a drafter has taken it holds where the target made it, and on its own device."""
    run = qwen3_8b()
    assert features_of(run) == {"cuda:0": 2 + 2}
    apart = dataclasses.replace(run, devices="cuda")
    assert features_of(apart) == {"cuda:0": 2 + 2, "cuda:1": 2}
    many = dataclasses.replace(apart, topology="1t+2d")
    assert features_of(many) == {"cuda:0": 2 + 4, "cuda:1": 2, "cuda:2": 2}


def test_in_processes_features_lie_in_the_slots_of_drafters_and_on_their_way_from_targets() -> None:
    run = dataclasses.replace(qwen3_8b(), engine="processes", devices="cuda")
    assert features_of(run) == {"cuda:0": 3, "cuda:1": 2}
    more = dataclasses.replace(run, topology="1t+2d", telemetry=dataclasses.replace(run.telemetry, queue_items=6))
    assert features_of(more) == {"cuda:0": 3, "cuda:1": 3, "cuda:2": 3}


def test_only_the_leading_drafter_holds_moments_and_only_kl_keeps_the_whole_target() -> None:
    two = plan.plan(dataclasses.replace(TINY, topology="1t+2d"))["memory_parts_gib"]
    assert two["cuda:1"]["drafter: moments"] > 0 == two["cuda:2"]["drafter: moments"]
    kl = dataclasses.replace(TINY, loss=dataclasses.replace(TINY.loss, kind="kl"))
    assert plan.plan(kl)["target_parameters"] > plan.plan(TINY)["target_parameters"]


def test_a_gpu_that_is_too_small_is_named_and_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--preset", "qwen3-8b", "--target.path", "random:qwen3", "--target.mask-token-id", "511"]
    assert command.main([*arguments, "--gpu-memory-gib", "100"]) == 0
    assert json.loads(capsys.readouterr().out)["speed_unknown_because"] == "no --rates FILE with measured rates"
    assert command.main([*arguments, "--gpu-memory-gib", "0.001"]) == 1
    assert json.loads(capsys.readouterr().out)["failed"] == ["cuda:0"]


def test_rates_are_read_from_figures_of_the_benches_and_from_nothing_else(tmp_path: Path) -> None:
    def bench(figures: dict[str, float], **details: int) -> dict[str, Any]:
        return {
            "device": "cuda:0",
            "figures": [{"name": name, "value": value} for name, value in figures.items()],
            "details": details,
        }

    step = bench({"useful work": 500.0, "optimizer step": 10.0}, parameters=1000, hidden_size=64)
    step["details"]["levers"] = ["loss", "target"]
    forward = bench({"useful work": 600.0, "runner, layers as they are": 30.0, "runner, compiled layers": 40.0})
    results = {"drafter_step": step, "target_forward": forward}
    file = tmp_path / "figures.json"
    file.write_text(json.dumps({"results": results}))
    assert plan.read_rates(file) == Rates(
        drafter_tflops=500.0,
        target_tflops=450.0,
        compiled_target_tflops=600.0,
        update_seconds_per_parameter=1e-5,
        levers=frozenset({"loss"}),
        hidden_size=64,
    )
    file.write_text(json.dumps({"results": results | {"drafter_step": step | {"device": "cpu"}}}))
    with pytest.raises(ConfigError, match="measured on cpu, cuda:0"):
        plan.read_rates(file)
    file.write_text(json.dumps({"results": {"drafter_step": step}}))
    with pytest.raises(ConfigError, match="target_forward"):
        plan.read_rates(file)


def test_cpus_and_wrong_numbers_of_devices_are_refused() -> None:
    for devices in ("cpu", "cuda:0"):
        with pytest.raises(ConfigError, match="name one for each of 3 workers"):
            plan.plan(dataclasses.replace(TINY, devices=devices))


def test_a_drafter_that_does_not_fit_is_told_to_share_and_then_fits() -> None:
    wide = dataclasses.replace(
        qwen3_8b(), topology="1t+4d", devices="cuda", optim=dataclasses.replace(qwen3_8b().optim, batches_per_step=4)
    )
    told = plan.plan(wide, gpu_memory_gib=24)
    assert "cuda:1" in told["failed"]
    assert told["advice"].startswith("--engine processes --devices cuda --fully-shard fits: the fullest device needs ")
    shared = plan.plan(dataclasses.replace(wide, engine="processes", fully_shard=True), gpu_memory_gib=24)
    assert shared["failed"] == []
    assert shared["advice"] is None
    assert max(shared["memory_gib"].values()) == pytest.approx(float(told["advice"].split()[-2]), abs=0.06)
    assert len({shared["memory_gib"][f"cuda:{number}"] for number in range(1, 5)}) == 1  # no drafter holds more than another
    assert "not enough" in plan.plan(wide, gpu_memory_gib=12)["advice"]
    assert "a multiple of 4" in plan.plan(dataclasses.replace(wide, optim=qwen3_8b().optim), gpu_memory_gib=24)["advice"]


def test_so_many_gpus_are_split_as_the_work_asks_and_the_plan_is_of_the_best_split() -> None:
    rates = Rates(drafter_tflops=500, target_tflops=500, compiled_target_tflops=500, update_seconds_per_parameter=1.2e-11)
    for gpus in (2, 8):
        run, found = plan.split(qwen3_8b(), gpus, rates)
        assert run.topology == found["recommended_topology"]
        assert [row["topology"] for row in found["splits"]] == [f"{n}t+{gpus - n}d" for n in range(1, gpus)]
        speeds = {row["topology"]: row["tokens_per_second"] for row in found["splits"]}
        assert speeds[run.topology] == max(speeds.values())
        planned = plan.plan(run, rates)
        assert planned["speed"]["tokens_per_second"] == speeds[run.topology]
        assert len(planned["memory_gib"]) == gpus
    by_work = plan.split(qwen3_8b(), 8)[1]
    assert by_work["splits"][0]["tokens_per_second"] is None
    assert "no --rates" in by_work["recommended_by"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "1"], "need 2"),
        (["--gpu-memory-gib", "nan"], "--gpu-memory-gib is nan: use a positive number"),
        (["--gpus", "8", "16"], "one number"),
        (["--gpus", "8", "--topology", "5t+3d"], "leave them out"),
        (["--states-gb", "3"], "--states-gb: for --simulate"),
        (["--simulate", "run", "--rates", "x"], "--rates: for a plan of one run"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["plan", "--preset", "qwen3-8b", *arguments]) == 2
    assert message in capsys.readouterr().err
