"""The training loop: what happens in a step, and in which order things happen between steps."""

from __future__ import annotations

import math
import resource
import sys
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from aotdist.errors import AotdistError
from aotdist.launch.compiling import compile_summary
from aotdist.launch.config import JobOptions
from aotdist.launch.data import Batch, ByteStream, Windows, validation_batches
from aotdist.launch.metrics import StepRecord, ValidationRecord
from aotdist.launch.optim import clip_gradients, learning_rate, set_learning_rate
from aotdist.launch.parallel import World, sync_gradients
from aotdist.launch.progress import Reporter
from aotdist.launch.shutdown import StopRequest


class TrainingDiverged(AotdistError):
    """The loss is no longer a number."""


@dataclass(slots=True)
class TrainState:
    """All that training changes: what a checkpoint has to hold.

    Args:
        model: its parameters.
        optimizer: its moments.
        stream: its position in the text.
        step: optimizer steps taken.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    stream: ByteStream
    step: int = 0


class StepTensors(NamedTuple):
    """What a step leaves on the device, not yet waited for.

    Shapes: scalars; `loss` is this rank's mean, `grad_norm` is the same on all ranks.
    """

    loss: Tensor
    grad_norm: Tensor


@dataclass(slots=True)
class Unreported:
    """Steps taken since the last report, and when the first of them began."""

    steps: list[StepTensors] = field(default_factory=list)
    since: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, slots=True)
class Trainer:
    """Trains a state in a world.

    Args:
        options: the job's.
        world: the ranks.
        held_out: the validation text.
        stop: asks for an early end.
        reporter: is told of everything that is measured.
    """

    options: JobOptions
    world: World
    held_out: Windows
    stop: StopRequest
    reporter: Reporter

    def run(self, state: TrainState) -> bool:
        """Trains to the last step; False when it was stopped earlier, all ranks after the same step.

        Raises:
            TrainingDiverged: the loss is no longer finite.
        """
        if state.step == 0:
            self._validate(state)
        unreported, first_step = Unreported(), state.step + 1
        while state.step < self.options.optim.steps:
            unreported.steps.append(self._take_step(state))
            is_first, is_last = state.step == first_step, state.step == self.options.optim.steps
            if not (is_first or is_last or _divides(self.options.run.log_every, state.step)):
                continue
            if self._report(state, unreported):
                return False
            if is_first:
                self._show_compile_summary(state)
            if is_last or _divides(self.options.run.validate_every, state.step):
                self._validate(state)
            unreported = Unreported()
        return True

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

    def _report(self, state: TrainState, unreported: Unreported) -> bool:
        """Records the steps, and returns whether any rank was asked to stop.

        The answer travels with the losses, so that all ranks stop after the same step at no cost.
        """
        asked = torch.tensor(float(self.stop.signal_number is not None), device=self.world.device)
        told = torch.stack([*(tensors.loss for tensors in unreported.steps), asked])
        *losses, stopping = self.world.mean(told).tolist()
        seconds = (time.perf_counter() - unreported.since) / len(unreported.steps)
        first = state.step - len(unreported.steps) + 1
        for step, (loss, tensors) in enumerate(zip(losses, unreported.steps, strict=True), start=first):
            self._record_step(step, loss, float(tensors.grad_norm), seconds)
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
        data = self.options.data
        sequences = data.batch_size * self.world.layout.num_dp_ranks * self.options.optim.accumulate
        return sequences * data.seq_len

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
        self.reporter.record(ValidationRecord(state.step, loss, state.step * self._tokens_per_step()))

    def _show_compile_summary(self, state: TrainState) -> None:
        summary = compile_summary(state.model, self.options.compile)
        if summary is not None:
            self.reporter.section("compiled", summary)


def _divides(period: int, step: int) -> bool:
    """Whether `step` is due; a period of 0 never is."""
    return period > 0 and step % period == 0


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this process has held: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
