"""The two kinds of worker: one makes target states, one turns them into gradients. Engines decide where and when they run.

Legend: R rows, S tokens, N anchors, B block size, K features, H hidden size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.cuda import comm

from dflash.arriving import Arriving
from dflash.batch import BatchSummary, LossSums, PackedBatch, TargetStates
from dflash.compile_policy import CompilePolicy
from dflash.config import ConfigError, RunConfig
from dflash.data.packing import PackedStream
from dflash.flat import FlatParameters, Parameters
from dflash.modeling.attention import build_mask
from dflash.modeling.draft_collector import DraftCollector
from dflash.modeling.drafter import Drafter, DrafterShape, block_inputs
from dflash.modeling.fp8_head import Fp8Head, check_device
from dflash.modeling.head_scores import Score, score, score_for_fp8
from dflash.modeling.loss import draft_loss
from dflash.modeling.masks import BlockLayout
from dflash.modeling.target import FrozenEnds, TargetRunner, supports_packing
from dflash.modeling.tiles import tile_lists
from dflash.modeling.tree_estimate import DraftCounts
from dflash.sharded import ShardedParameters


class NonFiniteError(ArithmeticError):
    """A loss or gradient is NaN or infinite; the message names the samples and the first non-finite tensor."""

    def __init__(self, message: str, *, micro_batch: int | None = None) -> None:
        """`micro_batch`: the number of the one whose loss it is."""
        super().__init__(message)
        self.micro_batch = micro_batch


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """What one drafter adds to an optimizer step."""

    first_index: int  # number of the first micro-batch in it: fixes the order of summation
    gradients: Tensor  # flat fp32, on the drafter's device; empty where parameters are sharded
    sums: LossSums
    batches: tuple[BatchSummary, ...]
    drafts: DraftCounts | None = None  # in steps whose acceptance is estimated


@dataclass(frozen=True)
class _Unsettled:
    """A micro-batch that the device may be at. Holds its tensors, which other streams would be given when nobody does."""

    given: TargetStates  # where the target made them
    states: TargetStates  # on the drafter's device
    loss: Arriving


class TargetModelWorker:
    """Makes the target states of numbered micro-batches on one device."""

    def __init__(
        self,
        name: str,
        runner: TargetRunner,
        stream: PackedStream,
        device: torch.device,
        policy: CompilePolicy,
        *,
        tiles_of: int | None = None,
    ) -> None:
        """With `tiles_of`, the drafter's block size, the tiles of its flex mask are made while the device is busy."""
        self.name = name
        self.device = device
        self._policy = policy
        self._runner = runner
        self._stream = stream
        self._tiles_of = tiles_of

    def split(self, plan: dict[str, str], group: Any) -> None:
        """Keep one rank's part of the target; all ranks of the group call it."""
        self._runner.split(plan, group, self.device)

    def produce(self, number: int) -> TargetStates:
        """The states of micro-batch `number`, complete on this worker's device."""
        return self.run(self._stream.batch(number))

    def run(self, batch: PackedBatch) -> TargetStates:
        """The states of any batch, complete on this worker's device."""
        with self._policy.turn(self.name, "target", self.device):
            return target_states(self._runner, batch, self.device, tiles_of=self._tiles_of)


class DrafterModelWorker:
    """One drafter replica: fp32 weights in one flat tensor, forward and backward under autocast where the device has bf16."""

    def __init__(
        self,
        name: str,
        config: RunConfig,
        shape: DrafterShape,
        ends: FrozenEnds,
        device: torch.device,
        policy: CompilePolicy,
        *,
        start: Callable[[Drafter], None] | None = None,
    ) -> None:
        """The replica on `device`, with weights drawn there from the run's seed; `start` may change them.

        CPUs and GPUs draw different numbers. The drafters of a run are made equal by the trainer.
        """
        self.name = name
        self.device = device
        self._policy = policy
        self.shape = shape
        self.ends = ends
        self._config = config
        with device:  # a billion numbers are drawn in no time on a GPU, and in ten seconds and more on a CPU
            self.drafter = Drafter(shape, generator=torch.Generator(device).manual_seed(config.seed)).to(device).train()
        if start is not None:
            start(self.drafter)
        self._parameters: Parameters | None = None  # until `shard`, where drafters share them
        if not config.fully_shard:
            self._parameters = FlatParameters(self.drafter, _copies(config, device))
        self._forward: Callable[..., Tensor] = self.drafter if config.fully_shard else policy.compiled(self.drafter)
        if config.loss.fp8_head:
            check_device(device)
        self._fp8_head = Fp8Head(ends.head_weight) if config.loss.fp8_head else None
        scores: Score = score_for_fp8 if config.loss.fp8_head else score
        self._score: Score = policy.compiled(scores) if config.compile.loss else scores
        self._contributions: list[Contribution] = []
        self._unsettled: list[_Unsettled] = []
        # Ranks receive the next states into the slot that these came in.
        self._most_unsettled = 1 if device.type == "cuda" and config.engine == "threads" else 0

    @property
    def parameters(self) -> Parameters:
        """What is trained."""
        assert self._parameters is not None
        return self._parameters

    @property
    def flat(self) -> FlatParameters:
        """What is trained, where this drafter holds all of it."""
        assert isinstance(self._parameters, FlatParameters)
        return self._parameters

    def shard(self, group: Any, *, leads: bool) -> None:
        """Keep a part of the parameters, which are equal on all drafters of the group. All of them call it."""
        self._parameters = ShardedParameters(self.drafter, group, self.device, compiled=self._policy.compiled, leads=leads)

    def accumulate(self, states: TargetStates) -> None:
        """Add the gradients of one micro-batch.

        In threads, a GPU may still be at it when this returns, but not at the one before: so it always has work. `settle` waits
        for the rest. Raises NonFiniteError for any of them.
        """
        with self._policy.turn(self.name, "training", self.device):
            self._accumulate(states)
        self._settle(keep=self._most_unsettled)

    def settle(self) -> None:
        """Return when the device is done with all micro-batches. Raises NonFiniteError."""
        self._settle(keep=0)

    def _accumulate(self, given: TargetStates) -> None:
        states = given.to(self.device)
        collector = self._collector() if self._estimates(states.batch) else None
        sums = self.forward_and_backward(states, collector).detach()
        self._add(states.batch, sums, collector.counts if collector else None)
        self._unsettled.append(_Unsettled(given, states, Arriving(sums.loss)))

    def _settle(self, *, keep: int) -> None:
        while len(self._unsettled) > keep:
            first = self._unsettled.pop(0)
            if not math.isfinite(float(first.loss.read())):
                raise NonFiniteError(self._describe_non_finite(first.states), micro_batch=first.states.batch.index)

    def forward_and_backward(self, states: TargetStates, collector: DraftCollector | None = None) -> LossSums:
        """Add the gradients of states on this worker's device to the flat ones. Does not wait for the device."""
        sums = self._loss_through(states, self._forward, collector)
        sums.loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.parameters.collect_gradients()
        return sums

    @torch.no_grad()
    def validate(self, states: TargetStates) -> LossSums:
        """The sums of a held-out micro-batch, without gradients."""
        with self._policy.turn(self.name, "validation", self.device):
            return self.loss(states.to(self.device))

    @torch.no_grad()
    def estimate(self, states: TargetStates) -> DraftCounts:
        """What blocks of a held-out micro-batch say of the acceptance of chain and trees."""
        collector = self._collector()
        with self._policy.turn(self.name, "validation", self.device):
            self._loss_through(states.to(self.device), self._forward, collector)
        assert collector.counts is not None
        return collector.counts

    def take_contributions(self) -> list[Contribution]:
        """What was accumulated since the last call; `clear_gradients` when it has been used."""
        taken, self._contributions = self._contributions, []
        return taken

    def clear_gradients(self) -> None:
        """Start a new optimizer step."""
        self.parameters.clear_gradients()

    def loss(self, states: TargetStates) -> LossSums:
        """Loss sums of states on this worker's device."""
        return self._loss_through(states, self._forward)

    def _estimates(self, batch: PackedBatch) -> bool:
        every = self._config.acceptance.estimate_every_steps
        return every > 0 and (batch.index // self._config.optim.batches_per_step + 1) % every == 0

    def _collector(self) -> DraftCollector:
        acceptance = self._config.acceptance
        return DraftCollector(budget=max(acceptance.budgets, default=1), blocks=acceptance.estimate_blocks)

    def block_states(self, states: TargetStates, forward: Callable[..., Tensor] | None = None) -> Tensor:
        """Hidden states [R, N*B, H] of all blocks, ready for the head: what the loss is computed from.

        `forward` stands in for the (compiled) drafter's.
        """
        batch, block_size = states.batch, self.shape.block_size
        ids, block_positions = block_inputs(batch, self.shape.mask_token_id, block_size)
        mask = build_mask(BlockLayout.of(batch, block_size), self._config.drafter.attention, self.device)
        with torch.no_grad():
            embeds = self.ends.embed(ids)
        with self._autocast():
            hidden: Tensor = (forward or self._forward)(embeds, block_positions, states.features, batch.positions, mask)
        return hidden

    def _loss_through(
        self, states: TargetStates, forward: Callable[..., Tensor], collector: DraftCollector | None = None
    ) -> LossSums:
        return draft_loss(
            self.block_states(states, forward),
            self.ends,
            states.batch,
            self._config.loss,
            block_size=self.shape.block_size,
            final_hidden=states.final_hidden,
            collector=collector,
            score=self._score,
            fp8_head=self._fp8_head,
        )

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.device.type == "cuda":
            return torch.autocast("cuda", dtype=torch.bfloat16)
        return nullcontext()

    def _add(self, batch: PackedBatch, sums: LossSums, drafts: DraftCounts | None) -> None:
        adds_up = self.device.type == "cuda" or self.parameters.together
        if adds_up and self._contributions:
            # Autograd has already added this micro-batch to the same gradients: one sum a GPU keeps memory flat.
            first = self._contributions[0]
            merged = Contribution(
                first_index=first.first_index,
                gradients=first.gradients,
                sums=add_sums([first.sums, sums]),
                batches=(*first.batches, batch.summary()),
                drafts=first.drafts + drafts if first.drafts and drafts else first.drafts or drafts,
            )
            self._contributions = [merged]
            return
        gradients = self.parameters.gradients
        if not adds_up:
            # Kept apart per micro-batch: the order of summation, and so every bit, is the same for any number of drafters.
            gradients = gradients.clone()
            self.parameters.clear_gradients()
        self._contributions.append(
            Contribution(first_index=batch.index, gradients=gradients, sums=sums, batches=(batch.summary(),), drafts=drafts)
        )

    def _describe_non_finite(self, states: TargetStates) -> str:
        samples = [sample for row in states.batch.sample_ids for sample in row]
        shown = ", ".join(samples[:8]) + (f" and {len(samples) - 8} more" if len(samples) > 8 else "")
        return (
            f"the loss of micro-batch {states.batch.index} is not finite; first non-finite tensor: "
            f"{self._first_non_finite(states)}; samples: {shown}. The last good checkpoint is kept"
        )

    def _first_non_finite(self, states: TargetStates) -> str:
        inputs = {"target features": states.features, "target final hidden state": states.final_hidden}
        for name, tensor in inputs.items():
            if tensor is not None and not bool(torch.isfinite(tensor).all()):
                return name
        parameter = self.parameters.non_finite_weight()
        if parameter is not None:
            return f"drafter weight {parameter}"
        if self.parameters.together:  # the others would have to take part in looking closer
            return "the drafter's output or the logits"
        found: list[str] = []

        def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                if isinstance(output, Tensor) and not bool(torch.isfinite(output).all()):
                    found.append(f"output of drafter module {name or 'drafter'}")

            return hook

        hooks = [module.register_forward_hook(look(name)) for name, module in self.drafter.named_modules()]
        try:
            with torch.no_grad():
                self._loss_through(states, self.drafter)
        finally:
            for hook in hooks:
                hook.remove()
        return found[0] if found else "logits of the target's head"


def target_states(runner: TargetRunner, batch: PackedBatch, device: torch.device, *, tiles_of: int | None = None) -> TargetStates:
    """The states of a batch, complete on the device of the runner; for `tiles_of` see TargetModelWorker."""
    on_host, batch = batch, batch.to(device)
    features, final_hidden = runner.run(batch)
    if tiles_of is not None:
        batch = dataclasses.replace(batch, tiles=tile_lists(on_host, tiles_of).to(device))
    if device.type == "cpu":  # there the drafter runs without autocast, in fp32
        features, final_hidden = features.float(), None if final_hidden is None else final_hidden.float()
    synchronize(device)
    return TargetStates(batch=batch, features=features, final_hidden=final_hidden)


def check_packing(config: RunConfig, model: Any) -> None:
    """Raise ConfigError where the target cannot keep the documents of a row apart."""
    if config.data.packing == "documents" and not supports_packing(model):
        raise ConfigError(f"target {config.target.path} cannot separate packed documents: use --data.packing none")


def add_sums(parts: list[LossSums]) -> LossSums:
    """Sums of several micro-batches, in the given order, on the first one's device."""
    total = parts[0]
    for part in parts[1:]:
        total = LossSums(
            loss=total.loss + part.loss.to(total.loss.device),
            weight=total.weight + part.weight.to(total.weight.device),
            correct=total.correct + part.correct.to(total.correct.device),
            counted=total.counted + part.counted.to(total.counted.device),
            accepted=total.accepted + part.accepted.to(total.accepted.device),
            blocks=total.blocks + part.blocks.to(total.blocks.device),
        )
    return total


def sum_gradients(parts: list[Contribution], out: Tensor) -> None:
    """Write the sum of all contributions to `out` (flat fp32), in the order of their micro-batches."""
    tensors = [part.gradients for part in parts]
    if out.device.type == "cuda" and len(tensors) > 1:
        out.copy_(comm.reduce_add(tensors, destination=out.device.index))  # type: ignore[no-untyped-call]  # torch
        return
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    if total is not out:
        out.copy_(total)


def _copies(config: RunConfig, device: torch.device) -> torch.dtype | None:
    """The dtype of the copies of matrices, None without copies. Raises ConfigError on a CPU, which trains in fp32."""
    if not config.optim.bf16_copies:
        return None
    if device.type != "cuda":
        raise ConfigError(f"optim.bf16-copies is for GPUs, the drafter is on {device}, where it trains in fp32: leave it out")
    return torch.bfloat16


def synchronize(device: torch.device) -> None:
    """Wait for the calling thread's stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
