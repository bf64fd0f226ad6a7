"""How many drafted tokens the target accepts: pure statistics over the rounds of speculative decoding, no torch.

A round is one draft, a chain or a tree, and the one target forward that verifies it. It commits the accepted drafts and the
target's own next token (the bonus). A round cut short, by an end token among its accepted drafts or by the token limit, says
nothing about the draft positions after its cut: they are censored, neither accepted nor rejected. A tree that holds no
token at a position below its accepted path has rejected there: the target's token was not among its drafts.

Several quantities are called acceptance length in the literature; three are computed, each with its definition. `tau` has
z-lab's and DDTree's averaging, `tau_sum` that of servers' counters and DeepSpec, `tau_block` that of teacher-forced
evaluation. A request without rounds, because its first token ended it, takes no part. One difference to z-lab: a cut round
counts with the tokens it committed, not with those it would have committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

TAU_DEFINITION = (
    "mean over requests of the mean number of tokens committed by a round, bonus included (at most the block size); a round "
    "cut by an end token or by the token limit counts with what it committed; the token of the prefill is not part of a round"
)
TAU_SUM_DEFINITION = (
    "tokens committed by all rounds of all requests / number of these rounds: long requests weigh more; cut rounds as in tau"
)
TAU_BLOCK_DEFINITION = (
    "1 + sum over positions of the product of the conditional acceptance up to there, which is the mean over rounds of 1 + the "
    "accepted drafts; positions after the cut of a round are censored (Kaplan-Meier), so cut rounds do not lower it"
)


@dataclass(frozen=True)
class RoundStats:
    """One round. Filled by `dflash.decoding.rounds`. Raises ValueError on numbers that no round can have."""

    drafted: int  # positions with drafts: B-1 for chains and trees, 0 in plain decoding
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


def tau_block(requests: Sequence[Request]) -> float | None:
    """τ as `TAU_BLOCK_DEFINITION` says; None without a round. A position that no round reached adds nothing."""
    counts = _counts([rounds for rounds in requests if rounds])
    return float(_block_mean(counts.sum(axis=0, keepdims=True))[0]) if len(counts) else None


@dataclass(frozen=True)
class Estimate:
    """One acceptance length with its 95 % bootstrap interval over requests, as `bootstrap_interval` says."""

    value: float | None
    interval: tuple[float, float] | None
    definition: str


def estimates(requests: Sequence[Request], *, seed: int) -> dict[str, Estimate]:
    """The acceptance lengths by name: tau, tau_sum, tau_block. The intervals come from the same resampled requests."""
    decoded = [rounds for rounds in requests if rounds]
    sums = np.array([[sum(r.committed for r in rounds), len(rounds)] for rounds in decoded], dtype=np.float64)
    return {
        "tau": Estimate(tau(decoded), bootstrap_interval(tau_by_request(decoded), seed=seed), TAU_DEFINITION),
        "tau_sum": Estimate(tau_sum(decoded), bootstrap(sums, lambda s: s[:, 0] / s[:, 1], seed=seed), TAU_SUM_DEFINITION),
        "tau_block": Estimate(tau_block(decoded), bootstrap(_counts(decoded), _block_mean, seed=seed), TAU_BLOCK_DEFINITION),
    }


def bootstrap_interval(
    values: Sequence[float], *, seed: int, confidence: float = 0.95, resamples: int = 10_000
) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the mean of independent `values` (one a request); None for fewer than two.

    Rounds of one request depend on each other, so requests are resampled, not rounds. Deterministic by `seed`. With few
    requests it is too narrow, as every percentile bootstrap: about 93 % instead of 95 % for 20 of them.
    """
    table = np.asarray(values, dtype=np.float64)[:, None]
    return bootstrap(table, lambda sums: sums[:, 0] / len(values), seed=seed, confidence=confidence, resamples=resamples)


def bootstrap(
    table: Floats, statistic: Callable[[Floats], Floats], *, seed: int, confidence: float = 0.95, resamples: int = 10_000
) -> tuple[float, float] | None:
    """As `bootstrap_interval`, of a statistic of column sums: `table` [requests, C]; `statistic` maps sums [S, C] to [S]."""
    requests = len(table)
    if requests < 2:
        return None
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed % 2**64)))
    rows = max(1, 4_000_000 // requests)  # resamples drawn at one time: 64 MB at most
    even = np.full(requests, 1 / requests)
    found = [
        statistic(generator.multinomial(requests, even, size=min(rows, resamples - start)) @ table)
        for start in range(0, resamples, rows)
    ]
    low, high = np.quantile(np.concatenate(found), [(1 - confidence) / 2, (1 + confidence) / 2])
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


def _counts(requests: Sequence[Request]) -> Floats:
    """[requests, 2 * (B-1)]: accepted at each position, then tried at each, of every request."""
    width = max((r.drafted for rounds in requests for r in rounds), default=0)
    table = np.zeros((len(requests), 2, width))
    for row, rounds in enumerate(requests):
        for position in acceptance_per_position([rounds]):
            table[row, :, position.position - 1] = position.accepted, position.tried
    return table.reshape(len(requests), 2 * width)


def _block_mean(sums: Floats) -> Floats:
    """`TAU_BLOCK_DEFINITION` from the sums [S, 2 * (B-1)] of `_counts` over requests."""
    accepted, tried = np.split(sums, 2, axis=1)
    rates = np.divide(accepted, tried, out=np.zeros_like(accepted), where=tried > 0)
    mean: Floats = 1 + rates.cumprod(axis=1).sum(axis=1)
    return mean
