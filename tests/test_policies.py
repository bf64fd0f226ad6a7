"""Training under every compile policy, from nothing compiled, with several target and drafter threads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_training import make_config

from dflash import checkpoint
from dflash.fx import seams
from dflash.trainer import train

PROTECTED = ("prewarm", "isolate", "lock", "force")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any], list[str]]]:
    """Directory, result, and what tracing left behind, of one short training under each policy."""
    made = {}
    for policy in (*PROTECTED, "eager"):
        torch._dynamo.reset()
        directory = tmp_path_factory.mktemp(policy) / "run"
        changes = {"optim": {"steps": 3}, "compile": {"policy": policy, "backend": "aot_eager"}}
        result = train(make_config(directory, topology="2t+2d", **changes))
        made[policy] = (directory, result, seams.leaks(seams.tracing_state()))
    return made


@pytest.mark.parametrize("policy", PROTECTED)
def test_every_call_runs_compiled_and_nothing_compiles_late_or_is_left_behind(policy: str, runs: dict[str, Any]) -> None:
    directory, result, left = runs[policy]
    assert (result["recompiles_after_warmup"], result["fallbacks"], result["graph_breaks"], result["fx_errors"]) == (0, 0, 0, 0)
    assert result["graph_runs"] >= 3 * 4
    assert result["compiles_in_warmup"] >= 1
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    warmed = [event for event in events if event["name"] == "phase" and event["fields"]["text"].startswith("warming up")]
    assert len(warmed) == (2 if policy == "prewarm" else 0)
    assert left == []


def test_the_policy_does_not_change_what_is_learned(runs: dict[str, Any]) -> None:
    weights = {policy: checkpoint.load(checkpoint.resolve(run[0], "last")).weights for policy, run in runs.items()}
    for name, value in weights["prewarm"].items():
        for policy in PROTECTED:
            assert torch.equal(value, weights[policy][name]), (policy, name)
        torch.testing.assert_close(value, weights["eager"][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("policy", ["prewarm", "isolate", "lock"])
def test_drafters_of_one_device_share_compiled_code(policy: str, runs: dict[str, Any]) -> None:
    assert runs[policy][1]["compiles_in_warmup"] == 1
