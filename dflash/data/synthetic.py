"""Random token ids as examples, for measuring throughput with targets of random weights: `--data.path synthetic:COUNT`.

Nothing can be learned from them. Lengths fill whole rows, half of each document is supervised.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dflash.batch import Example
from dflash.config import ConfigError, DataConfig

SYNTHETIC_PREFIX = "synthetic:"


def is_synthetic(path: Path) -> bool:
    """Whether a data path asks for random token ids."""
    return str(path).startswith(SYNTHETIC_PREFIX)


def synthetic_examples(path: Path, config: DataConfig, *, vocab_size: int, seed: int) -> list[Example]:
    """COUNT documents of S tokens each. Raises ConfigError when COUNT is not a positive number."""
    count = str(path).removeprefix(SYNTHETIC_PREFIX)
    if not count.isdigit() or int(count) < 1:
        raise ConfigError(
            f"data.path {str(path)!r} asks for random tokens: write {SYNTHETIC_PREFIX}COUNT, for example synthetic:64"
        )
    length = config.sequence_length
    mask = np.arange(length) >= length // 2
    examples = []
    for number in range(int(count)):
        generator = np.random.Generator(np.random.Philox(key=[seed, number]))
        ids = generator.integers(0, vocab_size, length, dtype=np.int32)
        examples.append(Example(sample_id=f"synthetic-{number}", ids=ids, loss_mask=mask))
    return examples
