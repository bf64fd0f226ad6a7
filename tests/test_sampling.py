"""Laws of choosing tokens by key."""

import numpy as np
import pytest
import torch
from scipy import stats

from dflash.decoding import sampling
from dflash.decoding.sampling import TokenChooser


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_choices_follow_the_tempered_distribution_and_never_have_probability_zero(temperature: float) -> None:
    """p**(1/T), normalised: the definition of a temperature without logits."""
    probabilities = np.array([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    choose = TokenChooser(temperature=temperature, seed=4, requests=[0, 1], count=10_000, device=torch.device("cpu"))
    logits = torch.from_numpy(probabilities).log()
    positions = torch.arange(10_000).expand(2, -1)
    counts = np.bincount(choose(logits.expand(2, 10_000, -1), positions).flatten().numpy(), minlength=6)
    assert counts[[0, 2, 5]].tolist() == [0, 0, 0]
    tempered = probabilities[[1, 3, 4]] ** (1 / temperature)
    assert stats.chisquare(counts[[1, 3, 4]], tempered / tempered.sum() * 20_000).pvalue > 1e-3


def test_random_numbers_belong_to_seed_request_and_position(monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens(positions: list[int], *, count: int = 60, seed: int = 1, requests: tuple[int, ...] = (2,)) -> list[list[int]]:
        choose = TokenChooser(temperature=1.0, seed=seed, requests=requests, count=count, device=torch.device("cpu"))
        asked = torch.tensor(positions).expand(len(requests), -1)
        chosen: list[list[int]] = choose(torch.zeros(*asked.shape, 1000), asked).tolist()
        return chosen

    everywhere = list(range(30))
    alone = tokens(everywhere)[0]
    assert tokens(everywhere, count=90)[0] == alone
    assert tokens([12, 10, 10])[0] == [alone[12], alone[10], alone[10]]
    assert tokens(everywhere, requests=(5, 2, 9))[1] == alone
    assert len({tuple(tokens(everywhere, seed=seed, requests=(request,))[0]) for seed in range(3) for request in range(3)}) == 9
    monkeypatch.setattr(sampling, "_PROBABILITIES", 4000)  # four rows at a time
    assert tokens(everywhere, requests=(5, 2, 9))[1] == alone


def test_requests_that_remain_keep_their_numbers() -> None:
    positions = torch.arange(20).expand(3, -1)
    choose = TokenChooser(temperature=1.0, seed=1, requests=[4, 5, 6], count=20, device=torch.device("cpu"))
    before = choose(torch.zeros(3, 20, 1000), positions)
    choose.keep_rows(torch.tensor([2, 0]))
    assert choose(torch.zeros(2, 20, 1000), positions[:2]).tolist() == before[[2, 0]].tolist()
