"""The training loop, step by step."""

from __future__ import annotations

import math
import resource
import sys
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

import aotdist
from aotdist.errors import AotdistError
from aotdist.launch.checkpoints.saver import Saver
from aotdist.launch.checkpoints.snapshot import TrainState
from aotdist.launch.config import JobOptions
from aotdist.launch.data import Batch, Windows, validation_batches
from aotdist.launch.metrics import StepRecord, ValidationRecord
from aotdist.launch.optim import clip_gradients, learning_rate, set_learning_rate
from aotdist.launch.parallel import World, sync_gradients
from aotdist.launch.profiling import StepProfiler
from aotdist.launch.progress import Reporter
from aotdist.launch.resuming import sequences
from aotdist.launch.shutdown import StopRequest


class TrainingDiverged(AotdistError):
    """The loss is no longer a number."""


class StepTensors(NamedTuple):
    """Results of a step, still on the device and maybe not computed yet.

    Shapes: scalars; `loss` is this rank's mean, `grad_norm` is the same on all ranks.
    """

    loss: Tensor
    grad_norm: Tensor


@dataclass(frozen=True, slots=True)
class Trainer:
    """Trains a state in a world."""

    options: JobOptions
    world: World
    held_out: Windows
    stop: StopRequest
    reporter: Reporter
    saver: Saver
    profiler: StepProfiler

    def run(self, state: TrainState) -> bool:
        """Trains to the last step; returns False if stopped earlier, on all ranks after the same step.

        Raises:
            TrainingDiverged: the loss is no longer finite.
            CheckpointFailed: the last checkpoint could not be written.
        """
        finished = self._train(state)
        if self.saver.has_save:
            self.reporter.record(self.saver.collect())
        last = self.saver.save_last(state)
        if last is not None:
            self.reporter.record(last)
        return finished

    def _train(self, state: TrainState) -> bool:
        if self._needs_validation(state):
            self._validate(state)
        first_step, since, unreported = state.step + 1, time.perf_counter(), list[StepTensors]()
        while state.step < self.options.optim.steps:
            with self.profiler.around(state.step + 1):
                unreported.append(self._take_step(state))
            if not (state.step == first_step or self._reports_after(state.step)):
                continue
            if self._report(state, unreported, since):
                return False
            if state.step == first_step:
                self._show_compile_summary(state.model)
            if self._needs_validation(state):
                self._validate(state)
            if self.saver.is_due(state.step) and state.step < self.options.optim.steps:
                self._save(state)
            since, unreported = time.perf_counter(), []
        return True

    def _reports_after(self, step: int) -> bool:
        """Whether to wait for the results of the steps so far, and record them."""
        run = self.options.run
        is_last = step == self.options.optim.steps
        is_due = _divides(run.log_every, step) or _divides(run.validate_every, step)
        return is_last or is_due or self.saver.is_due(step)

    def _needs_validation(self, state: TrainState) -> bool:
        """Whether to validate the model now; also after a resume, if the run was stopped before it did."""
        is_end = state.step in (0, self.options.optim.steps)
        is_due = is_end or _divides(self.options.run.validate_every, state.step)
        return is_due and state.validated < state.step

    def _save(self, state: TrainState) -> None:
        if self.saver.has_save:
            self.reporter.record(self.saver.collect())
        self.saver.start(state)

    def _take_step(self, state: TrainState) -> StepTensors:
        optim = self.options.optim
        state.model.train()
        losses: list[Tensor] = []
        for micro_step in range(1, optim.accumulate + 1):
            sync_gradients(state.model, optim.sync_every_micro_step or micro_step == optim.accumulate)
            loss = self._loss(state.model, next(state.stream)) / optim.accumulate
            loss.backward()
            losses.append(loss.detach())
        grad_norm = clip_gradients(state.model, optim.clip_norm)
        state.step += 1
        set_learning_rate(state.optimizer, learning_rate(state.step, optim))
        state.optimizer.step()
        state.optimizer.zero_grad()
        return StepTensors(torch.stack(losses).sum(), grad_norm)

    def _loss(self, model: nn.Module, batch: Batch) -> Tensor:
        tokens, targets = (part.to(self.world.device, non_blocking=True) for part in batch)
        with self.world.autocast():
            return model(tokens, targets)

    def _report(self, state: TrainState, steps: list[StepTensors], since: float) -> bool:
        """Records the steps taken since the last report, and returns whether any rank was asked to stop.

        The answer travels with the losses, so that all ranks stop after the same step at no extra cost. So
        does whether their save is done: all learn of its end, or its failure, after the same step.
        """
        flags = [float(self.stop.signal_number is not None), float(self.saver.is_writing)]
        values = [*(tensors.loss for tensors in steps), *torch.tensor(flags, device=self.world.device)]
        *losses, stopping, writing = self.world.mean(torch.stack(values)).tolist()
        seconds = (time.perf_counter() - since) / len(steps)
        first = state.step - len(steps) + 1
        for step, (loss, tensors) in enumerate(zip(losses, steps, strict=True), start=first):
            self._record_step(step, loss, float(tensors.grad_norm), seconds)
        if self.saver.has_save and not writing:
            self.reporter.record(self.saver.collect())
        return stopping > 0

    def _record_step(self, step: int, loss: float, grad_norm: float, seconds: float) -> None:
        tokens = self._tokens_per_step()
        self.reporter.record(
            StepRecord(
                step=step,
                loss=loss,
                grad_norm=grad_norm,
                lr=learning_rate(step, self.options.optim),
                tokens=step * tokens,
                seconds=seconds,
                tokens_per_s=tokens / seconds,
                memory_bytes=peak_memory_bytes(self.world.device),
            )
        )
        if not math.isfinite(loss):
            raise TrainingDiverged(
                f"the loss of step {step} is {loss}",
                stage="launch",
                fix="lower --optim.lr, or lengthen --optim.warmup-steps",
            )

    def _tokens_per_step(self) -> int:
        return sequences(self.options, self.world.layout.num_dp_ranks) * self.options.data.seq_len

    @torch.no_grad()
    def _validate(self, state: TrainState) -> None:
        state.model.eval()
        batches = validation_batches(
            self.held_out,
            num_batches=self.options.run.validation_batches,
            batch_size=self.options.data.batch_size,
            rank=self.world.dp_rank,
            num_ranks=self.world.layout.num_dp_ranks,
        )
        losses = torch.stack([self._loss(state.model, batch) for batch in batches])
        loss = float(self.world.mean(losses.double().mean()))
        state.validated = state.step
        self.reporter.record(ValidationRecord(state.step, loss, state.step * self._tokens_per_step()))

    def _show_compile_summary(self, model: nn.Module) -> None:
        if self.options.compile.backend != "eager":
            self.reporter.section("compiled", str(aotdist.explain(model)))


def _divides(period: int, step: int) -> bool:
    """Whether `step` is due; a period of 0 never is."""
    return period > 0 and step % period == 0


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: allocated memory on a GPU, resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
