"""The only training loop: every method, one rank or many, CPU or GPU, goes through here."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from holdfast.artifacts import RunFolder
from holdfast.config import TrainConfig
from holdfast.data.loader import BatchMaker, BatchSizes, RoundSampler, ViewSettings, batches
from holdfast.data.round import Batch, RoundData
from holdfast.errors import Interrupted, TrainingError
from holdfast.methods.base import Method, StepOutput
from holdfast.runtime import (
    Agreement,
    Runtime,
    any_rank,
    derive_seed,
    in_group,
    rank_was_lost,
    ranks_record,
    sum_over_ranks,
)
from holdfast.train import checkpoint as checkpoints
from holdfast.train.compute_mode import compute_mode, fast_towers, speed_of, working_dtype
from holdfast.train.cuda_graphs import Steps
from holdfast.train.feature_cache import build_feature_cache
from holdfast.train.metrics import MetricsFile
from holdfast.train.optim import build_optimizer, learning_rate_factor, place_learning_rates, set_learning_rate
from holdfast.train.parallel import place, shards


class Progress(Protocol):
    """Where the loop says how far it is: a bar on a terminal, plain lines elsewhere."""

    def step(self, done: int, values: Mapping[str, float]) -> None:
        """``done`` steps are behind us."""
        ...

    def evaluated(self, done: int, record: Mapping[str, Any]) -> None:
        """An evaluation came out."""
        ...


class Stopwatch(Protocol):
    """Is told when a part of a step is over (`holdfast bench`)."""

    def lap(self, part: str) -> None:
        """``part`` is over: loader, forward, backward, optimizer or logging; ``step``: a recorded step as a whole."""
        ...


class _NoStopwatch:
    def lap(self, part: str) -> None:
        pass


@dataclass(frozen=True)
class TrainSpec:
    """Everything a run is told besides its method and data."""

    config: TrainConfig
    views: ViewSettings
    seed: int
    fingerprint: str  # of config and data; ties checkpoints to this run
    evaluate_every: int
    share_every: int = 10  # of how many logged steps one measures each part's share of the gradient
    resume: str = ""  # the command that goes on with an interrupted run
    checkpoint_at_end: bool = True  # False: after the last step only where checkpoint_every asks for it


@dataclass(frozen=True)
class StepResult:
    """What a step leaves behind, for the log."""

    output: StepOutput  # without its graph
    norm: Tensor  # of the gradient
    shares: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # each part's share of it, where measured


Evaluate = Callable[[int, Method], dict[str, Any]]


def train(
    method: Method,
    data: RoundData,
    plan: TrainSpec,
    runtime: Runtime,
    folder: RunFolder | None = None,
    evaluate: Evaluate | None = None,
    progress: Progress | None = None,
    stopwatch: Stopwatch | None = None,
    before_checkpoint: Callable[[], None] | None = None,
) -> None:
    """Run (or resume) the steps of ``plan``; the method holds the result.

    With a ``folder``, metrics and checkpoints are written there, and a run that was begun in it goes on bit for bit.
    ``before_checkpoint`` is called before each, for whoever has something to write that belongs to it.
    """
    run = _Run(method, data, plan, runtime, folder, evaluate, progress, stopwatch or _NoStopwatch(), before_checkpoint)
    with _interruptions() as interruption:
        run.go(interruption)


def batch_sizes(config: TrainConfig) -> BatchSizes:
    """How much of everything a step takes."""
    pairs = config.target_pairs
    return BatchSizes(pairs, config.batch - pairs, config.tasks_per_step, config.images_per_task)


class _Run:
    """One run's moving parts. The method is the only thing that outlives it."""

    def __init__(
        self,
        method: Method,
        data: RoundData,
        plan: TrainSpec,
        runtime: Runtime,
        folder: RunFolder | None,
        evaluate: Evaluate | None,
        progress: Progress | None,
        stopwatch: Stopwatch,
        before_checkpoint: Callable[[], None] | None = None,
    ) -> None:
        method.check_trainable()
        config = plan.config
        self.method, self.plan, self.config, self.runtime, self.folder = method, plan, config, runtime, folder
        self.evaluate, self.progress, self.tasks = evaluate, progress, data.tasks.protected
        self.lap, self.before_checkpoint = stopwatch.lap, before_checkpoint
        sizes = batch_sizes(config)
        self.sampler = RoundSampler(data, sizes, plan.seed)
        view = method.model.preprocess
        dtype = torch.float64 if config.precision == "float64" else torch.float32
        fast = fast_towers(config, runtime.device)
        with compute_mode(config, runtime.device, compiled=False):
            frozen = build_feature_cache(method, data, plan.views)
        self.maker = BatchMaker(
            data,
            method.model.towers,
            view.mean,
            view.std,
            plan.views,
            runtime,
            dtype,
            kept_as=working_dtype(config, runtime.device) if fast else None,
            prompts=method.model.prompt_tokens.cpu() if fast else None,
            pairs=(sizes.target, sizes.negatives),
            images=frozen.images,
            texts=frozen.texts,
        )
        records = self._records()
        self.weights = place(method, config, runtime, recorded=records)
        self.module, self.parameters = self.weights.module, self.weights.parameters
        self.optimizer = build_optimizer(config, self.weights.named, runtime.device)
        self.phase_starts = _phase_starts(method, config.steps)
        self.step = torch.zeros((), dtype=torch.long, device=runtime.device)  # that is being taken
        self.first_bad = torch.full_like(self.step, -1)  # first step that was not finite
        self.bad_parts: Tensor | None = None
        self.lost_rank = False
        self.steps = Steps(self._compute, runtime.device, record=records, agree=Agreement() if records else None)

    # -- the loop ---------------------------------------------------------------------------------------------------

    def go(self, interruption: _Interruption) -> None:
        try:
            with self.steps.stream():
                self._go(interruption)
        finally:
            if not self.lost_rank:  # a GPU that waits for a rank that is gone waits for ever
                self.steps.close()

    def _records(self) -> bool:
        """Whether steps are recorded and played back: where nothing of a step is decided on the host."""
        together = not in_group() or (ranks_record() and not shards(self.config))
        if not together or speed_of(self.config, self.runtime.device) != "graphs":
            return False
        known_safe = self.method.graph_safe and self.method.model.towers.records_steps
        wanted = known_safe or self.config.speed == "graphs"
        return wanted and not self.method.needs_task_gradients and len(self.method.phases()) == 1

    def _go(self, interruption: _Interruption) -> None:
        start, metrics_bytes = self._resume()
        writes = self.folder is not None and self.runtime.is_main
        self.metrics = MetricsFile(self.folder.metrics if writes and self.folder else None, metrics_bytes)
        clock, images = time.perf_counter(), 0
        done = start
        try:
            for step, batch in enumerate(batches(self.sampler, self.maker, start, self.config.steps), start):
                self._begin_phase(step, start)
                self.lap("loader")
                what = self._step(step, batch)
                done = step + 1
                images += batch.target_total + batch.negative_total + batch.protected_total
                if done % self.config.log_every == 0 or done == self.config.steps:
                    self._stop_if_not_finite()
                    rate = images / (time.perf_counter() - clock)
                    self._log(done, what, rate)
                    clock, images = time.perf_counter(), 0
                if self.evaluate and (done % self.plan.evaluate_every == 0 or done == self.config.steps):
                    self._stop_if_not_finite()
                    self._evaluate(done)
                    clock, images = time.perf_counter(), 0
                last, stop = done == self.config.steps, self._interrupted(done, interruption)
                due = done % self.config.checkpoint_every == 0 or (last and self.plan.checkpoint_at_end)
                if last or stop or due:
                    self._stop_if_not_finite()
                if due or (stop and not last):
                    self._checkpoint(done)
                if stop and not last:
                    raise self._interruption(done, interruption)
                self.lap("logging")
            self.weights.end()
        except RuntimeError as error:
            if not rank_was_lost(error):
                raise
            raise self._lost_rank(done) from error
        finally:
            self.metrics.close()

    def _step(self, step: int, batch: Batch) -> StepResult:
        # The step's random numbers, too, are a function of (seed, step): nothing to save, nothing to restore.
        torch.manual_seed(derive_seed(self.plan.seed, "step", step, self.runtime.rank))
        set_learning_rate(self.optimizer, learning_rate_factor(self.config, step))
        self.step.fill_(step)
        done, played = self.steps.run(batch, self._measures_shares(step + 1))
        if played:
            self.lap("step")
        return done

    def _compute(self, batch: Batch, measures: bool) -> StepResult:
        """A step: what is read besides the batch stands on the device, and nothing here waits for it."""
        lap = _NoStopwatch().lap if self._recording() else self.lap
        self.optimizer.zero_grad(set_to_none=True)  # a recording that failed may have left something there
        with compute_mode(self.config, self.runtime.device):
            output: StepOutput = self.module(batch)
        lap("forward")
        measured = self._all_but_one(output) if measures and len(output.parts) > 1 else {}
        self._backward(output)
        self.weights.average()
        shares = self._shares(measured, output) if measured else {}
        lap("backward")
        norm = self.weights.norm()
        if self.config.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self.parameters, self.config.clip_norm, norm)
        finite = self._note_finite(output, norm)
        if self.runtime.device.type == "cuda":
            # The optimizer looks at the flag on the device: a bad step changes nothing, and the host never waits.
            self.optimizer.found_inf = (~finite).float()  # pyright: ignore[reportAttributeAccessIssue]
            self.optimizer.step()
        elif bool(finite):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.method.commit(finite)
        lap("optimizer")
        # What is left of the graph would hold on to the step's nodes while the next one runs.
        parts = {name: part.detach() for name, part in output.parts.items()}
        return StepResult(replace(output, parts=parts, task_losses=None), norm, shares)

    def _recording(self) -> bool:
        return self.runtime.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _measures_shares(self, done: int) -> bool:
        """The first logged step, and then one in ``share_every``: it costs a backward pass for each part but one."""
        logged, rest = divmod(done, self.config.log_every)
        due = rest == 0 and (logged == 1 or logged % self.plan.share_every == 0)
        return due and not self.method.needs_task_gradients

    def _backward(self, output: StepOutput) -> None:
        if not self.method.needs_task_gradients or output.task_losses is None:
            output.surrogate.backward()
            return
        rows = [self.weights.gradient_of(loss) for loss in output.task_losses]  # before backward frees the graph
        output.surrogate.backward()
        own = self.weights.gradient()
        self.weights.put_gradient(self.method.adjust_gradients(own, torch.stack(rows), self.weights.total))

    def _all_but_one(self, output: StepOutput) -> dict[str, Tensor]:
        """Gradients of the parts, flat, without the last: that one is what is left of their sum."""
        return {
            name: self.weights.gradient_of(part) if part.requires_grad else torch.zeros_like(part)
            for name, part in list(output.parts.items())[:-1]
        }

    def _shares(self, measured: dict[str, Tensor], output: StepOutput) -> dict[str, Tensor]:
        """Each part's share of the gradient's length."""
        last = self.weights.gradient()
        for gradient in measured.values():
            last = last - gradient
        each = {**measured, list(output.parts)[-1]: last}
        norms = {name: self.weights.total(gradient.square().sum()).sqrt() for name, gradient in each.items()}
        total = torch.stack(tuple(norms.values())).sum().clamp(min=1e-30)
        return {name: norm / total for name, norm in norms.items()}

    # -- what is not finite -----------------------------------------------------------------------------------------

    def _note_finite(self, output: StepOutput, norm: Tensor) -> Tensor:
        """Whether the step may be taken, the same answer on every rank; the first bad step is remembered."""
        good = torch.isfinite(torch.stack([part.detach() for part in output.parts.values()] + [norm]))
        if in_group():
            good = sum_over_ranks((~good).float()) == 0
        finite = good.all()
        first_time = (self.first_bad < 0) & ~finite
        self.first_bad.copy_(torch.where(first_time, self.step, self.first_bad))
        if self.bad_parts is None or len(self.bad_parts) != len(good):
            self.bad_parts = ~good
        else:
            self.bad_parts.copy_(torch.where(first_time, ~good, self.bad_parts))
        self.part_names = [*output.parts, "gradient"]
        return finite

    def _stop_if_not_finite(self) -> None:
        step = int(self.first_bad)
        if step < 0 or self.bad_parts is None:
            return
        parts = [name for name, bad in zip(self.part_names, self.bad_parts.tolist(), strict=True) if bad]
        draw = self.sampler.draw(step)
        where = self.folder.checkpoints if self.folder else "memory"
        raise TrainingError(
            f"step {step}: {' and '.join(parts)} not finite",
            found=f"target pairs {draw.target[:8].tolist()}…, negatives {draw.negatives[:8].tolist()}…, "
            f"constraint images {draw.protected[:8].tolist()}… of that step (positions in their sets)",
            do=f"lower train.learning_rate or set train.clip_norm; the last good checkpoint is in {where}",
        )

    # -- records ----------------------------------------------------------------------------------------------------

    def _log(self, done: int, what: StepResult, rate: float) -> None:
        if not self.runtime.is_main:
            return  # no rank waits for what it does not write
        output = what.output
        values = {name: float(value) for name, value in output.values.items()}
        record: dict[str, Any] = {
            "step": done,
            **values,
            "gradient_norm": float(what.norm),
            "learning_rate": self.optimizer.param_groups[0]["base_lr"] * learning_rate_factor(self.config, done - 1),
            "images_per_second": round(rate, 1),
        }
        for name, tensor in output.per_task.items():
            record[name] = dict(zip(self.tasks, tensor.tolist(), strict=True))
        if what.shares:
            record["gradient_share"] = {name: float(share) for name, share in what.shares.items()}
        self.metrics.write(record)
        if self.progress:
            self.progress.step(done, values)

    def _evaluate(self, done: int) -> None:
        if self.evaluate is None:
            return
        with self.weights.whole() as method:
            record = self.evaluate(done, method)
        self.metrics.write({"step": done, "evaluation": record})
        if self.progress:
            self.progress.evaluated(done, record)

    # -- stopping and going on --------------------------------------------------------------------------------------

    def _checkpoint(self, done: int) -> None:
        state = None if self.folder is None else self.weights.state(self.optimizer)
        if self.folder is None or state is None:
            return
        if self.before_checkpoint is not None:
            self.before_checkpoint()
        content = checkpoints.Checkpoint(done, *state, self.metrics.size(), self.plan.fingerprint)
        checkpoints.save(self.folder.checkpoints, content, self.config.keep_checkpoints)

    def _resume(self) -> tuple[int, int]:
        found = checkpoints.latest(self.folder.checkpoints, self.plan.fingerprint) if self.folder else None
        if found is None:
            return 0, 0
        self.weights.load(self.optimizer, found.method, found.optimizer)
        place_learning_rates(self.optimizer, self.runtime.device)
        return found.step, found.metrics_bytes

    def _begin_phase(self, step: int, start: int) -> None:
        for number, first in enumerate(self.phase_starts):
            last = self.phase_starts[number + 1] if number + 1 < len(self.phase_starts) else self.config.steps
            if step == first or (step == start and first < step < last):
                self.method.begin_phase(number)

    def _interrupted(self, done: int, interruption: _Interruption) -> bool:
        if self.runtime.world == 1:
            return interruption.signal_number is not None
        # Ranks agree now and then, so that all of them stop after the same step.
        return done % 10 == 0 and any_rank(interruption.signal_number is not None, self.runtime.device)

    def _lost_rank(self, done: int) -> TrainingError:
        """Another rank died while this one waited for it. On a CPU weights and averages are those after step ``done``.

        A GPU may be in the middle of a step, and waits for the rank that is gone: nothing can be read from it.
        """
        self.lost_rank = True
        kept = "the ranks that are left wrote no checkpoint"
        on_gpu = self.runtime.device.type == "cuda"
        if self.weights.sharded or on_gpu:
            last = checkpoints.newest(self.folder.checkpoints) if self.folder else None
            gone = "this rank's GPU waits for it" if on_gpu else "its part of the weights went with it"
            found = "there is no checkpoint yet" if last is None else f"the last checkpoint is that of step {last}"
            kept = f"{gone}, and {found}"
        elif self.folder is not None and self.runtime.is_main:
            self._checkpoint(done)
            kept = f"a checkpoint was written after step {done}"
        return TrainingError(
            f"another rank was lost after step {done} of {self.config.steps}; {kept}",
            expected=f"{self.runtime.world} ranks",
            do=f"see why it ended (killed, out of memory), then: {self.plan.resume}, on any number of ranks"
            if self.plan.resume
            else "see why it ended (killed, out of memory) and start again",
        )

    def _interruption(self, done: int, interruption: _Interruption) -> Interrupted:
        return Interrupted(
            f"interrupted after step {done} of {self.config.steps}; a checkpoint was written",
            signal_number=interruption.signal_number or signal.SIGTERM,
            do=f"go on with: {self.plan.resume}" if self.plan.resume else "",
        )


def _phase_starts(method: Method, steps: int) -> list[int]:
    """First step of each phase."""
    starts, behind = [], 0.0
    for phase in method.phases():
        starts.append(round(behind * steps))
        behind += phase.share
    return starts


@dataclass
class _Interruption:
    signal_number: int | None = None


@contextmanager
def _interruptions() -> Generator[_Interruption]:
    """SIGINT and SIGTERM are noted; the loop finishes its step. A second SIGINT stops at once."""
    interruption = _Interruption()

    def note(number: int, _frame: FrameType | None) -> None:
        if interruption.signal_number is not None:
            raise KeyboardInterrupt
        interruption.signal_number = number

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: whoever runs it there deals with signals
        yield interruption
        return
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
