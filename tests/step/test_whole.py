"""Functions that call `backward()`, read and assign `.grad`, and let optimizers step: each beside eager."""

from __future__ import annotations

import copy
import math
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import aotdist
from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.optimizers import intercept_steps
from tests.step.written import (
    Build,
    Written,
    assert_same,
    classifier,
    compiled_beside_eager,
    cross_entropy,
    labelled,
    placed,
    unplaced,
)

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
STEPS: dict[str, tuple[Build, int]] = {}
"""Steps, each with the number of programs that it is compiled to."""


def written(name: str, programs: int = 1) -> Callable[[Build], Build]:
    def add(build: Build) -> Build:
        STEPS[name] = build, programs
        return build

    return add


def adamw(params: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, **options)


def training(
    make_optimizer: MakeOptimizer = adamw,
    make_model: Callable[[], nn.Module] = classifier,
    before_step: Callable[[nn.Module], Any] = lambda model: None,
) -> Written:
    """The step of every tutorial; `before_step` is what is done to the gradients."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        loss.backward()
        before_step(model)
        optimizer.step()
        return loss.detach()

    return Written(step, [model], [optimizer])


def stepping(
    body: Callable[[nn.Module, Any, torch.Tensor, torch.Tensor], Any],
    make_optimizer: MakeOptimizer = adamw,
    between: Callable[[int, nn.Module, Any], Any] = lambda at, model, optimizer: None,
) -> Written:
    """A step that closes over a model and its optimizer."""
    model = classifier()
    optimizer = make_optimizer(model.parameters())
    return Written(
        lambda x, y: body(model, optimizer, x, y),
        [model],
        [optimizer],
        between=lambda at: between(at, model, optimizer),
    )


def named(name: str, **options: Any) -> MakeOptimizer:
    return lambda params: getattr(torch.optim, name)(params, **options)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": named("AdamW", lr=0.01),
    "AdamW foreach": named("AdamW", lr=0.01, foreach=True),
    "AdamW fused": named("AdamW", lr=0.01, fused=True),
    "Adam amsgrad, maximize": named("Adam", lr=0.01, amsgrad=True, maximize=True),
    "SGD": named("SGD", lr=0.1),
    "SGD with momentum": named("SGD", lr=0.1, momentum=0.9, nesterov=True),
    **{
        name: named(name)
        for name in (
            "RMSprop",
            "Adagrad",
            "NAdam",
            "RAdam",
            "Adamax",
            "Adadelta",
            "ASGD",
            "Rprop",
            "Adafactor",
        )
    },
}
for _name, _make in OPTIMIZERS.items():
    STEPS[_name] = (lambda make=_make: training(make)), 1
STEPS["clip_grad_norm_"] = (
    (lambda: training(before_step=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1))),
    1,
)
STEPS["clip_grad_value_"] = (
    (lambda: training(before_step=lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01))),
    1,
)


@written("micro-batches in a loop")
def micro_batches() -> Written:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        total = 0
        for at in range(0, 6, 2):
            loss = cross_entropy(model, x[at : at + 2], y[at : at + 2]) / 3
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return stepping(step)


@written("gradients are accumulated, the loss is returned as it is", programs=2)
def accumulates() -> Written:
    """The second program is the one that finds gradients."""

    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = cross_entropy(model, x, y)
        loss.backward()
        return loss

    def between(at: int, model: nn.Module, optimizer: Any) -> None:
        if at % 2:
            optimizer.step()
            optimizer.zero_grad()
        else:
            model[0].weight.grad.mul_(2)

    return stepping(step, between=between)


@written("the loss of chosen rows is returned as it is")
def chosen_rows() -> Written:
    """What chose them is a list of tensors, which the backward has freed."""

    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        rows = y.argsort()[:4]
        loss = F.cross_entropy(model(x)[rows], y[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return stepping(step)


@written("gradients are left, and the loss is a number")
def leaves_gradients() -> Written:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> float:
        loss = cross_entropy(model, x, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return stepping(step)


@written("two losses, retain_graph, gradients set to zero")
def two_losses() -> Written:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = model(x)
        loss, norm = F.cross_entropy(logits, y), logits.square().mean()
        loss.backward(retain_graph=True)
        norm.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach(), logits.detach()

    return stepping(step)


@written("torch.autograd.backward with a gradient for each result")
def autograd_backward() -> Written:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = model(x)
        loss, squares = F.cross_entropy(logits, y), logits.square()
        torch.autograd.backward([loss, squares], [None, torch.full_like(squares, 0.1)])
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return stepping(step)


@written("backward(inputs=)")
def backward_of_some() -> Written:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = cross_entropy(model, x, y)
        loss.backward(inputs=list(model[0].parameters()), retain_graph=True)
        loss.backward(inputs=list(model[3].parameters()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    return stepping(step)


@written("gradients by autograd.grad, assigned and returned")
def assigned_gradients() -> Written:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        params = list(model.parameters())
        grads = torch.autograd.grad(cross_entropy(model, x, y), params)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad * 2
        optimizer.step()
        return [param.grad for param in params]

    return stepping(step)


@written("SGD by hand, with momentum in a list")
def by_hand() -> Written:
    model = classifier()
    momenta = [torch.zeros_like(param) for param in model.parameters()]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(model, x, y)
        loss.backward()
        with torch.no_grad():
            for param, momentum in zip(model.parameters(), momenta, strict=True):
                momentum.mul_(0.9).add_(param.grad)
                param.sub_(momentum * 0.1)
                param.grad = None
        return loss.detach()

    return Written(step, [model], logs=lambda: momenta)


@written("weight decay by hand")
def weight_decay() -> Written:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = cross_entropy(model, x, y)
        loss.backward()
        with torch.no_grad():
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.mul_(1 - group["lr"] * 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return stepping(step)


@written("gradients are scaled by hand, by their data")
def scaled_by_data() -> Written:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        loss.backward()
        for param in model.parameters():
            param.grad.data *= 0.5
            param.data -= 0.1 * param.data
        optimizer.step()
        return loss.detach()

    return stepping(step)


@written("FGSM: the gradient of a leaf that is made inside")
def adversarial() -> Written:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        delta = torch.zeros_like(x, requires_grad=True)
        cross_entropy(model, x + delta, y).backward()
        optimizer.zero_grad()
        loss = cross_entropy(model, x + 0.1 * delta.grad.sign(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return stepping(step)


@written("checkpoints of both kinds")
def checkpointed() -> Written:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        hidden = checkpoint(model[0], x, use_reentrant=False)
        loss = F.cross_entropy(checkpoint(model[1:], hidden, use_reentrant=True), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return stepping(step)


@written("two updates in one call")
def two_updates() -> Written:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        for _ in range(2):
            optimizer.zero_grad()
            loss = cross_entropy(model, x, y)
            loss.backward()
            optimizer.step()
        return loss.detach()

    return stepping(step)


@written("a closure that the optimizer calls")
def closure() -> Written:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        def evaluate() -> torch.Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model, x, y)
            loss.backward()
            return loss

        return optimizer.step(evaluate).detach()

    return stepping(step)


@written("model and optimizer are arguments")
def as_arguments() -> Written:
    model = classifier()
    optimizer = adamw(model.parameters())
    schedule, scaler = lr_scheduler.StepLR(optimizer, 1), torch.amp.GradScaler("cpu", init_scale=16.0)

    def step(model: Any, optimizer: Any, schedule: Any, scaler: Any, x: Any, y: Any) -> torch.Tensor:
        loss = cross_entropy(model, x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        return loss.detach()

    def batch(at: int) -> tuple[Any, ...]:
        return model, optimizer, schedule, scaler, *labelled(at)

    return Written(step, [model], [optimizer, schedule, scaler], batch=batch)


class Trainer:
    """Counts its steps, chooses the learning rate by the count, and updates at every second call."""

    def __init__(self) -> None:
        self.model = classifier()
        self.optimizers = {
            "first": torch.optim.SGD(self.model[0].parameters(), lr=0.1, momentum=0.9),
            "last": adamw(self.model[3].parameters()),
        }
        self.steps, self.history = 0, list[float]()

    def training_step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        lr = 0.5 * (1 + math.cos(math.pi * self.steps / 10)) * 0.1
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = lr
        loss = cross_entropy(self.model, x, y) / 2
        loss.backward()
        self.steps += 1
        if self.steps % 2 == 0:
            for optimizer in self.optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
        self.history.append(loss.item())
        return loss.detach()


@written("a method: counts, a learning rate by hand, an update at every second call", programs=2)
def method() -> Written:
    """One updates, the other does not."""
    trainer = Trainer()
    keeps = list(trainer.optimizers.values())
    return Written(trainer.training_step, [trainer.model], keeps, lambda: (trainer.steps, trainer.history))


class Patient(lr_scheduler.ReduceLROnPlateau):
    """Is given a loss with its history, of which PyTorch's own warns."""

    def step(self, metrics: Any, epoch: Any = None) -> None:
        super().step(metrics.detach())


def scheduled(make: Callable[[torch.optim.Optimizer], Any], by_loss: bool = False) -> Written:
    model = classifier()
    optimizer = adamw(model.parameters())
    schedule = make(optimizer)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = cross_entropy(model, x, y)
        loss.backward()
        optimizer.step()
        rate = optimizer.param_groups[0]["lr"]
        schedule.step(*([loss] if by_loss else []))
        optimizer.zero_grad()
        return loss.detach(), rate

    return Written(step, [model], [optimizer], lambda: (schedule.last_epoch, schedule.get_last_lr()))


SCHEDULES: dict[str, Build] = {
    "CosineAnnealingLR": lambda: scheduled(lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10)),
    "OneCycleLR": lambda: scheduled(
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    ),
    "CosineAnnealingWarmRestarts": lambda: scheduled(
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
    ),
    "ReduceLROnPlateau": lambda: scheduled(lambda optimizer: Patient(optimizer, patience=1), by_loss=True),
}
STEPS |= {name: (build, 1) for name, build in SCHEDULES.items()}


def scheduled_first(before_backward: bool) -> Written:
    """A schedule steps before the optimizer, and so before anything shows that this is a step."""
    model = classifier()
    optimizer = adamw(model.parameters())
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if before_backward:
            schedule.step()
        loss = cross_entropy(model, x, y)
        loss.backward()
        if not before_backward:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Written(step, [model], [optimizer, schedule])


def logged(*makers: Callable[[torch.optim.Optimizer], Any]) -> Written:
    """Rates are kept before and after schedules' steps, of which some stand before an update."""
    model, log = classifier(), dict[str, Any](before=[], after=[])
    optimizer = adamw(model.parameters())
    schedules = [make(optimizer) for make in makers]

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[float, Any]:
        for at in range(2):
            loss = cross_entropy(model, x[at::2], y[at::2])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log["before"].append(optimizer.param_groups[0]["lr"])
            for schedule in schedules:
                schedule.step()
                log["after"].append(schedule.get_last_lr()[0])
        log["half"] = optimizer.param_groups[0]["lr"] / 2
        return loss.item(), optimizer.param_groups[0]["lr"]

    return Written(step, [model], [optimizer, *schedules], logs=lambda: copy.deepcopy(log))


class WarmedUp(lr_scheduler.LRScheduler):
    """Another schedule, after three steps of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.after = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [rate * (self.last_epoch + 1) / 4 for rate in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch < 3:
            super().step()
        else:
            self.after.step()
            self._last_lr = self.after.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "after": self.after.state_dict()}


@written("schedules given the epoch, of which a batch is a part", programs=2)
def of_epochs() -> Written:
    model = classifier()
    optimizer = adamw(model.parameters())
    schedule = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)

    def step(x: torch.Tensor, y: torch.Tensor, at: int) -> torch.Tensor:
        loss = cross_entropy(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step(at / 3)  # type: ignore[arg-type]
        return loss.detach()

    return Written(step, [model], [optimizer, schedule], batch=lambda at: (*labelled(at), at))


def _in_turn(optimizer: torch.optim.Optimizer) -> Any:
    schedules = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
        lr_scheduler.ExponentialLR(optimizer, 0.9),
    ]
    return lr_scheduler.SequentialLR(optimizer, schedules, milestones=[3])


def _at_once(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(optimizer, 0.9) for _ in range(2)])


STEPS |= {
    "a schedule steps before the forward": (lambda: scheduled_first(before_backward=True), 1),
    "a schedule steps before the update": (lambda: scheduled_first(before_backward=False), 1),
    "rates logged, cosine": (lambda: logged(lambda of: lr_scheduler.CosineAnnealingLR(of, 20)), 1),
    "rates logged, one cycle": (
        lambda: logged(lambda of: lr_scheduler.OneCycleLR(of, 0.1, total_steps=30)),
        1,
    ),
    "rates logged, a schedule of one's own in which another steps": (lambda: logged(WarmedUp), 2),
    "rates logged, one schedule after the other": (lambda: logged(_in_turn), 1),
    "rates logged, two schedules at once": (lambda: logged(_at_once), 1),
    "rates logged, two schedules, each steps": (lambda: logged(_at_once, _in_turn), 1),
}


@written("scaler, autocast around all, AveragedModel")
def scaled() -> Written:
    model = unplaced()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    placed(model, average.module)
    optimizer = adamw(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model, x, y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            average.update_parameters(model)
        return loss.detach()

    def overflowing(at: int) -> tuple[Any, ...]:
        x, y = labelled(at)
        return (x * float("inf") if at == 2 else x), y

    return Written(step, [model, average], [optimizer, scaler], batch=overflowing)


@written("a compiled model inside")
def compiled_inside() -> Written:
    model = classifier()
    inner, optimizer = aotdist.compile(model, backend="fx"), adamw(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(inner, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Written(step, [model], [optimizer])


@written("a parametrisation that keeps buffers, a tied weight, batch norm, dropout; evaluated between")
def evaluated_between() -> Written:
    def make_model() -> nn.Module:
        first, tied = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8)
        tied.weight = (second := nn.Linear(8, 8)).weight
        model = nn.Sequential(first, nn.BatchNorm1d(8), nn.Dropout(0.3), second, tied)
        placed(model)
        return model

    made, seen = training(make_model=make_model), list[torch.Tensor]()

    def between(at: int) -> None:
        (model,) = made.models
        model.eval()
        with torch.no_grad():
            seen.append(model(labelled(99)[0]))
        model.train()

    made.logs, made.between = lambda: seen, between
    return made


@written("parameters frozen for some calls", programs=2)
def frozen_between() -> Written:
    return stepping(
        lambda model, optimizer, x, y: _updated(model, optimizer, cross_entropy(model, x, y)),
        between=lambda at, model, optimizer: model[0].requires_grad_(at in (2, 3)),
    )


@written("add_param_group between calls", programs=2)
def group_added() -> Written:
    model, late = classifier(), nn.ParameterList([torch.ones(4)])
    optimizer = adamw(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x) * late[0], y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def between(at: int) -> None:
        if at == 1:
            optimizer.add_param_group({"params": [late[0]], "lr": 0.1})

    return Written(step, [model, late], [optimizer], between=between)


@written("states loaded between calls")
def loaded_between() -> Written:
    made, saved = training(), list[Any]()

    def between(at: int) -> None:
        if at == 1:
            saved.extend(copy.deepcopy(holder.state_dict()) for holder in (*made.models, *made.keeps))
        if at == 3:
            for holder, state in zip((*made.models, *made.keeps), saved, strict=True):
                holder.load_state_dict(state)

    made.between = between
    return made


@written("a distributed checkpoint is saved, and loaded, between calls")
def loaded_by_dcp() -> Written:
    made = training()
    (model,), (optimizer,), folder = made.models, made.keeps, [tempfile.mkdtemp()]
    if dist.is_initialized():
        dist.broadcast_object_list(folder)
    options: dict[str, Any] = {"checkpoint_id": folder[0], "no_dist": not dist.is_initialized()}

    def between(at: int) -> None:
        if at == 1:
            checkpoint_state = get_state_dict(model, optimizer)
            dcp.save(dict(zip(("model", "optimizer"), checkpoint_state, strict=True)), **options)
        if at == 3:
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.load(state, **options)
            loaded = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
            set_state_dict(model, optimizer, **loaded)
            if dist.is_initialized():
                dist.barrier()
            shutil.rmtree(folder[0], ignore_errors=True)

    made.between = between
    return made


@written("an optimizer's step alone")
def alone() -> Written:
    model = classifier()
    optimizer = adamw(model.parameters())

    def between(at: int) -> None:
        optimizer.zero_grad()
        cross_entropy(model, *labelled(at)).backward()

    return Written(lambda: optimizer.step(), [model], [optimizer], batch=lambda at: (), between=between)


def replaced_between(parts: dict[str, Any], make: Callable[[int], dict[str, Any]]) -> Written:
    """Parts are looked up at each call, and others are there from the third on."""
    parts.update(make(0))
    model = parts["model"]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(model, x, y)
        parts["scaler"].scale(loss).backward()
        parts["scaler"].step(parts["optimizer"])
        parts["scaler"].update()
        parts["schedule"].step()
        parts["optimizer"].zero_grad()
        return loss.detach()

    def logs() -> Any:
        return [parts[name].state_dict() for name in ("optimizer", "schedule", "scaler")]

    return Written(step, [model], logs=logs, between=lambda at: at == 2 and parts.update(make(1)))


def _replacing(*replaced: str) -> Build:
    def build() -> Written:
        parts = dict[str, Any](model=classifier())

        def make(at: int) -> dict[str, Any]:
            if at == 0 or "optimizer" in replaced:
                parts["optimizer"] = adamw(parts["model"].parameters())
            if at == 0 or "schedule" in replaced:
                parts["schedule"] = lr_scheduler.StepLR(parts["optimizer"], 1 + at)
            if at == 0 or "scaler" in replaced:
                parts["scaler"] = torch.amp.GradScaler("cpu", init_scale=4.0 + at, growth_interval=2)
            return parts

        return replaced_between(parts, make)

    return build


STEPS["the optimizer and its schedule are replaced between calls"] = _replacing("optimizer", "schedule"), 2
STEPS["the schedule is replaced between calls"] = _replacing("schedule"), 2
STEPS["the scaler is replaced between calls"] = _replacing("scaler"), 2


def _numbered(
    body: Callable[..., Any], number: Callable[[int], float], make_optimizer: MakeOptimizer = adamw
) -> Build:
    """A step that is given a number, another one at each call."""

    def build() -> Written:
        model = classifier()
        optimizer = make_optimizer(model.parameters())

        def step(x: torch.Tensor, y: torch.Tensor, given: float) -> Any:
            loss = body(optimizer, cross_entropy(model, x, y), given)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Written(step, [model], [optimizer], batch=lambda at: (*labelled(at), number(at)))

    return build


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _warm_up(optimizer: Any, loss: torch.Tensor, iteration: int) -> torch.Tensor:
    _set_rate(optimizer, 0.01 * min(1.0, (iteration + 1) / 4))
    return loss


def _cosine(optimizer: Any, loss: torch.Tensor, iteration: int) -> torch.Tensor:
    rate = 0.1 * iteration if iteration < 3 else 0.001 + 0.5 * 0.3 * (1 + math.cos(math.pi * iteration / 10))
    _set_rate(optimizer, rate)
    return loss


def _temperature(optimizer: Any, loss: torch.Tensor, temperature: float) -> torch.Tensor:
    return loss / temperature


def _power(optimizer: Any, loss: torch.Tensor, exponent: float) -> torch.Tensor:
    return (loss**exponent) * (1 - exponent)


STEPS["a rate that is computed from the iteration"] = _numbered(_warm_up, lambda at: at), 2
STEPS["a rate that is computed by SGD's"] = _numbered(_warm_up, lambda at: at, named("SGD", lr=0.1)), 2
STEPS["a rate that depends on the iteration in two ways"] = _numbered(_cosine, lambda at: at), 3
STEPS["a temperature"] = _numbered(_temperature, lambda at: 1 / (at + 1)), 2
STEPS["an exponent, of which the formula of a gradient computes"] = (
    _numbered(_power, lambda at: 1.5 + at / 7),
    4,
)


@written("a rate for the next step, by a count")
def rate_for_the_next() -> Written:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = _updated(model, optimizer, cross_entropy(model, x, y))
        counts["steps"] += 1
        _set_rate(optimizer, 0.1 / (counts["steps"] + 1))
        return loss

    counts = {"steps": 0}
    made = stepping(step)
    made.logs = lambda: dict(counts)
    return made


class Reversed(torch.autograd.Function):
    """Gradients change their sign, and are scaled by a number and by a tensor that is closed over."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -grad * ctx.factor * weight_of_reversed, None


weight_of_reversed = torch.tensor(0.5)


@written("domains that are told apart, by a number that changes (DANN)", 2)
def domains() -> Written:
    features, labels, of_domain = nn.Linear(8, 6), nn.Linear(6, 4), nn.Linear(6, 2)
    placed(features, labels, of_domain)
    model = nn.ModuleList([features, labels, of_domain])
    optimizer = adamw(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor, progress: float) -> float:
        factor = 2 / (1 + math.exp(-10 * progress)) - 1
        hidden = features(x)
        domains = of_domain(Reversed.apply(hidden, factor))
        loss = F.cross_entropy(labels(hidden), y) + F.cross_entropy(domains, y // 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Written(step, [model], [optimizer], batch=lambda at: (*labelled(at), at / 5))


@written("weights decay, and betas move, by the iteration", 2)
def decay_by_iteration() -> Written:
    """The first call leaves what the groups have; programs are specialised on it until then."""
    model = classifier()
    optimizer = adamw(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor, at: int) -> torch.Tensor:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.01 * (1 + 4 * at)
            group["betas"] = (0.9 - 0.01 * at, 0.999)
        return _updated(model, optimizer, cross_entropy(model, x, y))

    return Written(step, [model], [optimizer], batch=lambda at: (*labelled(at), at))


@written("an iteration that is kept, and a rate that follows from it", 2)
def kept_iteration() -> Written:
    model, state, log = classifier(), {"at": 0}, list[int]()
    optimizer = adamw(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor, at: int) -> torch.Tensor:
        state["at"] = at
        log.append(at)
        _set_rate(optimizer, 0.01 / (1 + at))
        loss = cross_entropy(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Written(
        step,
        [model],
        [optimizer],
        logs=lambda: (dict(state), list(log)),
        batch=lambda at: (*labelled(at), at),
    )


def _torchao(name: str) -> Build:
    def build() -> Written:
        from torchao import optim

        def make_model() -> nn.Module:
            model = nn.Sequential(nn.Linear(8, 1024, bias=False), nn.ReLU(), nn.Linear(1024, 8, bias=False))
            placed(model)
            return model

        return training(lambda params: getattr(optim, name)(params, lr=0.01), make_model)

    return build


STEPS["torchao, 8 bits"] = _torchao("AdamW8bit"), 1
STEPS["torchao, 4 bits"] = _torchao("Adam4bit"), 1


@pytest.mark.filterwarnings("ignore:Detected call of", "ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str) -> None:
    build, programs = STEPS[name]
    compiled = compiled_beside_eager(build, num_steps=10 if "that is computed" in name else 5)
    assert len(compiled.graphs) == programs
    for graphs in compiled.graphs:
        assert set(graphs) == {"inference"}  # nothing is left for autograd


@pytest.mark.parametrize("name", ["AdamW", "micro-batches in a loop"])
def test_by_inductor(name: str) -> None:
    compiled_beside_eager(STEPS[name][0], num_steps=3, backend="inductor")


@pytest.mark.parametrize(
    "name",
    [
        "clip_grad_norm_",
        "two losses, retain_graph, gradients set to zero",
        "gradients are accumulated, the loss is returned as it is",
    ],
)
def test_writes_are_counted_and_gradients_stay_the_objects_that_they_are(name: str) -> None:
    """As code that comes afterwards, and autograd, may ask."""
    found = []
    for wrap in (lambda step: step, lambda step: aotdist.compile(step, backend="fx")):
        torch.manual_seed(0)
        made, seen = STEPS[name][0](), list[Any]()
        step, params = wrap(made.step), list(made.models[0].parameters())
        for at in range(5):
            before = [param.grad for param in params]
            step(*labelled(at))
            for param, grad in zip(params, before, strict=True):
                now = param.grad
                seen.append((param._version, now is grad, now is None or now.is_leaf))
            made.between(at)
        found.append(seen)
    assert found[0] == found[1]


def test_lengths_that_change() -> None:
    def build() -> Written:
        made = training()
        made.batch = lambda at: tuple(each[: 3 + at % 4] for each in labelled(at))
        return made

    assert len(compiled_beside_eager(build, num_steps=7, settings={"dynamic": "auto"}).graphs) == 2


def test_an_optimizers_step_alone() -> None:
    trained = []
    for wrap in (lambda step: step, lambda step: aotdist.compile(step, backend="fx")):
        torch.manual_seed(0)
        model = classifier()
        optimizer = adamw(model.parameters())
        step = wrap(optimizer.step)
        for at in range(5):
            cross_entropy(model, *labelled(at)).backward()
            step()
            optimizer.zero_grad()
        trained.append((model.state_dict(), optimizer.state_dict()))
    assert_same(*trained, "state")
    assert len(step.graphs) == 1


def refused(body: Callable[..., Any], make_optimizer: MakeOptimizer = adamw, **options: Any) -> Any:
    """A step that has `body` in it, compiled, and its model."""
    model = classifier()
    optimizer = make_optimizer(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        return body(model, optimizer, cross_entropy(model, x, y))

    return aotdist.compile(step, backend="fx", **options), model, optimizer


def _updated(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def made_inside(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    _updated(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)


def test_an_optimizer_that_is_made_inside_is_refused() -> None:
    compiled, *_ = refused(made_inside)
    with pytest.raises(UnsupportedProgram, match="SGD is made inside of a compiled step"):
        for at in range(2):
            compiled(*labelled(at))


def test_a_loss_that_a_reentrant_checkpoint_hands_out_is_refused() -> None:
    model = classifier()
    optimizer = adamw(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        losses = list[torch.Tensor]()

        def first(x: torch.Tensor) -> torch.Tensor:
            hidden = model[0](x)
            losses.append(hidden.square().mean())
            return hidden.relu()

        loss = F.cross_entropy(model[1:](checkpoint(first, x, use_reentrant=True)), y)
        return _updated(model, optimizer, loss + losses[0])

    compiled = aotdist.compile(step, backend="fx")
    x, y = labelled(0)
    compiled(x.requires_grad_(), y)  # as it is written: the optimizer makes its state
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedProgram, match=r"checkpoint hands out(.|\n)*use_reentrant=False"):
        compiled(x, y)
    assert_same(model.state_dict(), before, "state")


def test_hooks_of_an_optimizer_that_come_and_go() -> None:
    compiled, _, optimizer = refused(_updated)
    for at in range(2):
        compiled(*labelled(at))
    handle = optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(UnsupportedProgram, match="AdamW has hooks of its step"):
        compiled(*labelled(2))
    handle.remove()
    compiled(*labelled(2))
    assert len(compiled.graphs) == 1


@pytest.mark.parametrize("kind", ["list", "generator", "loader", "loop over a loader"])
def test_batches_that_are_taken_inside_are_refused(kind: str) -> None:
    batches = [labelled(at) for at in range(4)]
    loader = DataLoader(batches, batch_size=None)
    source: Any = {"list": iter(batches), "generator": (one for one in batches), "loader": iter(loader)}.get(
        kind
    )
    model = classifier()
    optimizer = adamw(model.parameters())

    def step() -> Any:
        for x, y in loader if source is None else [next(source)]:
            _updated(model, optimizer, cross_entropy(model, x, y))

    with pytest.raises(UnsupportedProgram, match="takes an item from `(source|loader)`"):
        aotdist.compile(step, backend="fx")()
    assert len(list(loader if source is None else source)) == 4, "nothing was taken"


def _stepped_with_hooks(**options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    step, model, optimizer = refused(_updated, **options)
    calls = list[Any]()
    optimizer.register_step_post_hook(lambda *_: calls.append(None))
    model[0].weight.register_hook(lambda grad: grad * 2)
    return step, lambda: (model.state_dict(), optimizer.state_dict(), len(calls))


def _made_anew(**options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    step, model, _ = refused(made_inside, **options)
    return step, model.state_dict


@pytest.mark.parametrize("make", [_stepped_with_hooks, _made_anew])
def test_refused_steps_may_run_as_they_were_written(make: Callable[..., tuple[Any, Any]]) -> None:
    (ours, our_state), (eager, eager_state) = make(settings={"unsupported": "eager"}), make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for at in range(4):
            assert_same(ours(*labelled(at)), eager.__wrapped__(*labelled(at)), f"step {at}")
            assert_same(our_state(), eager_state(), f"state {at}")
    assert len(caught) == 1 and "run as they were written" in str(caught[0].message)


def test_optimizers_of_other_threads_are_not_noticed() -> None:
    stop, failures, first = threading.Event(), list[BaseException](), threading.Event()

    def train_another() -> None:
        other = training(named("SGD", lr=0.01, momentum=0.9))
        try:
            while not stop.is_set():
                other.step(*labelled(0))
                first.set()
                assert all(param.grad is not None for param in other.models[0].parameters())
        except BaseException as failure:
            failures.append(failure)
            first.set()

    thread = threading.Thread(target=train_another)
    thread.start()
    first.wait()
    try:
        compiled = compiled_beside_eager(training, num_steps=4)
    finally:
        stop.set()
        thread.join()
    assert not failures
    assert len(compiled.graphs) == 1


def test_what_another_thread_listens_to_is_no_hook() -> None:
    compiled, *_ = refused(_updated)
    for at in range(2):
        compiled(*labelled(at))
    with ThreadPoolExecutor(1) as pool:
        listening = intercept_steps(lambda _: None, lambda _: None)  # as while it captures
        pool.submit(listening.__enter__).result()
        compiled(*labelled(2))
        pool.submit(listening.__exit__, None, None, None).result()
    assert len(compiled.graphs) == 1


@pytest.mark.parametrize("num_before", [0, 1, 3], ids=["first call", "capture", "another capture"])
def test_a_step_that_raises_leaves_everything_as_it_was(num_before: int) -> None:
    """Of the first call, which runs as it is written, the state is eager's: it is left out."""
    model = classifier()
    optimizer = adamw(model.parameters())
    schedule, counts = lr_scheduler.StepLR(optimizer, 1), {"steps": 0}

    def step(x: torch.Tensor, y: torch.Tensor, fails: bool = False) -> torch.Tensor:
        loss = cross_entropy(model, x, y) + torch.rand(())
        loss.backward()
        counts["steps"] += 1
        if fails:
            raise RuntimeError("midway")
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        if fails is None:
            raise RuntimeError("after the update")
        return loss.detach()

    def found() -> Any:
        grads = [param.grad for param in model.parameters()]
        held = model.state_dict(), optimizer.state_dict(), schedule.state_dict(), grads, counts
        return copy.deepcopy(held), torch.get_rng_state(), [param._version for param in model.parameters()]

    compiled = aotdist.compile(step, backend="fx")
    for at in range(num_before):
        compiled(*labelled(at))
    before, grads = found(), [param.grad for param in model.parameters()]
    for fails in (True, None) if num_before else ():
        with pytest.raises(RuntimeError, match="midway|after the update"):
            compiled(*labelled(9), fails=fails)
        assert_same(found(), before, "state")
        assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))
    compiled(*labelled(9))
    assert counts["steps"] == num_before + 1


@pytest.mark.parametrize("functional", [False, True])
def test_lists_of_16_bits_are_multiplied_as_written(functional: bool) -> None:
    """Averages, weights with momentum; in place a CPU rounds the number first, otherwise it does not."""
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(16, 16).bfloat16()
        average = [each.detach().clone() for each in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1, foreach=True)

        def step(
            x: torch.Tensor, model: Any = model, average: Any = average, optimizer: Any = optimizer
        ) -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                if functional:
                    torch._foreach_copy_(average, torch._foreach_mul(average, 1 / 3))
                else:
                    torch._foreach_mul_(average, [1 / 3, 0.7])
                torch._foreach_add_(average, list(model.parameters()), alpha=0.1)

        call = aotdist.compile(step, backend="fx") if compiles else step
        for _ in range(3):
            call(torch.randn(8, 16).bfloat16())
        found.append([*model.parameters(), *average])
        versions = [each._version for each in found[-1]]
        found[-1] = [*found[-1], torch.tensor(versions)]
    assert all(map(torch.equal, *found))


def test_products_of_16_bits_and_numbers_are_rounded_as_written() -> None:
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> None:
            between = model[0](x)
            model[1](between.lerp(torch.ones_like(between), 0.3)).exp().sum().backward()
            optimizer.step()

        call = aotdist.compile(step, backend="fx") if compiles else step
        for _ in range(3):
            call(torch.randn(8, 16).bfloat16())
        found.append([*model.parameters(), *(each.grad for each in model.parameters())])
    assert all(map(torch.equal, *found))
