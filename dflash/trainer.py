"""Training: build, warm up, freeze, run the engine, and close - `train` is the table of contents.

The leader's `finish_step` is the only place where weights change. What it does depends on the micro-batches of the step and on
nothing else, so M drafters equal one drafter with M times the micro-batches, and a resumed run equals the uninterrupted one.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from dflash import checkpoint, device_time, events, measuring, telemetry
from dflash.assembly import Parts, build
from dflash.batch import LossSums, PackedBatch, StepStats, TargetStates
from dflash.checkpoint import CheckpointError, TrainState
from dflash.compile_cache import CompileCache
from dflash.compile_policy import CompilePolicy
from dflash.config import RunConfig, Topology, to_dict
from dflash.engine.devices import Placement, place
from dflash.engine.queue import OrderedQueue
from dflash.engine.threads import ThreadsRun, WorkerTimes, run_threads
from dflash.flat import FlatAdamW
from dflash.fx import seams
from dflash.live_acceptance import LiveAcceptance
from dflash.worker import Contribution, NonFiniteError, add_sums, sum_gradients


def train(config: RunConfig) -> dict[str, Any]:
    """Run the training that `config` describes; returns the JSON-ready result.

    Raises:
        ConfigError, DataError, CheckpointError: what the user asked for cannot be done.
        WorkerFailed: a worker failed; its cause is the exception, and the last good checkpoint is kept.
    """
    placement = place(config)
    resumed = _saved_state(config)
    config.output.mkdir(parents=True, exist_ok=True)
    policy = CompilePolicy(config.compile, num_drafters=len(placement.drafters))
    cache = CompileCache(config.compile.cache)
    with _cpu_threads(config), policy.watching(), _stop_on_signals() as stop:
        first_step = resumed.step if resumed else 0
        devices = (*placement.targets, *placement.drafters)
        with telemetry.listening(config, first_step=first_step), measuring.measuring(config, devices, stop) as measured:
            parts = build(config, placement, policy)
            trainer = Trainer(config, placement, parts, policy, stop)
            measured.times = trainer.worker_times
            trainer.start(resumed)
            (config.output / "config.json").write_text(json.dumps(to_dict(config), indent=1))
            with cache.active():
                trainer.warm_up()
                if policy.warms_up:
                    cache.save()
                with policy.frozen():
                    trainer.run(first_step)
                if not policy.warms_up:
                    cache.save()
            measure = {"measure": measured.result()} if config.measure.on else {}
            result: dict[str, Any] = events.finite(trainer.result() | {"compile_cache": cache.state} | measure)
            events.record("result", **result)
    (config.output / "result.json").write_text(json.dumps(result, indent=1))
    return result


class Trainer:
    """The state of a run in this process. `finish_step` runs in the leading drafter's thread while all others wait."""

    def __init__(self, config: RunConfig, placement: Placement, parts: Parts, policy: CompilePolicy, stop: Stop) -> None:
        self._config = config
        self._placement = placement
        self._parts = parts
        self._policy = policy
        self._stop = stop
        self._leader = parts.drafters[0]
        self._acceptance = LiveAcceptance(config, self._leader)
        self._optimizer = FlatAdamW(self._leader.flat, config.optim)
        self._validation: list[TargetStates] = []
        self._steps_done = 0
        self._tokens = 0
        self._padding_tokens = 0
        self._recent_losses: list[float] = []
        self._empty_steps = 0
        self._fx_errors: list[str] = []
        self._checkpoint_seconds = 0.0
        self._warmup_seconds = 0.0
        self._wall_seconds = 0.0
        self._run: ThreadsRun | None = None

    def start(self, resumed: TrainState | None) -> None:
        """Load the resumed state or save the untrained drafter as step 0; measure the held-out batches' target states."""
        if resumed is not None:
            checkpoint.check_resumable(resumed, self._config, self._leader.shape)
            for name, view in self._leader.flat.named(self._leader.flat.weights).items():
                view.copy_(resumed.weights[name])
            self._leader.flat.refresh()
            self._optimizer.load_moments(resumed.moments)
            self._steps_done = resumed.step
            events.record("notice", text=f"resumed after step {resumed.step}")
        self._copy_weights()
        self._validation = self._parts.validation_states()

    def warm_up(self) -> None:
        """Compile everything the run will call, one drafter after the other, forward and backward, in this thread.

        A policy that lets the engine's threads compile does without.
        """
        started = time.perf_counter()
        if self._policy.warms_up:
            with self._policy.in_worker():
                self._run_everything_once()
        self._warmup_seconds = time.perf_counter() - started
        if self._steps_done == 0 and self._config.checkpoint.keep_untrained and not self._config.measure.on:
            self._save(0)

    def _run_everything_once(self) -> None:
        first = self._parts.targets[0].produce(self._steps_done * self._config.optim.batches_per_step)
        for number, drafter in enumerate(self._parts.drafters):
            what = f"drafter {number + 1} of {len(self._parts.drafters)} on {drafter.device}"
            events.record("phase", text=f"warming up {what} ({self._policy.config.policy})")
            with torch.cuda.device(drafter.device) if drafter.device.type == "cuda" else contextlib.nullcontext():
                drafter.accumulate(first)
                drafter.take_contributions()
                drafter.clear_gradients()
                for states in self._validation[:1]:
                    drafter.validate(states)
        for target in self._parts.targets[1:]:
            target.produce(0)

    def run(self, first_step: int) -> None:
        """Start the engine and wait for its end."""
        optim = self._config.optim
        per_step = optim.batches_per_step
        queue: OrderedQueue[TargetStates] = OrderedQueue(
            capacity=self._config.telemetry.queue_items, first=first_step * per_step, end=optim.steps * per_step
        )
        self._run = ThreadsRun(
            targets=device_time.timed_targets(self._parts.targets, self._config.measure),
            drafters=device_time.timed_drafters(self._parts.drafters, self._config.measure),
            queue=queue,
            first_step=first_step,
            num_steps=optim.steps,
            batches_per_step=per_step,
            finish_step=self.finish_step,
            in_worker=self._policy.in_worker,
        )
        events.record("phase", text="training")
        self._stop.stepping = True
        self._started = self._step_started = time.perf_counter()
        try:
            run_threads(self._run)
        finally:
            self._wall_seconds = time.perf_counter() - self._started

    def finish_step(self, step: int) -> bool:
        """Sum, update, copy, report, and save if it is time. Returns whether to go on."""
        parts = sorted((c for d in self._parts.drafters for c in d.take_contributions()), key=lambda c: c.first_index)
        sums = add_sums([part.sums for part in parts]).on_host()
        norm, rate = self._update(step, parts, sums)
        if len(self._parts.drafters) > 1:
            self._copy_weights()
        self._steps_done = step + 1
        self._report(step, parts, sums, norm, rate)
        self._step_started += self._acceptance.after_step(self._steps_done, parts, self._validation)
        self._policy.check()
        self._fx_errors += [leak for leak in seams.leaks(seams.tracing_state()) if leak not in self._fx_errors]
        stop = self._stop.is_set()
        last = self._steps_done == self._config.optim.steps
        due = last or stop or self._steps_done % self._config.checkpoint.every_steps == 0
        if due and not self._config.measure.on:
            self._save(self._steps_done)
        return not stop

    def worker_times(self) -> list[WorkerTimes]:
        """What the threads did with their time so far; empty before they start."""
        return self._run.times if self._run else []

    def result(self) -> dict[str, Any]:
        """The JSON line of the run."""
        assert self._run is not None
        report = self._policy.report()
        seconds = self._wall_seconds - self._checkpoint_seconds - self._acceptance.seconds
        rate = self._tokens / seconds if seconds > 0 else 0.0
        queue = self._run.queue.stats()
        return {
            "preset": self._config.preset,
            "engine": self._config.engine,
            "topology": str(Topology.parse(self._config.topology)),
            "devices": [str(d) for d in (*self._placement.targets, *self._placement.drafters)],
            "steps": self._steps_done,
            "stopped_early": self._steps_done < self._config.optim.steps,
            "tokens": self._tokens,
            "padding_tokens": self._padding_tokens,
            "tokens_per_second": rate,
            "tokens_per_second_per_device": rate / self._placement.num_devices,
            "tokens_per_second_per_target": rate / len(self._placement.targets),
            "tokens_per_second_per_drafter": rate / len(self._placement.drafters),
            "loss": _mean(self._recent_losses),
            "acceptance": self._acceptance.result(),
            "empty_steps": self._empty_steps,
            "skipped_examples": self._parts.skipped_examples,
            "seconds": {
                "training": seconds,
                "checkpoints": self._checkpoint_seconds,
                "decoding": self._acceptance.seconds,
                "warmup": self._warmup_seconds,
            },
            "workers": [vars(times) for times in self._run.times],
            "queue_occupancy": queue.mean_occupancy,
            "supply_demand": telemetry.verdict(self._run.times),
            "compile_policy": f"{report.policy} ({report.backend})",
            "compiles_in_warmup": report.compiles_in_warmup,
            "graph_runs": report.graph_runs,
            "recompiles_after_warmup": len(report.recompiles_after_warmup),
            "graph_breaks": report.graph_breaks,
            "fallbacks": len(report.fallbacks),
            "fx_errors": len(self._fx_errors),
            "fx_error_messages": self._fx_errors,
            "peak_memory_bytes": _peak_memory_bytes(self._placement),
            "checkpoint": _last_checkpoint(self._config),
        }

    def _update(self, step: int, parts: list[Contribution], sums: LossSums) -> tuple[float, float]:
        weight = float(sums.weight)
        if weight == 0:
            self._empty_steps += 1
            events.record("notice", text=f"step {step + 1}: no supervised position in any block, weights unchanged")
            return 0.0, 0.0
        flat = self._leader.flat
        sum_gradients(parts, flat.gradients)
        norm = self._optimizer.norm(weight)
        if not math.isfinite(norm):
            name = flat.first_non_finite(flat.gradients)
            if name is not None:
                samples = sorted({s for part in parts for b in part.batches for row in b.sample_ids for s in row})
                raise NonFiniteError(
                    f"the gradient of step {step + 1} is not finite; first non-finite tensor: gradient of {name}; samples: "
                    f"{', '.join(samples[:8])}{f' and {len(samples) - 8} more' if len(samples) > 8 else ''}. "
                    f"The last good checkpoint is kept"
                )
        rate = self._optimizer.step(step, total_weight=weight, norm=norm)
        for drafter in self._parts.drafters:
            drafter.clear_gradients()
        return norm, rate

    def _copy_weights(self) -> None:
        """Give the leader's weights to the others, whose streams do not wait for the leader's."""
        for drafter in self._parts.drafters[1:]:
            drafter.flat.weights.copy_(self._leader.flat.weights)
            drafter.flat.refresh()
        for device in {d.device for d in self._parts.drafters if d.device.type == "cuda"}:
            torch.cuda.synchronize(device)

    def _report(self, step: int, parts: list[Contribution], sums: LossSums, norm: float, rate: float) -> None:
        now = time.perf_counter()
        batches = tuple(batch for part in parts for batch in part.batches)
        stats = step_stats(step, sums, norm, rate, seconds=now - self._step_started, batches=batches)
        self._step_started = now
        self._tokens += stats.tokens
        self._padding_tokens += stats.padding_tokens
        self._recent_losses = [*self._recent_losses, stats.loss][-self._config.telemetry.log_every_steps :]
        assert self._run is not None
        events.record(
            "step",
            **vars(stats),
            tokens_per_second=stats.tokens / stats.seconds,
            queue_occupancy=self._run.queue.stats().mean_occupancy,
        )

    def _save(self, step: int) -> None:
        started = time.perf_counter()
        metrics = self._validate()
        flat = self._leader.flat
        state = TrainState(
            step=step,
            weights=flat.named(flat.weights),
            moments=self._optimizer.moments(),
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
            self._checkpoint_seconds += time.perf_counter() - started
        self._step_started = time.perf_counter()

    def _validate(self) -> dict[str, float]:
        """Held-out loss and teacher-forced acceptance; `score` orders checkpoints for `best`."""
        if not self._validation:
            loss = _mean(self._recent_losses)
            return {"score": -loss} if math.isfinite(loss) else {}
        sums = add_sums([self._leader.validate(states) for states in self._validation])
        stats = step_stats(self._steps_done, sums)
        return {
            "validation_loss": stats.loss,
            "validation_acceptance": stats.teacher_forced_acceptance,
            "score": stats.teacher_forced_acceptance,
        }


def step_stats(
    step: int,
    sums: LossSums,
    gradient_norm: float = 0.0,
    learning_rate: float = 0.0,
    *,
    seconds: float = 0.0,
    batches: tuple[PackedBatch, ...] = (),
) -> StepStats:
    """Sums as plain numbers: divided once, here, over all drafters and micro-batches. `step` counts from 0."""
    weight, blocks = float(sums.weight), float(sums.blocks)
    counted, correct = sums.counted.tolist(), sums.correct.tolist()
    return StepStats(
        step=step + 1,
        loss=float(sums.loss) / weight if weight else math.nan,
        learning_rate=learning_rate,
        gradient_norm=gradient_norm,
        tokens=sum(batch.num_tokens for batch in batches),
        padding_tokens=sum(batch.num_padding_tokens for batch in batches),
        seconds=seconds,
        teacher_forced_acceptance=1 + float(sums.accepted) / blocks if blocks else math.nan,
        accuracy=tuple(c / n if n else None for c, n in zip(correct, counted, strict=True)),
        sample_ids=tuple(sample for batch in batches for row in batch.sample_ids for sample in row),
    )


def _last_checkpoint(config: RunConfig) -> str | None:
    """The newest complete checkpoint; a measuring run that resumed nothing has none."""
    complete = checkpoint.list_complete(config.output)
    return str(checkpoint.checkpoint_dir(config.output) / complete[-1]) if complete else None


def _saved_state(config: RunConfig) -> TrainState | None:
    existing = checkpoint.list_complete(config.output)
    if config.resume:
        state = checkpoint.load(checkpoint.resolve(config.output, "last"))
        if state.step >= config.optim.steps:
            raise CheckpointError(
                f"{config.output} is finished: its last checkpoint is of step {state.step} of {config.optim.steps}"
            )
        return state
    if existing:
        raise CheckpointError(
            f"{config.output} already holds checkpoints up to {existing[-1]}: use --resume to go on, or another --output"
        )
    return None


class Stop(threading.Event):
    """Set when the run was asked to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.stepping = False  # whether there is a step to finish


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[Stop]:
    """Ctrl-C and SIGTERM ask the run to finish its step; before the first one, and a second Ctrl-C, interrupt at once.

    Handlers are restored.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        if not stop.stepping or (stop.is_set() and number == signal.SIGINT):
            raise KeyboardInterrupt
        stop.set()
        events.record("notice", text=f"{signal.Signals(number).name}: finishing the step, then saving; Ctrl-C again to drop it")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _cpu_threads(config: RunConfig) -> Iterator[None]:
    """Intra-op threads of each worker; only where the workers are CPU threads."""
    before = torch.get_num_threads()
    if config.devices == "cpu":
        torch.set_num_threads(config.cpu_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _peak_memory_bytes(placement: Placement) -> dict[str, int]:
    devices = {d for d in (*placement.targets, *placement.drafters) if d.type == "cuda"}
    return {str(device): torch.cuda.max_memory_allocated(device) for device in sorted(devices, key=str)}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
