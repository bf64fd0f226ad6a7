"""Training: build, warm up, freeze, run the engine, and close - `train` is the table of contents.

The leader's `finish_step` is the only place where weights change. What it does depends on the micro-batches of the step and on
nothing else, so M drafters equal one drafter with M times the micro-batches, and a resumed run equals the uninterrupted one.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from dflash import checkpoint, events, measuring, resuming, telemetry
from dflash.arriving import Arriving
from dflash.assembly import Parts, build
from dflash.batch import LossSums, TargetStates
from dflash.checkpoint import TrainState
from dflash.compile_cache import CompileCache
from dflash.compile_policy import CompilePolicy
from dflash.config import ConfigError, RunConfig, Topology, to_dict
from dflash.data.examples import DataError
from dflash.device import intra_op_threads, usable_cores
from dflash.engine.devices import Placement, place
from dflash.engine.processes import Ranks, joined
from dflash.errors import CheckpointError
from dflash.exchange import Engine, ThreadsEngine, report
from dflash.fx import seams
from dflash.live_acceptance import LiveAcceptance
from dflash.ranks import RanksEngine, placement_of, serve
from dflash.stopping import Stop, stop_on_signals
from dflash.tally import Tally, step_stats
from dflash.worker import Contribution, NonFiniteError, add_sums, sum_gradients

USER_ERRORS = (ConfigError, DataError, CheckpointError, SafetensorError, OSError)  # what is told once, with exit code 2


def train(config: RunConfig) -> dict[str, Any] | None:
    """Run the training that `config` describes; returns the JSON-ready result, in processes only the one that leads.

    Raises:
        ConfigError, DataError, CheckpointError: what the user asked for cannot be done.
        WorkerFailed: a worker failed; its cause is the exception, and the last good checkpoint is kept.
        Silent: a process that another one has spoken for ends.
    """
    if config.engine == "processes":
        with joined(config) as ranks:
            return train_rank(config, ranks)
    placement = place(config)
    policy = CompilePolicy(config.compile, num_drafters=len(placement.drafters))
    with contextlib.ExitStack() as stack:
        notices = stack.enter_context(resuming.held(config))
        resumed = resuming.saved_state(config)
        stop = stack.enter_context(stop_on_signals())
        measured = stack.enter_context(_running(config, policy, placement, stop, resumed))
        _record(notices)
        parts = build(config, placement, policy)
        engine = ThreadsEngine(config, placement, parts, policy)
        return _train(Trainer(config, parts, policy, stop, engine), resumed, measured)


def train_rank(config: RunConfig, ranks: Ranks) -> dict[str, Any] | None:
    """The training of one rank, which has joined the others; the one that leads keeps other runs out of the output."""
    with contextlib.ExitStack() as stack:
        notices = ranks.agree(
            "taking the output", lambda: stack.enter_context(resuming.held(config)) if ranks.leads else [], USER_ERRORS
        )
        return _train_rank(config, ranks, notices)


def _train_rank(config: RunConfig, ranks: Ranks, notices: list[str]) -> dict[str, Any] | None:
    if ranks.launch.restart:
        notices += ranks.agree("looking at the checkpoints", lambda: resuming.set_aside(config, leads=ranks.leads), USER_ERRORS)
        config = resuming.restarted(config)
        if (finished := resuming.finished(config)) is not None:
            return finished if ranks.leads else None
    if not ranks.leads:
        transformers.utils.logging.disable_progress_bar()
    placement = placement_of(ranks)
    resumed = ranks.agree("reading the checkpoint", lambda: resuming.saved_state(config), USER_ERRORS)
    first_step = resumed.step if resumed else 0
    ranks.same("step", {"resumed step": first_step})
    config.output.mkdir(parents=True, exist_ok=True)
    policy = CompilePolicy(config.compile, num_drafters=1)
    with _running(config, policy, placement, ranks.stop, resumed, leads=ranks.leads) as measured:
        _record(notices)
        parts = ranks.agree("building", lambda: build(config, placement, policy, leads=ranks.leads), USER_ERRORS)
        ranks.agree("comparing with the checkpoint", lambda: _check_resumed(config, parts, resumed), USER_ERRORS)
        if ranks.is_target:
            serve(config, ranks, parts, policy, first_step)
            return None
        engine = RanksEngine(config, ranks, parts, policy)
        return _train(Trainer(config, parts, policy, ranks.stop, engine), resumed, measured)


def _record(notices: list[str]) -> None:
    """Tell what was found before anybody listened."""
    for text in notices:
        events.record("notice", text=text)


def _check_resumed(config: RunConfig, parts: Parts, resumed: TrainState | None) -> None:
    """Raise CheckpointError where this process's drafter cannot go on from what was saved."""
    if resumed is not None:
        for drafter in parts.drafters:
            checkpoint.check_resumable(resumed, config, drafter.shape)


@contextlib.contextmanager
def _running(
    config: RunConfig,
    policy: CompilePolicy,
    placement: Placement,
    stop: Stop,
    resumed: TrainState | None,
    *,
    leads: bool = True,
) -> Iterator[measuring.Measuring]:
    """What surrounds a process's part of a run."""
    devices = (*placement.targets, *placement.drafters)
    with contextlib.ExitStack() as stack:
        stack.enter_context(intra_op_threads(config.devices, config.cpu_threads))
        stack.enter_context(policy.watching())
        if leads:
            stack.enter_context(telemetry.listening(config, first_step=resumed.step if resumed else 0))
        yield stack.enter_context(measuring.measuring(config, devices, stop, leads=leads))


def _train(trainer: Trainer, resumed: TrainState | None, measured: measuring.Measuring) -> dict[str, Any] | None:
    """Warm up, freeze, run, and report."""
    config, policy = trainer.config, trainer.policy
    cache = CompileCache(config.compile.cache)
    measured.times, measured.num_devices = trainer.engine.all_times, trainer.engine.num_devices
    trainer.start(resumed)
    if trainer.engine.leads:
        (config.output / "config.json").write_text(json.dumps(to_dict(config), indent=1))
    with cache.active():
        trainer.warm_up()
        if policy.warms_up:
            cache.save()
        with policy.frozen():
            trainer.run(resumed.step if resumed else 0)
        if not policy.warms_up:
            cache.save()
    collected = trainer.result()
    if collected is None:
        return None
    measure = {"measure": measured.result()} if config.measure.on else {}
    result: dict[str, Any] = events.finite(collected | {"compile_cache": cache.state} | measure)
    events.record("result", **result)
    (config.output / resuming.RESULT_FILE).write_text(json.dumps(result, indent=1))
    return result


class Trainer:
    """The state of a run in a process that has drafters. `finish_step` runs between two steps, while its workers wait."""

    def __init__(self, config: RunConfig, parts: Parts, policy: CompilePolicy, stop: Stop, engine: Engine) -> None:
        self.config, self.policy, self.engine = config, policy, engine
        self._config = config
        self._parts = parts
        self._policy = policy
        self._stop = stop
        self._leader = parts.drafters[0]  # the run's leader, or this process's equal of it
        self._acceptance = LiveAcceptance(config, self._leader) if engine.leads else None
        self._optimizer = self._leader.parameters.optimizer(config.optim)
        self._validation: list[TargetStates] = []
        self._steps_done = 0
        self._tally = Tally(recent_steps=config.telemetry.log_every_steps)
        self._fx_errors: list[str] = []

    def start(self, resumed: TrainState | None) -> None:
        """Load the resumed state or save the untrained drafter as step 0; measure the held-out batches' target states."""
        if resumed is not None:
            checkpoint.check_resumable(resumed, self._config, self._leader.shape)
            self._leader.parameters.load(resumed.weights)
            self._optimizer.load_moments(resumed.moments)
            self._steps_done = resumed.step
            events.record("notice", text=f"resumed after step {resumed.step}")
        self.engine.share_weights()
        self._validation = self.engine.validation_states()

    def warm_up(self) -> None:
        """Compile everything the run will call, one drafter after the other, forward and backward, in this thread.

        A policy that lets the engine's threads compile does without.
        """
        started = time.perf_counter()
        if self._policy.warms_up:
            with self._policy.in_worker():
                self._run_everything_once()
        self._tally.warmup_seconds = time.perf_counter() - started
        if self._steps_done == 0 and self._config.checkpoint.keep_untrained and not self._config.measure.on:
            self._save_if_leading(0)

    def _run_everything_once(self) -> None:
        first = self.engine.states_to_warm_up(self._steps_done * self._config.optim.batches_per_step)
        for number, drafter in enumerate(self._parts.drafters):
            what = f"drafter {number + 1} of {len(self._parts.drafters)} on {drafter.device}"
            events.record("phase", text=f"warming up {what} ({self._policy.config.policy})")
            with torch.cuda.device(drafter.device) if drafter.device.type == "cuda" else contextlib.nullcontext():
                drafter.accumulate(first)
                drafter.settle()
                drafter.take_contributions()
                drafter.clear_gradients()
                with drafter.parameters.whole():
                    for states in self._validation[:1]:
                        drafter.validate(states)

    def run(self, first_step: int) -> None:
        """Start the engine and wait for its end."""
        events.record("phase", text="training")
        self._stop.stepping = True
        self._started = self._step_started = time.perf_counter()
        try:
            self.engine.run(first_step, self.finish_step)
        finally:
            self._tally.wall_seconds = time.perf_counter() - self._started

    def finish_step(self, step: int) -> bool:
        """Sum, update, copy, report, and save if it is time. Returns whether to go on."""
        parts = self.engine.collect(step)
        sums, norm, rate = self._update(step, parts)
        self.engine.after_update()
        self._steps_done = step + 1
        self._report(step, parts, sums, norm, rate)
        if self._acceptance is not None:
            with self.engine.slow("estimating and decoding"):
                self._step_started += self._acceptance.after_step(self._steps_done, parts, self._validation)
        self._policy.check()
        self._fx_errors += [leak for leak in seams.leaks(seams.tracing_state()) if leak not in self._fx_errors]
        stop = self.engine.any(self._stop.is_set())
        last = self._steps_done == self._config.optim.steps
        due = last or stop or self._steps_done % self._config.checkpoint.every_steps == 0
        if due and not self._config.measure.on:
            self._save_if_leading(self._steps_done)
        return not stop

    def result(self) -> dict[str, Any] | None:
        """The JSON line of the run, where this process leads."""
        reports = self.engine.gather(report(self._policy, self.engine.times(), self._devices(), self._fx_errors))
        if reports is None:
            return None
        assert self._acceptance is not None
        policy, engine, tally = self._policy.report(), self.engine, self._tally
        seconds = tally.wall_seconds - tally.checkpoint_seconds - self._acceptance.seconds
        rate = tally.tokens / seconds if seconds > 0 else 0.0
        times = [times for one in reports for times in one.times]
        fx_errors = [error for one in reports for error in one.fx_errors]
        return {
            "preset": self._config.preset,
            "engine": self._config.engine,
            "topology": str(Topology.parse(self._config.topology)),
            "devices": list(engine.devices),
            "leaders_machine": {"cores": usable_cores(), "workers": engine.workers_here},
            "steps": self._steps_done,
            "stopped_early": self._steps_done < self._config.optim.steps,
            "tokens": tally.tokens,
            "padding_tokens": tally.padding_tokens,
            "tokens_per_second": rate,
            "tokens_per_second_per_device": rate / engine.num_devices,
            "tokens_per_second_per_target": rate / engine.num_targets if engine.num_targets else None,
            "tokens_per_second_per_drafter": rate / engine.num_drafters,
            "loss": tally.recent_loss,
            "acceptance": self._acceptance.result(),
            "empty_steps": tally.empty_steps,
            "skipped_examples": self._parts.skipped_examples,
            "seconds": {
                "training": seconds,
                "checkpoints": tally.checkpoint_seconds,
                "decoding": self._acceptance.seconds,
                "warmup": tally.warmup_seconds,
            },
            "workers": [vars(each) for each in times],
            "queue_occupancy": engine.queue_stats().mean_occupancy,
            "supply_demand": telemetry.verdict(times),
            "compile_policy": f"{policy.policy} ({policy.backend})",
            "compiles_in_warmup": sum(one.compiles_in_warmup for one in reports),
            "graph_runs": sum(one.graph_runs for one in reports),
            "recompiles_after_warmup": sum(len(one.recompiles_after_warmup) for one in reports),
            "graph_breaks": sum(one.graph_breaks for one in reports),
            "fallbacks": sum(len(one.fallbacks) for one in reports),
            "fx_errors": len(fx_errors),
            "fx_error_messages": fx_errors,
            "peak_memory_bytes": {name: peak for one in reports for name, peak in one.peak_memory_bytes.items()},
            "checkpoint": resuming.last_checkpoint(self._config),
        }

    def _devices(self) -> list[torch.device]:
        targets = [target.device for target in self._parts.targets]
        return targets + [drafter.device for drafter in self._parts.drafters]

    def _update(self, step: int, parts: list[Contribution]) -> tuple[LossSums, float, float]:
        """Update the leader's weights; sums on the host, norm of the gradient, learning rate.

        The sums are read while a GPU is at the update, so that it never runs out of work.
        """
        sum_gradients(parts, self._leader.parameters.gradients)
        total = add_sums([part.sums for part in parts])
        norm = self._optimizer.norm()
        arriving = Arriving(torch.cat([total.vector().to(norm.device), norm.reshape(1)]))
        rate = self._optimizer.step(step, total_weight=total.weight, norm=norm)
        *_, last = values = arriving.read()
        for drafter in self._parts.drafters:
            drafter.settle()
        sums = LossSums.of_vector(values[:-1])
        empty = float(sums.weight) == 0
        if empty:
            self._tally.empty_steps += 1
            events.record("notice", text=f"step {step + 1}: no supervised position in any block, weights unchanged")
        elif not math.isfinite(last):
            self._refuse(step, parts)
        for drafter in self._parts.drafters:
            drafter.clear_gradients()
        return (sums, 0.0, 0.0) if empty else (sums, float(last) / float(sums.weight), rate)

    def _refuse(self, step: int, parts: list[Contribution]) -> None:
        """Raise NonFiniteError for gradients that were not used, because their norm is not finite."""
        name = self._leader.parameters.non_finite_gradient()
        what = "norm of its gradients, each of which is finite" if name is None else f"gradient of {name}"
        samples = sorted({s for part in parts for b in part.batches for row in b.sample_ids for s in row})
        raise NonFiniteError(
            f"the gradient of step {step + 1} is not finite; first non-finite tensor: {what}; samples: "
            f"{', '.join(samples[:8])}{f' and {len(samples) - 8} more' if len(samples) > 8 else ''}. "
            f"The last good checkpoint is kept"
        )

    def _report(self, step: int, parts: list[Contribution], sums: LossSums, norm: float, rate: float) -> None:
        now = time.perf_counter()
        batches = tuple(batch for part in parts for batch in part.batches)
        stats = step_stats(step, sums, norm, rate, seconds=now - self._step_started, batches=batches)
        self._step_started = now
        self._tally.add(stats)
        events.record(
            "step",
            **vars(stats),
            tokens_per_second=stats.tokens / stats.seconds,
            queue_occupancy=self.engine.queue_stats().mean_occupancy,
        )
        if stats.step % self._config.telemetry.log_every_steps == 0 and (waits := self.engine.waits()) is not None:
            events.record("waits", step=stats.step, **vars(waits))

    def _save_if_leading(self, step: int) -> None:
        self.engine.verify_weights()
        if self.engine.leads or self._leader.parameters.together:
            with self.engine.slow(f"saving step {step}"):
                self._save(step)

    def _save(self, step: int) -> None:
        """Where drafters share the parameters, all of them come here, and only the leader writes."""
        started = time.perf_counter()
        with self._leader.parameters.whole():
            metrics = self._validate() if self.engine.leads else {}
        weights, moments = self._leader.parameters.state(), self._optimizer.moments()
        if not self.engine.leads:
            return
        state = TrainState(
            step=step,
            weights=weights,
            moments=moments,
            shape=self._leader.shape.to_zlab_config(),
            config=self._config,
            metrics=metrics,
        )
        directory = checkpoint.save(self._config.output, state)
        best = (
            frozenset({checkpoint.resolve(self._config.output, "best").name})
            if self._config.checkpoint.keep_best
            else frozenset()
        )
        checkpoint.prune(self._config.output, keep_last=self._config.checkpoint.keep_last, keep=best)
        events.record("checkpoint", directory=str(directory), step=step, metrics=metrics)
        if step:
            self._tally.checkpoint_seconds += time.perf_counter() - started
        self._step_started = time.perf_counter()

    def _validate(self) -> dict[str, float]:
        """Held-out loss and teacher-forced acceptance; `score` orders checkpoints for `best`."""
        if not self._validation:
            loss = self._tally.recent_loss
            return {"score": -loss} if math.isfinite(loss) else {}
        sums = add_sums([self._leader.validate(states) for states in self._validation])
        stats = step_stats(self._steps_done, sums)
        return {
            "validation_loss": stats.loss,
            "validation_acceptance": stats.teacher_forced_acceptance,
            "score": stats.teacher_forced_acceptance,
        }
