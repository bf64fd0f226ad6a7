"""Laws of targets that several ranks hold together; the run is one of helpers_processes.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers_processes import Outcome, losses, weights
from helpers_training import make_config
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from dflash.config import ConfigError
from dflash.modeling.random_targets import RANDOM_TARGETS
from dflash.modeling.tensor_parallel import plan_of, split
from dflash.trainer import train


@pytest.mark.timeout(2700)  # whoever comes first waits for all runs in processes
def test_a_target_of_two_ranks_makes_the_states_of_a_whole_one(outcomes: dict[str, Outcome], tmp_path: Path) -> None:
    run = outcomes["teams"].run
    assert outcomes["teams"].codes == {}, outcomes["teams"].said()
    train(make_config(tmp_path / "whole"))
    assert losses(run) == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    for name, tensor in weights(run).items():
        torch.testing.assert_close(tensor, weights(tmp_path / "whole")[name], rtol=1e-3, atol=1e-4)
    workers = json.loads((run / "result.json").read_text())["workers"]
    assert [(each["worker"], each["items"]) for each in workers] == [("drafter-0", 24), ("target-0", 24), ("target-0.1", 24)]


def model(name: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(RANDOM_TARGETS[name]())


@pytest.fixture
def half() -> Iterator[dist.ProcessGroup]:
    """Seen from the second of two ranks, whose messages go nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_a_rank_keeps_its_part_of_what_the_plan_cuts(half: dist.ProcessGroup) -> None:
    whole = AutoModelForCausalLM.from_config(RANDOM_TARGETS["qwen3"]()).get_decoder()
    before = {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}
    split(whole, plan_of(model("qwen3"), 2), half, torch.device("cpu"))
    cut = {name: parameter for name, parameter in whole.named_parameters() if isinstance(parameter, DTensor)}
    assert {name.split(".")[-2] for name in cut} == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    for name, parameter in cut.items():
        dim = 1 if name.split(".")[-2] in ("o_proj", "down_proj") else 0
        assert torch.equal(parameter.to_local(), before[name].chunk(2, dim)[1])


def test_the_plan_cuts_the_matrices_of_the_layers_only() -> None:
    plan = plan_of(model("qwen3"), 2)
    assert set(plan.values()) == {"colwise", "rowwise"}
    assert {name.partition("*.")[2].partition(".")[0] for name in plan} == {"self_attn", "mlp"}


@pytest.mark.parametrize(
    ("name", "ways", "message"),
    [
        ("qwen3", 3, "does not divide the target's num_attention_heads 4"),
        ("qwen3", 4, "does not divide the target's num_key_value_heads 2"),
        ("qwen3_moe", 2, "'packed_colwise', which is not known here"),
        ("qwen3_5", 2, "which is not known here"),
    ],
)
def test_a_target_that_cannot_be_cut_is_refused(name: str, ways: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(model(name), ways)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "threads"}, "is for --engine processes"),
        ({"topology": "0t+1d", "data": {"features": Path("features")}}, "no target runs"),
        ({"compile": {"target": True, "policy": "prewarm"}}, "a target in parts is not compiled, leave --compile.target out"),
        ({"target": {"tensor_parallel": 0}}, "use at least 1"),
    ],
)
def test_what_cannot_work_with_it_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    base: dict[str, Any] = {"engine": "processes", "target": {"tensor_parallel": 2}}
    assert make_config(tmp_path, **base).target.tensor_parallel == 2
    with pytest.raises(ConfigError, match=message):
        make_config(tmp_path, **(base | changes))
