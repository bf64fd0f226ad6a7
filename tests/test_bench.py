from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from modeling_batches import packed_batch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dflash.batch import TargetStates
from dflash.compile_policy import CompilePolicy
from dflash.config import CompileConfig, ConfigError, TargetConfig
from dflash.modeling.masks import BlockLayout, dense_mask
from dflash.modeling.target import TargetRunner, load_target, text_config
from dflash.modeling.work import drafter_step_tflop, target_forward_tflop
from dflash.worker import DrafterModelWorker
from regression import baseline
from regression.bench import __main__ as front
from regression.bench import drafter_step, engines, scaling, settings, transport
from regression.bench.figures import Figure, Result, table
from regression.bench.settings import Settings
from regression.bench.training import Run
from regression.child import ChildFailed, ChildResult

CPU = torch.device("cpu")
TINY = Settings(shape="tiny", device=CPU, rounds=1)


def plain_worker() -> tuple[DrafterModelWorker, TargetStates]:
    """The worker of the bench, uncompiled."""
    config = TINY.config()
    shape = settings.drafter_shape(config)
    policy = CompilePolicy(CompileConfig(policy="eager"), num_drafters=1)
    worker = DrafterModelWorker("drafter-0", config, shape, drafter_step.random_ends(shape, CPU), CPU, policy)
    return worker, drafter_step.random_states(config, shape, CPU)


def test_useful_work_of_a_step_is_what_torch_counts_and_none_of_it_is_an_input_gradient_of_features() -> None:
    worker, states = plain_worker()
    batch, shape = states.batch, worker.shape
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # fused kernels are not counted on CPUs
        worker.loss(states).loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    context, anchors = batch.input_ids.shape[1], batch.anchors.shape[1]
    block = anchors * shape.block_size
    all_pairs = block * (context + block)  # dense attention computes what nobody sees, too
    expected = drafter_step_tflop(shape, context=context, anchors=anchors, visible_pairs=all_pairs)
    assert counter.get_total_flops() / 1e12 == pytest.approx(expected, rel=1e-6)
    assert not states.features.requires_grad


def test_useful_work_of_the_target_is_what_torch_counts_up_to_the_last_selected_layer() -> None:
    model, _ = load_target(TargetConfig(path="random:qwen3", dtype="float32"), device=CPU)
    runner = TargetRunner(model, (1, 3, 5), keep_final_hidden=False)
    text, tokens = text_config(model), 48
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # fused kernels are not counted on CPUs
        runner.run(packed_batch([[tokens]], length=tokens, anchors=[[]], num_anchors=1))
    unseen = 6 * 4 * (tokens * (tokens - 1) // 2) * text.num_attention_heads * text.head_dim  # dense attention computes all pairs
    expected = target_forward_tflop(text, layers=6, tokens=tokens)
    assert (counter.get_total_flops() - unseen) / 1e12 == pytest.approx(expected, rel=1e-6)


def test_visible_pairs_are_those_of_the_mask() -> None:
    layout = BlockLayout.of(settings.random_batch(TINY.config(), 500), 8)
    assert settings.visible_pairs(layout) == int(dense_mask(layout).sum())


def test_random_batches_have_every_slot_in_use_sorted_and_a_label_behind_each_anchor() -> None:
    batch = settings.random_batch(TINY.config(), 500)
    anchors = batch.anchors[0].tolist()
    assert anchors == sorted(set(anchors))
    assert anchors[-1] <= batch.input_ids.shape[1] - 2
    assert batch.anchor_valid.all()


@pytest.mark.parametrize(
    ("better", "value", "ceiling", "goal", "share", "met"),
    [
        ("lower", 20.0, 10.0, 25.0, 0.5, True),
        ("lower", 20.0, None, 19.0, None, False),
        ("higher", 20.0, 80.0, 20.0, 0.25, True),
        ("higher", None, 80.0, 20.0, None, None),
        ("lower", 0.0, 5.0, 0.0, None, True),  # no share of a ceiling for nothing
    ],
)
def test_a_figure_knows_its_share_of_the_ceiling_and_its_goal(
    better: Any, value: float | None, ceiling: float | None, goal: float, share: float | None, met: bool | None
) -> None:
    figure = Figure(name="x", value=value, unit="ms", ceiling=ceiling, goal=goal, better=better)
    assert figure.share_of_ceiling == share
    assert figure.meets_goal is met


def test_goals_apply_to_the_real_shape_on_a_gpu_only() -> None:
    assert TINY.goal(126) is None
    assert Settings(shape="qwen3-8b", device=CPU, rounds=1).goal(126) is None
    assert Settings(shape="qwen3-8b", device=torch.device("cuda", 0), rounds=1).goal(126) == 126


def test_the_step_is_measured_whole_and_by_parts_and_its_result_survives_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "CPU_BACKEND", "eager")  # Dynamo alone: compiles in half the time
    result = drafter_step.measure(Settings(shape="tiny", device=CPU, rounds=1, levers=("loss",)))
    assert Result.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    found = {figure.name: figure for figure in result.figures}
    assert (found["recompiles"].value, found["fallbacks"].value) == (0, 0)
    assert found["peak memory"].value is None  # nobody counts on a CPU, and it says so
    assert found["peak memory"].note
    step = found["step (forward, loss, backward)"]
    assert step.value
    assert step.ceiling
    assert found["useful work"].share_of_ceiling == pytest.approx(step.share_of_ceiling)
    assert len([name for name in found if name.startswith("part: ")]) == 6
    assert found["alone: head and loss with uncompiled scores"].value  # beside the compiled ones of the lever
    assert table(result).row_count == len(result.figures)


def fake_run(name: str, _options: Any) -> Result:
    if name == "pipeline":
        raise ChildFailed("it broke")
    figures = (Figure(name="recompiles", value=2.0 if name == "probes" else 0.0, unit="a run"),)
    return Result(bench=name, shape="tiny", device="cpu", figures=figures)


@pytest.mark.parametrize(
    ("names", "code"),
    [(["drafter_step"], 0), (["drafter_step", "probes"], 1), (["drafter_step", "pipeline", "probes"], 3)],
)
def test_a_bench_that_fails_loses_only_its_own_figures(
    names: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "_run", fake_run)
    monkeypatch.setattr(front, "fingerprint", dict)
    file = tmp_path / "figures.json"
    assert front.main([*names, "--device", "cpu", "--json", str(file)]) == code
    content = json.loads(file.read_text())
    assert set(content) == {"kind", "command", "fingerprint", "results", "failures"}
    assert list(content["results"]) == [name for name in names if name != "pipeline"]
    assert list(content["failures"]) == [name for name in names if name == "pipeline"]
    assert baseline.earlier_formats(tmp_path) == []  # figures may lie beside baselines, which they are not


@pytest.mark.parametrize(
    "arguments",
    [["no_such"], ["--rounds", "0"], ["--specforge", "/no/such"], ["--json", "/no/such/x.json"], ["--device", "tpu"]],
)
def test_bad_usage_is_refused_before_anything_runs(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "_run", lambda *_: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as stopped:
        front.main(["--device", "cpu", *arguments])
    assert stopped.value.code == 2


def test_what_takes_long_or_needs_more_is_only_measured_by_name(tmp_path: Path) -> None:
    left_out = {"specforge", "simulation"}
    assert set(front._options(["--device", "cpu"]).names) == set(front.BENCHES) - left_out
    assert front._options(["simulation", "--device", "cpu"]).names == ["simulation"]
    (tmp_path / "specforge").mkdir()
    assert "specforge" in front._options(["--device", "cpu", "--specforge", str(tmp_path)]).names


def test_levers_are_off_as_in_the_trainer_and_reach_a_child_as_its_flags() -> None:
    assert "--compile.loss" not in TINY.train_flags()
    levers = Settings(shape="tiny", device=CPU, rounds=1, levers=("loss", "target", "copies"))
    assert {"--compile.loss", "--compile.target", "--optim.bf16-copies"} <= set(levers.train_flags())
    config = levers.config()
    assert (config.compile.loss, config.compile.target, config.optim.bf16_copies) == (True, True, True)


def test_an_unknown_lever_is_named_with_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        front.main(["drafter_step", "--device", "cpu", "--levers", "loss,chunks"])
    assert stopped.value.code == 2
    assert "--levers names 'chunks': known are loss, target, copies, fp8, memory" in capsys.readouterr().err


@pytest.mark.parametrize("lever", ["fp8", "copies"])
def test_levers_of_gpus_are_refused_on_a_cpu_before_a_bench_starts(lever: str, capsys: pytest.CaptureFixture[str]) -> None:
    for main in (front.main, drafter_step.main):
        with pytest.raises(SystemExit) as stopped:
            main([*(["drafter_step"] if main is front.main else []), "--device", "cpu", "--levers", lever])
        assert stopped.value.code == 2
        assert capsys.readouterr().err.count("is for GPUs") == 1


def test_bf16_copies_are_refused_where_training_is_in_fp32() -> None:
    config = Settings(shape="tiny", device=CPU, rounds=1, levers=("copies",)).config()
    shape = settings.drafter_shape(config)
    policy = CompilePolicy(CompileConfig(policy="eager"), num_drafters=1)
    with pytest.raises(ConfigError, match="bf16-copies"):
        DrafterModelWorker("drafter-0", config, shape, drafter_step.random_ends(shape, CPU), CPU, policy)


def scaled_point(axis: str, factor: int, *, tflop: float) -> scaling.Point:
    sizes = {"context": 1, "anchors": 1, "vocabulary": 1}
    return scaling.Point(axis=axis, factor=factor, milliseconds=3.0 + 20.0 * tflop, tflop=tflop, peak_bytes=0, **sizes)


def test_the_fitted_law_finds_fixed_part_and_rate_and_the_exponent_is_a_slope() -> None:
    points = [scaled_point("context", factor, tflop=0.5 * factor) for factor in (1, 2, 4)]
    assert scaling.fit(points) == pytest.approx((3.0, 20.0))
    assert scaling.exponent((1, 2, 4), [5.0, 20.0, 80.0]) == pytest.approx(2.0)


@pytest.mark.parametrize("axis", scaling.AXES)
def test_one_size_at_a_time_is_multiplied(axis: str) -> None:
    def sizes(factor: int) -> tuple[int, ...]:
        config, shape = scaling.shapes(TINY, axis, factor)
        return config.data.sequence_length, config.data.num_anchors, shape.vocab_size

    changed = [after / before for before, after in zip(sizes(1), sizes(4), strict=True)]
    assert changed == [4.0 if name == axis else 1.0 for name in scaling.AXES]


def test_the_transport_is_compared_with_the_link_and_its_goal_is_of_the_real_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"bytes": 8 * 2**20, "link_seconds": 0.09, "transport_seconds": 0.1, "devices": "cpu, Gloo", "rounds": 3}
    commands: list[list[str]] = []

    def two_ranks(command: list[str], **_: Any) -> ChildResult:
        commands.append(command)
        return ChildResult(returncode=0, result=found, seconds=1.0, stderr_tail="")

    monkeypatch.setattr(transport, "run_json", two_ranks)
    figures = {one.name: one for one in transport.measure(TINY).figures}
    assert figures["transport over link"].value == pytest.approx(0.9)
    assert figures["transport over link"].goal is None
    assert figures["transport"].share_of_ceiling == pytest.approx(0.9)
    assert commands[0][commands[0].index("--nproc-per-node") + 1] == "2"
    real = transport.measure(Settings(shape="qwen3-8b", device=CPU, rounds=1))
    assert next(one for one in real.figures if one.name == "transport over link").meets_goal


def test_engines_differ_in_who_runs_the_workers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[list[str], list[str]]] = []
    result = {"measure": {"tokens_per_second": 5.0, "incomplete": None}, "workers": [], "fx_errors": 0, "fallbacks": 0}

    def no_run(_: Settings, __: Path, *, before: Any, more: Any, **___: Any) -> Run:
        commands.append((list(before), list(more)))
        rows = ({"name": "phase", "fields": {"text": "training"}, "time_seconds": 9.0}, {"name": "step", "time_seconds": 11.0})
        rate = {**result, "recompiles_after_warmup": 3 * len(commands)}
        return Run(started=2.0, result=rate, events=rows)

    monkeypatch.setattr(engines, "train", no_run)
    figures = {one.name: one for one in engines.measure(TINY).figures}
    (none, threads), (torchrun, processes) = commands
    assert none == []
    assert torchrun[:2] == ["-m", "torch.distributed.run"]
    assert [flag for flag in processes if flag not in threads] == ["processes"]
    assert figures["processes over threads"].value == 1
    assert figures["processes: start to the first step's end"].value == 9.0
    assert figures["threads: recompiles after warmup"].meets_goal is False


def test_engines_have_a_gpu_for_each_worker() -> None:
    two = Settings(shape="tiny", device=torch.device("cuda:0"), rounds=1)
    assert engines.flags(two, "threads")[-1] == "cuda:1,cuda:0"  # as of ranks: the drafter is rank 0
    assert engines.flags(two, "processes")[-1] == "cuda"
