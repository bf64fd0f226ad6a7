"""Laws of choosing tokens by key."""

import numpy as np
import pytest
import torch
from scipy import stats

from dflash.decoding.sampling import TokenChooser


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_choices_follow_the_tempered_distribution_and_never_have_probability_zero(temperature: float) -> None:
    """p**(1/T), normalised: the definition of a temperature without logits."""
    probabilities = np.array([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    choose = TokenChooser(temperature=temperature, seed=4, request=0, count=20_000, device=torch.device("cpu"))
    logits = torch.from_numpy(probabilities).log()
    counts = np.bincount(choose(logits.expand(20_000, -1), 0).numpy(), minlength=6)
    assert counts[[0, 2, 5]].tolist() == [0, 0, 0]
    tempered = probabilities[[1, 3, 4]] ** (1 / temperature)
    assert stats.chisquare(counts[[1, 3, 4]], tempered / tempered.sum() * 20_000).pvalue > 1e-3


def test_random_numbers_belong_to_seed_request_and_position() -> None:
    def tokens(first: int = 0, length: int = 30, **key: int) -> list[int]:
        choose = TokenChooser(temperature=1.0, **({"seed": 1, "request": 2, "count": 60} | key), device=torch.device("cpu"))
        chosen: list[int] = choose(torch.zeros(length, 1000), first).tolist()
        return chosen

    assert tokens() == tokens(count=90)
    assert tokens(first=10, length=5) == tokens()[10:15]
    assert len({tuple(tokens(seed=seed, request=request)) for seed in range(3) for request in range(3)}) == 9
