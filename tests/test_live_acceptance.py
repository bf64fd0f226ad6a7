"""Laws of the acceptance that is told while training: it is that of the blocks, of the decoding, and their gap is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_training import make_config, write_synthetic
from modeling_batches import packed_batch, random_tensor
from torch import nn

from dflash.command_config import EvaluateConfig
from dflash.config import ConfigError, LossConfig, RunConfig
from dflash.decoding.evaluate import evaluate
from dflash.live_acceptance import foretold, gap_alarm
from dflash.modeling.draft_collector import DraftCollector
from dflash.modeling.ends import FrozenEnds
from dflash.modeling.loss import block_labels, draft_loss
from dflash.modeling.tree_estimate import DraftCounts, count_drafts, top_marginals
from dflash.trainer import train
from dflash.worker import DrafterModelWorker

HIDDEN, VOCABULARY, BLOCK = 8, 40, 4
OFTEN = {"estimate_every_steps": 2, "estimate_blocks": 5, "budgets": (1, 6)}


def events_of(run: Path, name: str) -> list[dict[str, Any]]:
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event["fields"] for event in events if event["name"] == name]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A run on prepared data that decodes after its last step."""
    acceptance = {**OFTEN, "decode_every_steps": 3, "decode_prompts": 2, "decode_tokens": 7}
    data = {"path": tmp_path / "data", "validation_batches": 1}
    config = make_config(tmp_path / "run", data=data, acceptance=acceptance, optim={"steps": 3})
    write_synthetic(config, tmp_path / "data", [20, 24, 28, 30])
    return config


@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
@pytest.mark.parametrize(("wanted", "chosen"), [(100, [0, 1, 2, 3, 4, 5]), (6, [0, 1, 2, 3, 4, 5]), (3, [1, 3, 5]), (2, [1, 4])])
def test_the_counts_are_those_of_evenly_spread_blocks_however_the_head_is_cut(
    chunk_tokens: int, wanted: int, chosen: list[int]
) -> None:
    batch = packed_batch(
        [[12, 8], [20]], length=20, anchors=[[1, 4, 13], [2, 9, 16]], num_anchors=3, seed=1, vocabulary=VOCABULARY
    )
    ends = FrozenEnds(nn.Embedding(VOCABULARY, HIDDEN), random_tensor(VOCABULARY, HIDDEN, seed=3), None)
    labels, supervised = (part.flatten(0, 1) for part in block_labels(batch, BLOCK))
    hidden = random_tensor(6, BLOCK, HIDDEN, seed=5)
    known = torch.rand(6, BLOCK - 1, generator=torch.Generator().manual_seed(wanted)) < 0.7
    hidden[:, 1:][known] = 9 * ends.head_weight[labels[known]]
    hidden = hidden.view(2, 3 * BLOCK, HIDDEN).requires_grad_()
    collector = DraftCollector(budget=9, blocks=wanted)
    draft_loss(hidden, ends, batch, LossConfig(chunk_tokens=chunk_tokens), BLOCK, collector=collector)
    logits = ends.logits(hidden.detach()).view(6, BLOCK, VOCABULARY)[:, 1:]
    expected = count_drafts(*top_marginals(logits[chosen], 9), labels[chosen], supervised[chosen], 9)
    assert collector.counts is not None
    for name, tensor in vars(expected).items():
        assert torch.equal(vars(collector.counts)[name], tensor), name
    assert int(expected.chain_tried[0]) > 0


def test_a_collector_changes_neither_loss_nor_gradient() -> None:
    batch = packed_batch([[20]], length=20, anchors=[[1, 4, 13]], num_anchors=3, seed=1, vocabulary=VOCABULARY)
    ends = FrozenEnds(nn.Embedding(VOCABULARY, HIDDEN), random_tensor(VOCABULARY, HIDDEN, seed=3), None)
    results = []
    for collector in (None, DraftCollector(budget=9, blocks=2)):
        hidden = random_tensor(1, 3 * BLOCK, HIDDEN, seed=5).requires_grad_()
        sums = draft_loss(hidden, ends, batch, LossConfig(), BLOCK, collector=collector)
        sums.loss.backward()
        results.append((sums.loss.detach(), hidden.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_the_estimate_does_not_depend_on_the_number_of_drafters_and_comes_when_it_is_due(tmp_path: Path) -> None:
    told = []
    for topology in ("1t+1d", "1t+2d"):
        run = tmp_path / topology
        result = train(make_config(run, topology=topology, acceptance=OFTEN, optim={"steps": 5}))
        told.append(events_of(run, "acceptance"))
        assert result["acceptance"] == {"estimate": {k: v for k, v in told[-1][-1].items() if k != "kind"}, "alarms": 0}
    assert told[0] == told[1]
    assert [(one["kind"], one["step"], list(one["trees"])) for one in told[0]] == [
        ("estimate", 2, ["1", "6"]),
        ("estimate", 4, ["1", "6"]),
    ]


def test_what_is_decoded_while_training_is_what_evaluate_decodes_afterwards(config: RunConfig) -> None:
    result = train(config)
    (decoded,) = [event for event in events_of(config.output, "acceptance") if event["kind"] == "decode"]
    options = {"checkpoint": "last", "max_prompts": 2, "max_new_tokens": 7, "baseline": False}
    evaluated = evaluate(EvaluateConfig(run=config.output, **options))  # type: ignore[arg-type]
    assert (decoded["tau"], decoded["rounds"]) == (evaluated["tau"], evaluated["rounds"])
    assert decoded["gap"] == decoded["foretold"] - decoded["tau"]
    assert result["acceptance"]["decode"]["tau"] == decoded["tau"]
    assert result["seconds"]["decoding"] > 0


def test_a_drafter_that_trains_well_and_decodes_badly_is_an_alarm(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    ones, table = torch.ones(BLOCK - 1, dtype=torch.int64), torch.ones(BLOCK - 1, 8, dtype=torch.int64)
    perfect = DraftCounts(chain_tried=ones, chain_accepted=ones, tree_tried=table, tree_accepted=table)
    monkeypatch.setattr(DrafterModelWorker, "estimate", lambda _self, _states: perfect)
    result = train(config)
    assert result["acceptance"]["alarms"] == 1
    (alarm,) = [event["text"] for event in events_of(config.output, "notice") if "ALARM" in event["text"]]
    assert "after step 3: held-out blocks foretell an acceptance length of 4.00, decoding gives 1." in alarm
    assert foretold(perfect, [1])["chain"] == BLOCK


@pytest.mark.parametrize(
    ("expected", "upper", "alarm"),
    [(3.0, 1.9, True), (3.0, 2.1, False), (1.4, 1.0, False), (None, 1.0, False), (3.0, None, False), (1.5, 1.2, True)],
)
def test_an_alarm_asks_for_less_than_half_of_the_foretold_drafts(
    expected: float | None, upper: float | None, alarm: bool
) -> None:
    assert gap_alarm(expected, upper) is alarm


def test_without_prompts_it_is_said_that_nothing_will_be_decoded(tmp_path: Path) -> None:
    result = train(make_config(tmp_path, acceptance={"decode_every_steps": 1}, optim={"steps": 1}))
    assert any("synthetic data has no prompts" in event["text"] for event in events_of(tmp_path, "notice"))
    assert result["acceptance"] == {"alarms": 0}


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ConfigError, match=r"acceptance.decode-every-steps is negative: use 0 for never"):
        make_config(Path("run"), acceptance={"decode_every_steps": -1})
    with pytest.raises(ConfigError, match=r"acceptance.estimate-blocks is 0: use at least 1"):
        make_config(Path("run"), acceptance={"estimate_blocks": 0})
