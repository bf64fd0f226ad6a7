"""What an evaluation says: numbers from decoded prompts, as JSON values, and the table that shows them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from dflash.decoding import acceptance
from dflash.decoding.rounds import Generation, StageSeconds

SPEEDUP_DEFINITION = "seconds per token after the prefill, plain / speculative: same code, prompts and device, sums over prompts"
TOKENS_PER_FORWARD_DEFINITION = "all tokens / all target forwards, the prefill and its token included"


@dataclass(frozen=True)
class Result:
    """One decoded prompt."""

    sample_id: str
    speculative: Generation
    plain: Generation | None  # None without baseline


def summarise(results: Sequence[Result], *, seed: int) -> dict[str, Any]:
    """Acceptance, losslessness and times of decoded prompts; `seed` is the bootstrap's."""
    generations = [result.speculative for result in results]
    baselines = [result.plain for result in results if result.plain is not None]
    differing = [r.sample_id for r in results if r.plain is not None and r.plain.tokens != r.speculative.tokens]
    tokens, forwards = sum(len(g.tokens) for g in generations), sum(g.target_forwards for g in generations)
    return {
        "prompts": len(results),
        "tokens": tokens,
        **_acceptance([g.rounds for g in generations], seed),
        "target_forwards": {"prefill": len(results), "rounds": forwards - len(results)},
        "tokens_per_target_forward": acceptance.tokens_per_target_forward(tokens, forwards),
        "tokens_per_target_forward_definition": TOKENS_PER_FORWARD_DEFINITION,
        "lossless": not differing if baselines else None,
        "prompts_differing": differing if baselines else None,
        "speedup_over_plain": _ratio(_seconds_per_token(baselines), _seconds_per_token(generations)),
        "speedup_definition": SPEEDUP_DEFINITION,
        "seconds": {"speculative": _sum_seconds(generations), "plain": _sum_seconds(baselines) if baselines else None},
    }


def show(title: str, summary: dict[str, Any]) -> None:
    """Print the table on stderr; `summary` is a `summarise` with block_size, prompts_skipped and the total of seconds."""
    interval, differing = summary["tau_ci95"], summary["prompts_differing"]
    tau = _number(summary["tau"]) + (f"  [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")
    lossless = "not compared" if differing is None else f"no: {len(differing)} prompts differ" if differing else "yes"
    table = Table(title=title, show_header=False)
    for name, value in (
        ("prompts, skipped", f"{summary['prompts']}, {len(summary['prompts_skipped'])}"),
        ("tokens", str(summary["tokens"])),
        (f"τ of at most {summary['block_size']}  [95 %]", tau),
        ("committed / rounds", _number(summary["tau_sum"])),
        ("tokens per target forward", _number(summary["tokens_per_target_forward"])),
        ("acceptance by position", " ".join(_number(rate) for rate in summary["acceptance_per_position"])),
        ("speed-up over plain", _number(summary["speedup_over_plain"], "x")),
        ("tokens equal to plain", lossless),
        ("seconds", _number(summary["seconds"]["total"])),
    ):
        table.add_row(name, value)
    Console(stderr=True).print(table)


def _acceptance(requests: Sequence[acceptance.Request], seed: int) -> dict[str, Any]:
    positions = acceptance.acceptance_per_position(requests)
    interval = acceptance.bootstrap_interval(acceptance.tau_by_request(requests), seed=seed)
    return {
        "prompts_without_rounds": sum(not rounds for rounds in requests),
        "tau": acceptance.tau(requests),
        "tau_ci95": interval and list(interval),
        "tau_definition": acceptance.TAU_DEFINITION,
        "tau_sum": acceptance.tau_sum(requests),
        "acceptance_per_position": [position.rate for position in positions],
        "rounds_per_position": [position.tried for position in positions],
        "rounds": sum(map(len, requests)),
        "rounds_truncated": sum(r.truncated for rounds in requests for r in rounds),
    }


def _sum_seconds(generations: Sequence[Generation]) -> dict[str, float]:
    names = [field.name for field in dataclasses.fields(StageSeconds)]
    return {name: sum(getattr(generation.seconds, name) for generation in generations) for name in names}


def _seconds_per_token(generations: Sequence[Generation]) -> float | None:
    return _ratio(sum(g.seconds.decode for g in generations), sum(len(g.tokens) - 1 for g in generations))


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"
