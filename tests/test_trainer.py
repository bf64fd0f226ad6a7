import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_training import examples_of, make_config, write_synthetic

from dflash import checkpoint, events
from dflash.__main__ import COMMANDS, main
from dflash.config import ConfigError, RunConfig, to_dict
from dflash.data.examples import DataError, Meta, write_examples
from dflash.data.packing import PackedStream
from dflash.engine.queue import WorkerFailed
from dflash.errors import CheckpointError
from dflash.stopping import stop_on_signals
from dflash.trainer import train
from dflash.worker import DrafterModelWorker, NonFiniteError

ROOT = Path(__file__).parent.parent


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [line["fields"]["loss"] for line in lines if line["name"] == "step"]


def weights(run: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return checkpoint.load(checkpoint.resolve(run, name)).weights


def same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_m_drafters_equal_one_drafter_with_m_times_the_batch(tmp_path: Path) -> None:
    train(make_config(tmp_path / "one", topology="1t+1d"))
    train(make_config(tmp_path / "four", topology="2t+4d"))
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "four"), rel=1e-6)
    assert same_bits(weights(tmp_path / "one"), weights(tmp_path / "four"))
    wide = make_config(tmp_path / "wide", data={"rows_per_batch": 8}, optim={"batches_per_step": 1})
    train(wide)  # the same rows as one micro-batch of four times the size
    for name, value in weights(tmp_path / "wide", "step-000003").items():
        torch.testing.assert_close(value, weights(tmp_path / "four", "step-000003")[name], rtol=1e-4, atol=1e-6)


def test_resuming_equals_never_stopping_bit_for_bit_also_with_other_drafters(tmp_path: Path) -> None:
    train(make_config(tmp_path / "whole"))
    interrupted = tmp_path / "interrupted"
    train(make_config(interrupted, topology="1t+2d"))
    for name in ("step-000006",):
        (checkpoint.checkpoint_dir(interrupted) / name / checkpoint.MARKER).unlink()
    train(make_config(interrupted, topology="1t+3d", resume=True))
    assert losses(interrupted)[-3:] == losses(tmp_path / "whole")[-3:]
    assert same_bits(weights(tmp_path / "whole"), weights(interrupted))
    whole = checkpoint.load(checkpoint.resolve(tmp_path / "whole", "last"))
    resumed = checkpoint.load(checkpoint.resolve(interrupted, "last"))
    assert same_bits(whole.moments, resumed.moments)


def test_the_result_has_the_promised_keys_and_counts_every_token(tmp_path: Path) -> None:
    result = train(make_config(tmp_path / "run", compile={"policy": "prewarm", "backend": "aot_eager"}))
    promised = [
        "preset",
        "engine",
        "topology",
        "steps",
        "tokens",
        "tokens_per_second",
        "tokens_per_second_per_device",
        "loss",
        "recompiles_after_warmup",
        "fallbacks",
        "fx_errors",
        "checkpoint",
    ]
    assert set(promised) <= set(result)
    assert result["tokens"] == 6 * 4 * 2 * 32
    assert result["graph_runs"] == 6 * 4 + 1  # one more in the warm-up
    assert (result["recompiles_after_warmup"], result["fallbacks"], result["fx_errors"]) == (0, 0, 0)
    assert result["compiles_in_warmup"] >= 1
    assert Path(result["checkpoint"]).is_dir()
    assert result["leaders_machine"] == {"cores": len(os.sched_getaffinity(0)), "workers": len(result["workers"])}


def test_loading_and_warm_up_say_what_takes_so_long(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(make_config(tmp_path / "run", topology="1t+2d"))
    shown = capfd.readouterr().err
    wanted = ["loading target 1 of 1 on cpu", "building 2 drafters", "warming up drafter 1 of 2 on cpu (eager)",
              "warming up drafter 2 of 2 on cpu (eager)", "training"]  # fmt: skip
    places = [shown.index(text) for text in wanted]
    assert places == sorted(places)


def test_padding_is_not_counted_as_tokens(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", data={"path": tmp_path / "data", "validation_batches": 1}, optim={"steps": 2})
    write_synthetic(config, tmp_path / "data", lengths=[20, 21, 22, 23, 24, 25, 26])
    result = train(config)
    stream = PackedStream(examples_of(config, [20, 21, 22, 23, 24, 25, 26]), config.data, seed=3, pad_token_id=0)
    batches = [stream.batch(index) for index in range(8)]
    assert result["tokens"] == sum(batch.num_tokens for batch in batches)
    assert result["padding_tokens"] == sum(batch.num_padding_tokens for batch in batches) > 0


def test_every_skipped_example_is_listed_with_its_split(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", data={"path": tmp_path / "data", "validation_batches": 1}, optim={"steps": 1})
    made = examples_of(config, [20, 24, 28, 30])
    unsupervised = [type(e)(sample_id=f"none-{e.sample_id}", ids=e.ids, loss_mask=e.loss_mask & False) for e in made]
    splits = {"train": [*made[:3], unsupervised[0]], "heldout": [made[3], unsupervised[1]]}
    meta = Meta(target="random", vocab_size=512, mask_token_id=5, pad_token_id=0, eos_token_ids=(1,))
    write_examples(tmp_path / "data", splits, meta)
    train(config)
    listed = [json.loads(line) for line in (tmp_path / "run" / "skipped.jsonl").read_text().splitlines()]
    assert [(line["split"], line["sample_id"]) for line in listed] == [
        ("train", unsupervised[0].sample_id),
        ("heldout", unsupervised[1].sample_id),
    ]


def test_best_is_the_checkpoint_with_the_highest_held_out_acceptance(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", data={"path": tmp_path / "data"}, checkpoint={"every_steps": 1, "keep_last": 1})
    write_synthetic(config, tmp_path / "data", [20, 24, 28, 30])
    train(config)
    kept = checkpoint.list_complete(config.output)
    lines = [json.loads(line) for line in (config.output / "events.jsonl").read_text().splitlines()]
    scores = {line["fields"]["step"]: line["fields"]["metrics"]["score"] for line in lines if line["name"] == "checkpoint"}
    best = max(scores, key=lambda step: (scores[step], step))
    assert checkpoint.resolve(config.output, "best").name == checkpoint.step_name(best)
    assert set(kept) == {"step-000000", checkpoint.step_name(best), "step-000006"}


def test_data_of_another_vocabulary_or_mask_id_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", data={"path": tmp_path / "data"})
    write_synthetic(config, tmp_path / "data", [20, 24], vocab_size=300)
    with pytest.raises(DataError, match="vocabulary of 300"):
        train(config)
    other = make_config(tmp_path / "run2", data={"path": tmp_path / "data2"}, target={"mask_token_id": 7})
    write_synthetic(other, tmp_path / "data2", [20, 24])
    with pytest.raises(DataError, match="mask token id 5, the run uses 7"):
        train(other)


@pytest.mark.parametrize("unsettled", [0, 1])  # on a GPU a micro-batch is looked at when the next one is under way
def test_a_nan_names_the_samples_and_the_tensor_and_keeps_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unsettled: int
) -> None:
    config = make_config(tmp_path / "run", topology="1t+1d", checkpoint={"every_steps": 1})
    original = DrafterModelWorker.accumulate

    def poisoned(self: DrafterModelWorker, states: Any) -> None:
        self._most_unsettled = unsettled
        if states.batch.index == 11:  # the last one of its step
            states.features[0, 3, 1] = float("nan")
        original(self, states)

    monkeypatch.setattr(DrafterModelWorker, "accumulate", poisoned)
    with pytest.raises(WorkerFailed) as caught:
        train(config)
    assert isinstance(caught.value.__cause__, NonFiniteError)
    message = str(caught.value.__cause__)
    assert "micro-batch 11" in message
    assert "target features" in message
    assert "samples: synthetic-" in message
    assert checkpoint.list_complete(config.output)[-1] == "step-000002"


@pytest.mark.parametrize("name", ["layers.0.mlp.up_proj.weight", "hidden_norm.weight"])
def test_a_nan_weight_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    original = DrafterModelWorker.accumulate

    def poisoned(self: DrafterModelWorker, states: Any) -> None:
        if states.batch.index == 5:
            self.flat.named(self.flat.weights)[name].view(-1)[0] = float("nan")
        original(self, states)

    monkeypatch.setattr(DrafterModelWorker, "accumulate", poisoned)
    with pytest.raises(WorkerFailed, match=f"drafter weight {name}"):
        train(make_config(tmp_path / "run"))


def test_a_recompile_after_warm_up_fails_the_run_and_is_allowed_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiling = {"policy": "prewarm", "backend": "eager"}

    @torch.compile(backend="eager")
    def stray_function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    original = DrafterModelWorker.accumulate

    def with_stray(self: DrafterModelWorker, states: Any) -> None:
        original(self, states)
        if states.batch.index == 10:
            stray_function(torch.ones(3))

    monkeypatch.setattr(DrafterModelWorker, "accumulate", with_stray)
    with pytest.raises(WorkerFailed, match="stray_function"):
        train(make_config(tmp_path / "strict", compile=compiling))
    allowed = make_config(tmp_path / "allowed", compile=compiling | {"allow_recompiles": ("stray_function",)})
    assert train(allowed)["recompiles_after_warmup"] == 0
    torch._dynamo.reset()
    other = make_config(tmp_path / "other", compile=compiling | {"allow_recompiles": ("something_else",)})
    with pytest.raises(WorkerFailed, match=r"compiled after warm-up:\n- stray_function"):
        train(other)


def test_a_call_that_bypasses_the_compiled_graph_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = DrafterModelWorker.accumulate

    def bypassing(self: DrafterModelWorker, states: Any) -> None:
        if states.batch.index == 10:
            with torch.compiler.set_stance("force_eager"):
                original(self, states)
        else:
            original(self, states)

    monkeypatch.setattr(DrafterModelWorker, "accumulate", bypassing)
    with pytest.raises(WorkerFailed, match="ran no compiled graph"):
        train(make_config(tmp_path / "run", compile={"policy": "prewarm", "backend": "eager"}))


def test_a_leaked_trace_is_counted_as_an_fx_error(tmp_path: Path) -> None:
    from torch.fx import _symbolic_trace  # noqa: PLC0415 - only this test touches it

    before = _symbolic_trace.CURRENT_PATCHER
    _symbolic_trace.CURRENT_PATCHER = object()
    try:
        result = train(make_config(tmp_path / "run", optim={"steps": 1}))
    finally:
        _symbolic_trace.CURRENT_PATCHER = before
    assert result["fx_errors"] >= 1
    assert result["fx_error_messages"]


def test_a_topology_or_device_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    found = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=f"found {found}"):
        train(make_config(tmp_path / "a", devices=f"cuda:{found},cuda:{found}"))
    with pytest.raises(ConfigError, match="names 1 devices, topology 1t\\+1d has 2"):
        train(make_config(tmp_path / "b", devices="cpu:0"))
    with pytest.raises(ConfigError, match="not known to torch"):
        train(make_config(tmp_path / "c", devices="gpu:0,gpu:1"))
    with pytest.raises(ConfigError, match="at least 1t"):
        make_config(tmp_path / "d", topology="0t+1d")


def test_a_second_run_into_the_same_directory_needs_resume(tmp_path: Path) -> None:
    train(make_config(tmp_path / "run", optim={"steps": 1}))
    before = (tmp_path / "run" / "config.json").read_text()
    with pytest.raises(CheckpointError, match="use --resume"):
        train(make_config(tmp_path / "run", optim={"steps": 1}))
    with pytest.raises(CheckpointError, match="is finished: its last checkpoint is of step 1 of 1"):
        train(make_config(tmp_path / "run", resume=True, optim={"steps": 1}))
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 1
    (checkpoint.checkpoint_dir(tmp_path / "run") / "step-000001" / checkpoint.MARKER).unlink()
    with pytest.raises(CheckpointError, match=r"target\.seed 0, this run asks for 9"):
        train(make_config(tmp_path / "run", resume=True, optim={"steps": 1}, target={"seed": 9}))
    with pytest.raises(CheckpointError, match=r"data\.path"):
        train(make_config(tmp_path / "run", resume=True, optim={"steps": 1}, data={"path": Path("synthetic:20")}))
    with pytest.raises(CheckpointError, match=r"learning-rate 0.003, this run asks for 0.1"):
        train(make_config(tmp_path / "run", resume=True, optim={"steps": 1, "learning_rate": 0.1}))
    with pytest.raises(CheckpointError, match="block_size 4, this run asks for 5"):
        train(make_config(tmp_path / "run", resume=True, optim={"steps": 1}, drafter={"block_size": 5}))
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        train(make_config(tmp_path / "empty", resume=True))
    assert (tmp_path / "run" / "config.json").read_text() == before


def test_signal_handlers_threads_and_compile_state_are_restored(tmp_path: Path) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    limit, threads = torch._dynamo.config.recompile_limit, torch.get_num_threads()
    train(make_config(tmp_path / "run", compile={"policy": "prewarm", "backend": "eager"}))
    assert handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    assert (limit, threads) == (torch._dynamo.config.recompile_limit, torch.get_num_threads())
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2.0, 2.0]
    assert not [t for t in threading.enumerate() if t.name.startswith(("target", "drafter"))]


def write_config(config: RunConfig, path: Path) -> Path:
    path.write_text(json.dumps(to_dict(config)))
    return path


CHILD = """
import json, sys
from dflash.config import run_config_from_dict
from dflash.stopping import stop_on_signals
from dflash.trainer import train
result = train(run_config_from_dict(json.load(open(sys.argv[1]))))
print(json.dumps({"steps": result["steps"], "stopped_early": result["stopped_early"]}))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_exits_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    config = make_config(tmp_path / "run", optim={"steps": 100_000}, checkpoint={"every_steps": 50_000})
    arguments = [sys.executable, "-c", CHILD, str(write_config(config, tmp_path / "config.json"))]
    child = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        wait_for_steps(child, config.output / "events.jsonl")
        child.send_signal(number)
        output, errors = child.communicate()
    finally:
        child.kill()
    assert child.returncode == 0, errors
    result = json.loads(output.splitlines()[-1])
    assert result["stopped_early"]
    assert checkpoint.list_complete(config.output)[-1] == checkpoint.step_name(result["steps"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_step_interrupts_at_once(number: signal.Signals) -> None:
    with stop_on_signals() as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        stop.stepping = True
        signal.raise_signal(number)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)  # the second request, and by Ctrl-C


def test_an_interrupted_command_says_so_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: list[str]) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, "train", interrupted)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "error: interrupted; checkpoints that were saved are whole\n"


def test_killed_runs_resume_as_if_nothing_happened(tmp_path: Path) -> None:
    config = make_config(tmp_path / "killed", optim={"steps": 160}, checkpoint={"every_steps": 2, "keep_last": 3})
    arguments = [sys.executable, "-c", CHILD, str(write_config(config, tmp_path / "config.json"))]
    child = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        wait_for_steps(child, config.output / "events.jsonl")
    finally:
        child.kill()
        child.communicate()
    train(make_config(tmp_path / "killed", optim={"steps": 160}, checkpoint={"every_steps": 40, "keep_last": 3}, resume=True))
    train(make_config(tmp_path / "whole", optim={"steps": 160}, checkpoint={"every_steps": 40, "keep_last": 3}))
    assert same_bits(weights(tmp_path / "whole"), weights(tmp_path / "killed"))


def wait_for_steps(child: subprocess.Popen[str], log: Path, steps: int = 3) -> None:
    while not (log.exists() and log.read_text().count('"name": "step"') >= steps):
        if child.poll() is not None:
            raise AssertionError(child.communicate()[1])
        threading.Event().wait(0.05)


def test_events_reach_every_subscriber_and_stop_with_the_block() -> None:
    seen: list[str] = []
    with events.subscribed(lambda event: seen.append(event.name)):
        events.scalar("a", 1.0)
        with events.span("b"):
            pass
    events.scalar("c", 1.0)
    assert seen == ["a", "b"]
