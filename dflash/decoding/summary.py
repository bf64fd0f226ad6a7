"""What an evaluation says: numbers from decoded prompts, as JSON values, and the table that shows them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dflash.decoding import acceptance
from dflash.decoding.rounds import Generation, StageSeconds

SPEEDUP_DEFINITION = "seconds per token after the prefill, plain / speculative: same code, prompts and device, sums over prompts"
TOKENS_PER_FORWARD_DEFINITION = (
    "all tokens / all target forwards, the prefill and its token included; a forward over several prompts counts once for each"
)


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
    named = [result.sample_id for result in results if result.speculative.rounds]
    tokens, forwards = sum(len(g.tokens) for g in generations), sum(g.target_forwards for g in generations)
    return {
        "prompts": len(results),
        "tokens": tokens,
        **_acceptance([g.rounds for g in generations], seed),
        "tau_by_prompt": dict(zip(named, acceptance.tau_by_request([r.speculative.rounds for r in results]), strict=True)),
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
    """Print the table on stderr; `summary` is a `summarise` with block_size, prompts_skipped, trees and the total of seconds."""
    parts = [summary, *summary["trees"]]
    table = Table(title=title)
    for name in (
        f"{summary['prompts']} prompts, {len(summary['prompts_skipped'])} skipped",
        "chain",
        *(f"tree of {part['budget']}" for part in summary["trees"]),
    ):
        table.add_column(name)
    for name, values in (
        ("tokens", [str(part["tokens"]) for part in parts]),
        (f"τ of at most {summary['block_size']}  \\[95 %]", [_interval(part, "tau") for part in parts]),
        *([("τ less the other's, by prompt", [_less(part) for part in _against(summary)])] if "against" in summary else []),
        ("committed / rounds", [_interval(part, "tau_sum") for part in parts]),
        ("τ by block", [_interval(part, "tau_block") for part in parts]),
        ("tokens per target forward", [_number(part["tokens_per_target_forward"]) for part in parts]),
        ("acceptance by position", [" ".join(map(_number, part["acceptance_per_position"])) for part in parts]),
        ("speed-up over plain", [_number(part["speedup_over_plain"], "x") for part in parts]),
        ("tokens equal to plain", [_lossless(part["prompts_differing"]) for part in parts]),
        ("ms a round: draft", [_milliseconds(part, "draft") for part in parts]),
        ("build", [_milliseconds(part, "build") for part in parts]),
        ("verify", [_milliseconds(part, "verify") for part in parts]),
        ("commit", [_milliseconds(part, "commit") for part in parts]),
    ):
        table.add_row(name, *values)
    table.caption = f"{_number(summary['seconds']['total'])} s in all"
    if caution := summary.get("against", {}).get("caution"):
        table.caption += f"; {escape(caution)}"
    Console(stderr=True).print(table)


def _interval(part: dict[str, Any], name: str) -> str:
    interval = part[f"{name}_ci95"]
    return _number(part[name]) + (f"  \\[{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def _against(summary: dict[str, Any]) -> list[dict[str, Any] | None]:
    trees = {tree["budget"]: tree for tree in summary["against"]["trees"]}
    return [summary["against"], *(trees.get(tree["budget"]) for tree in summary["trees"])]


def _less(difference: dict[str, Any] | None) -> str:
    if difference is None or difference["tau_difference_ci95"] is None:
        return "-"
    low, high = difference["tau_difference_ci95"]
    return f"{difference['tau_difference']:+.2f}  \\[{low:+.2f}, {high:+.2f}]"


def _lossless(differing: list[str] | None) -> str:
    return "not compared" if differing is None else f"no: {len(differing)} prompts differ" if differing else "yes"


def _milliseconds(part: dict[str, Any], stage: str) -> str:
    seconds = _ratio(part["seconds"]["speculative"][stage], part["rounds"])
    return _number(None if seconds is None else 1e3 * seconds)


def _acceptance(requests: Sequence[acceptance.Request], seed: int) -> dict[str, Any]:
    positions = acceptance.acceptance_per_position(requests)
    lengths: dict[str, Any] = {}
    for name, estimate in acceptance.estimates(requests, seed=seed).items():
        lengths[name] = estimate.value
        lengths[f"{name}_ci95"] = estimate.interval and list(estimate.interval)
        lengths[f"{name}_definition"] = estimate.definition
    return {
        "prompts_without_rounds": sum(not rounds for rounds in requests),
        **lengths,
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
