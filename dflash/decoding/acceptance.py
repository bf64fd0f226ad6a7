"""How many drafted tokens the target accepts: pure statistics over the rounds of speculative decoding, no torch.

A round is one draft and the one target forward that verifies it. It commits the accepted drafts and the target's own
next token (the bonus). A round cut short, by an end token among its accepted drafts or by the token limit, says
nothing about the draft positions after its cut: they are censored, neither accepted nor rejected.

Several quantities are called acceptance length in the literature; `TAU_DEFINITION` states ours (z-lab's and DDTree's
averaging: the mean over requests of the mean of a request). A request without rounds, because its first token ended
it, has no mean and takes no part in it. One difference to z-lab: a cut round counts with the tokens it committed, not
with those it would have committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TAU_DEFINITION = (
    "mean over requests of the mean number of tokens committed by a round, bonus included (at most the block size); a round "
    "cut by an end token or by the token limit counts with what it committed; the token of the prefill is not part of a round"
)


@dataclass(frozen=True)
class RoundStats:
    """One round. Filled by `dflash.decoding.chain`. Raises ValueError on numbers that no round can have."""

    drafted: int  # tokens proposed: B-1, or 0 in plain decoding
    accepted: int  # leading drafts that equal the target's tokens and were committed
    committed: int  # accepted + 1 (the bonus), or accepted if the round was cut
    truncated: bool  # cut by an end token among the drafts or by the token limit: no bonus, later positions are censored

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= self.drafted or self.committed < 1 or self.committed != self.accepted + (not self.truncated):
            raise ValueError(f"{self} is no round: expected 0 <= accepted <= drafted and committed = accepted + bonus >= 1")


Request = Sequence[RoundStats]


@dataclass(frozen=True)
class PositionAcceptance:
    """Draft position k (from 1): of the rounds that accepted k-1 drafts and were not cut there, how many accepted k."""

    position: int
    accepted: int
    tried: int

    @property
    def rate(self) -> float | None:
        """P(position k accepted | k-1 accepted); None where no round got that far."""
        return self.accepted / self.tried if self.tried else None


def tau_by_request(requests: Sequence[Request]) -> list[float]:
    """The mean number of tokens committed by a round, of each request that has rounds."""
    return [sum(r.committed for r in rounds) / len(rounds) for rounds in requests if rounds]


def tau(requests: Sequence[Request]) -> float | None:
    """τ as `TAU_DEFINITION` says; None if no request has a round."""
    means = tau_by_request(requests)
    return sum(means) / len(means) if means else None


def tau_sum(requests: Sequence[Request]) -> float | None:
    """Tokens committed by all rounds of all requests, divided by the number of rounds: long requests weigh more."""
    rounds = sum(map(len, requests))
    return sum(r.committed for request in requests for r in request) / rounds if rounds else None


def bootstrap_interval(
    values: Sequence[float], *, seed: int, confidence: float = 0.95, resamples: int = 10_000
) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the mean of independent `values` (one a request); None for fewer than two.

    Rounds of one request depend on each other, so requests are resampled, not rounds. Deterministic by `seed`. With few
    requests it is too narrow, as every percentile bootstrap: about 93 % instead of 95 % for 20 of them.
    """
    if len(values) < 2:
        return None
    sample = np.asarray(values, dtype=np.float64)
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed % 2**64)))
    rows = max(1, 4_000_000 // len(sample))  # resamples drawn at one time: 64 MB at most
    means = np.concatenate(
        [
            sample[generator.integers(0, len(sample), (min(rows, resamples - start), len(sample)))].mean(axis=1)
            for start in range(0, resamples, rows)
        ]
    )
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def acceptance_per_position(requests: Sequence[Request]) -> tuple[PositionAcceptance, ...]:
    """Conditional acceptance of draft positions 1..B-1; a cut round counts up to its cut."""
    rounds = [r for request in requests for r in request]
    positions = []
    for position in range(1, 1 + max((r.drafted for r in rounds), default=0)):
        accepted = sum(r.accepted >= position for r in rounds)
        rejected = sum(r.accepted == position - 1 and r.drafted >= position and not r.truncated for r in rounds)
        positions.append(PositionAcceptance(position, accepted, accepted + rejected))
    return tuple(positions)


def tokens_per_target_forward(tokens: int, forwards: int) -> float | None:
    """Tokens generated by a target forward, the prefill being a forward with one token; None without forwards."""
    return tokens / forwards if forwards else None
