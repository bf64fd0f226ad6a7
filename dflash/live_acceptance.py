"""Acceptance while training: what training blocks foretell, what decoding really gives, and an alarm where the two part.

Every `estimate_every_steps` steps, blocks of the step's micro-batches foretell the acceptance length of the chain and of trees
(`dflash.modeling.tree_estimate`). Every `decode_every_steps` steps a few held-out prompts are decoded speculatively with a whole
target of its own, and the same is foretold from held-out blocks. A drafter that trains well and decodes badly is the usual
sign of training that differs from serving (labels, features, positions, mask, template): see `python -m dflash check`.

The foretold length is higher than the decoded one also in health: its anchors are anywhere, while decoding starts a block where
the drafter has just failed. So the alarm asks for a large gap: `gap_alarm`.

Known limits: decoding runs in the leading drafter's thread between two steps, greedy and with a chain; the drafter keeps its
training dtype. Its target takes the memory of another copy of the whole model.

Legend: see dflash/modeling/tree_estimate.py.
"""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash import events
from dflash.batch import TargetStates
from dflash.command_config import EvaluateConfig
from dflash.config import RunConfig
from dflash.data.examples import load_examples, load_meta
from dflash.data.synthetic import is_synthetic
from dflash.decoding import acceptance
from dflash.decoding.evaluate import select_prompts
from dflash.decoding.rounds import Drafting, Wanted, decode
from dflash.decoding.target_session import check_croppable
from dflash.modeling.target import FrozenEnds, load_target, text_config
from dflash.modeling.tree_estimate import DraftCounts
from dflash.worker import Contribution, DrafterModelWorker

ALARM_SHARE = 0.5  # of the drafts that were foretold to be accepted; fewer in decoding are an alarm
ALARM_FROM = 1.5  # foretold acceptance length below which nothing can be said


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """What is decoded, and with which target."""

    model: Any
    ends: FrozenEnds
    ids: list[list[int]]
    wanted: Wanted


class LiveAcceptance:
    """The estimates and the decoding of one run; its methods run in the leading drafter's thread between two steps."""

    def __init__(self, config: RunConfig, leader: DrafterModelWorker) -> None:
        """Loads the target that decodes, if any. Raises ConfigError for one whose cache cannot be cropped."""
        self._config, self._leader = config.acceptance, leader
        self._prompts = _load(config, leader) if self._config.decode_every_steps and not config.measure.on else None
        self.seconds = 0.0  # of decoding, loading left out
        self._last: dict[str, Any] = {}
        self._alarms = 0

    def result(self) -> dict[str, Any]:
        """The last figures of each kind, and the number of alarms."""
        return {**self._last, "alarms": self._alarms}

    def after_step(self, step: int, parts: Sequence[Contribution], heldout: Sequence[TargetStates]) -> float:
        """Report what is due after `step` steps; returns the seconds that decoding took."""
        counts = [part.drafts for part in parts if part.drafts is not None]
        if counts:
            self._record("estimate", {"step": step, **foretold(_sum(counts), self._config.budgets)})
        if self._prompts is None or step % self._config.decode_every_steps:
            return 0.0
        started = time.perf_counter()
        self._decode(step, self._prompts, heldout)
        seconds = time.perf_counter() - started
        self.seconds += seconds
        return seconds

    def _decode(self, step: int, prompts: Prompts, heldout: Sequence[TargetStates]) -> None:
        estimate = foretold(_sum([self._leader.estimate(states) for states in heldout]), self._config.budgets) if heldout else {}
        drafting = Drafting(drafter=self._leader.drafter, ends=prompts.ends)
        requests = [done.rounds for done in decode(prompts.model, prompts.ids, prompts.wanted, drafting=drafting)]
        tau = acceptance.tau(requests)
        interval = acceptance.bootstrap_interval(acceptance.tau_by_request(requests), seed=step)
        chain = estimate.get("chain")
        alarm = gap_alarm(chain, interval[1] if interval else tau)
        gap = chain - tau if chain is not None and tau is not None else None
        ci = interval and list(interval)
        fields = {"step": step, "rounds": sum(map(len, requests)), "tau": tau, "tau_ci95": ci}
        self._record("decode", {**fields, "foretold": chain, "gap": gap, "alarm": alarm})
        if alarm:
            self._alarms += 1
            events.record(
                "notice",
                text=f"ALARM after step {step}: held-out blocks foretell an acceptance length of {chain:.2f}, decoding gives "
                f"{tau:.2f}: training differs from serving; see python -m dflash check",
            )

    def _record(self, kind: str, values: dict[str, Any]) -> None:
        self._last[kind] = values
        events.record("acceptance", kind=kind, **values)


def foretold(counts: DraftCounts, budgets: Sequence[int]) -> dict[str, Any]:
    """Acceptance lengths, bonus included: of the chain, and of trees by their budget; None without a supervised block."""
    return {"chain": counts.chain_tau(), "trees": dict(zip(map(str, budgets), counts.tree_tau(budgets), strict=True))}


def gap_alarm(foretold_tau: float | None, decoded_tau: float | None) -> bool:
    """Whether decoding accepts less than ALARM_SHARE of the drafts that were foretold.

    `decoded_tau` is the upper end of an interval: an alarm means that chance does not explain it.
    """
    if foretold_tau is None or decoded_tau is None or foretold_tau < ALARM_FROM:
        return False
    return decoded_tau - 1 < ALARM_SHARE * (foretold_tau - 1)


def _sum(counts: Sequence[DraftCounts]) -> DraftCounts:
    return functools.reduce(operator.add, [each.to("cpu") for each in counts])


def _load(config: RunConfig, leader: DrafterModelWorker) -> Prompts | None:
    if is_synthetic(config.data.path):
        events.record("notice", text="acceptance.decode-every-steps: synthetic data has no prompts, nothing will be decoded")
        return None
    path, wanted = Path(config.data.path), config.acceptance
    events.record("phase", text=f"loading the target that decodes while training on {leader.device}")
    model, _ = load_target(config.target, device=leader.device)
    check_croppable(model)
    chosen = EvaluateConfig(run=config.output, max_prompts=wanted.decode_prompts, max_new_tokens=wanted.decode_tokens)
    limit = getattr(text_config(model), "max_position_embeddings", None)
    prompts, _ = select_prompts(load_examples(path, "heldout"), chosen, limit)
    if not prompts:
        events.record("notice", text=f"acceptance.decode-every-steps: {path} has no held-out prompt that can be decoded")
        return None
    return Prompts(
        model=model,
        ends=FrozenEnds.from_model(model, leader.device, next(model.parameters()).dtype),
        ids=[ids for _, ids in prompts],
        wanted=Wanted(max_new_tokens=wanted.decode_tokens, eos_ids=load_meta(path).eos_token_ids),
    )
