"""One run in processes that meets a fault in every life but the last: each is named, none costs a sample or a bit.

Its lives, in helpers_processes.py: a target killed between the header and the tensors of a send, a disk that is full while
rank 0 saves step 4, a checkpoint of step 5 that is damaged after it was saved, a target whose connections are all shut down, and
a target that is slow.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from helpers_processes import STEPS, Outcome, interrupted, losses, same_bits, steps_of

from dflash import checkpoint
from dflash.trainer import train

pytestmark = pytest.mark.timeout(2700)  # whoever comes first waits for all runs in processes


@pytest.fixture(scope="module")
def faulty(outcomes: dict[str, Outcome]) -> Outcome:
    return outcomes["faulty"]


def test_a_run_with_a_fault_in_every_life_equals_one_without(faulty: Outcome, tmp_path: Path) -> None:
    assert faulty.codes == {}, faulty.said()
    train(interrupted(tmp_path / "whole"))
    assert same_bits(faulty.run, tmp_path / "whole")
    assert losses(faulty.run) == losses(tmp_path / "whole")
    seen = [sample for _, fields in sorted(steps_of(faulty.run).items()) for sample in fields["sample_ids"]]
    for epoch in range(len(seen) // 16):
        assert Counter(seen[epoch * 16 : (epoch + 1) * 16]) == Counter(f"synthetic-{n}" for n in range(16))


def test_a_rank_that_dies_in_the_middle_of_a_send_is_named(faulty: Outcome) -> None:
    (error,) = faulty.errors(0)
    assert "rank 2 (target-0, process " in error
    assert "waiting for a micro-batch before" in error or "adding up the gradients" in error  # where the one that noticed it was
    assert checkpoint.step_name(1) in str(sorted(faulty.run.glob("checkpoints/*")))


def test_a_full_disk_is_told_and_leaves_no_half_checkpoint(faulty: Outcome) -> None:
    (error,) = faulty.errors(1)
    assert "rank 0 (drafter-0, process " in error
    assert f"cannot write checkpoint {faulty.run / 'checkpoints' / 'step-000004'}" in error
    assert "File too large" in error  # what the kernel says where a file may not grow
    assert "free disk space" in error
    assert "it was at: saving step 4" in error
    assert "resumed after step 3" in faulty.said(2)
    assert [path.name for path in faulty.run.glob("checkpoints/.*")] == []


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(faulty: Outcome) -> None:
    said = faulty.said(3)
    assert "set aside as damaged-step-000005, going on from an earlier one: " in said
    assert "drafter.safetensors does not match its marker: it was changed" in said
    assert "resumed after step 4" in said
    assert (faulty.run / "checkpoints" / "damaged-step-000005").is_dir()
    assert checkpoint.list_complete(faulty.run) == [checkpoint.step_name(step) for step in range(STEPS + 1)]


def test_a_rank_that_has_lost_its_network_is_named_and_ends_itself(faulty: Outcome) -> None:
    named, own = sorted(faulty.errors(3), key=lambda text: "cannot reach torchrun's store" in text)
    assert "rank 2 (target-0, process " in named
    assert "has left (lost the connection to rank 2" in named
    assert "rank 2 (target-0, process " in own
    assert "cannot reach torchrun's store" in own
    assert "it was at: target states of micro-batch 17" in own


def test_a_slow_rank_lives_and_is_named_as_the_one_that_all_wait_for(faulty: Outcome) -> None:
    lines = [json.loads(line) for line in (faulty.run / "events.jsonl").read_text().splitlines()]
    waits = [line["fields"] for line in lines if line["name"] == "waits"]
    assert {one["waited_for"] for one in waits[-2:]} == {"rank 2 (target-0)"}
    assert min(waits[-1]["waiting"]["rank 0 (drafter-0)"], waits[-1]["waiting"]["rank 1 (drafter-1)"]) > 0.5
    assert waits[-1]["waiting"]["rank 2 (target-0)"] < 0.2
    assert faulty.errors(4) == []
    assert "all wait for rank 2 (target-0), which waits" in faulty.said(4)
