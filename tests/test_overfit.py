from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers_training import make_config

from dflash import checkpoint
from dflash.batch import Example
from dflash.data.examples import Meta, write_examples
from dflash.decoding.chain import plain, speculate
from dflash.modeling.target import FrozenEnds, load_target
from dflash.trainer import train

PROMPT = [17, 301, 44, 9, 120, 77, 250, 33]
NEW_TOKENS = 37  # the prefill's token and nine whole blocks of four
# The greedy answers of random weights are loops; sampling is keyed by the position, so plain and speculative tokens agree.
DECODING: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "eos_ids": (), "seed": 0, "request": 0}


def test_overfitting_one_conversation_makes_every_block_fully_accepted(tmp_path: Path) -> None:
    config = make_config(
        tmp_path / "run",
        data={"path": tmp_path / "data", "sequence_length": 48, "rows_per_batch": 1, "num_anchors": 40, "validation_batches": 0},
        drafter={"num_layers": 2},
        optim={"steps": 150, "batches_per_step": 1, "learning_rate": 1e-2},
        checkpoint={"every_steps": 1000},
    )
    model, _ = load_target(config.target, device="cpu")
    answer = plain(model, PROMPT, **DECODING).tokens
    assert len(set(answer)) > NEW_TOKENS // 2, "a loop would be learned without looking at the context"
    ids = np.array([*PROMPT, *answer], dtype=np.int32)
    example = Example(sample_id="only", ids=ids, loss_mask=np.arange(len(ids)) >= len(PROMPT))
    meta = Meta(target="random", vocab_size=512, mask_token_id=5, pad_token_id=0, eos_token_ids=())
    write_examples(tmp_path / "data", {"train": [example], "heldout": []}, meta)
    train(config)
    ends = FrozenEnds.from_model(model, torch.device("cpu"), torch.float32)
    acceptance = {}
    for name in ("step-000000", "last"):
        drafter, _, _ = checkpoint.load_drafter(config.output, name, torch.device("cpu"))
        generation = speculate(model, ends, drafter, PROMPT, **DECODING)
        assert generation.tokens == answer
        acceptance[name] = [round_.committed for round_ in generation.rounds]
    assert acceptance["last"] == [4] * 9
    assert np.mean(acceptance["step-000000"]) < 2
