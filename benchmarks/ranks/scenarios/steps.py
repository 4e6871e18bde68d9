"""What is compiled is alike, and is called otherwise: modes, branches, skipped and extra steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

import aotdist
from benchmarks.ranks.part import WIDTH, Part, everyone, mlp, sgd, weights_of
from benchmarks.ranks.scenarios.scenario import Scenario
from benchmarks.ranks.vocabulary import timeout_s

LATER = 2
"""The step at which a rank does otherwise what all have done alike before."""


class Flagged(nn.Module):
    """Two layers, of which a flag of the call leaves one out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, short: bool = False) -> torch.Tensor:
        x = self.a(x).relu()
        return x if short else self.b(x)


class ByLength(Flagged):
    """Leaves the layer out where a batch is long."""

    def forward(self, x: torch.Tensor, short: bool = False) -> torch.Tensor:
        return super().forward(x, short or x.shape[0] > WIDTH)


class Recomputed(Flagged):
    """Recomputes its first layer in the backward, or not."""

    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        self.recomputed = recomputed

    def forward(self, x: torch.Tensor, short: bool = False) -> torch.Tensor:
        x = checkpoint(self.a, x, use_reentrant=False) if self.recomputed else self.a(x)
        return self.b(x.relu())


def backward_of(loss: torch.Tensor, odd: bool) -> None:
    torch.autograd.backward(loss)


def trains(
    *,
    model: Callable[[], nn.Module] = mlp,
    num_steps: int = 4,
    odd_from: int = LATER,
    odd_until: int | None = None,
    forward: Callable[[nn.Module, torch.Tensor, bool], torch.Tensor] = lambda model, x, odd: model(x),
    backward: Callable[[torch.Tensor, bool], object] = backward_of,
    update: Callable[[torch.optim.Optimizer, nn.Module, bool], object] = lambda sgd, model, odd: sgd.step(),
    before: Callable[[nn.Module, torch.Tensor, bool], object] = lambda model, x, odd: None,
) -> Callable[[Part], None]:
    """Train; the parts of a step are told whether this rank does them otherwise.

    Args:
        model: makes it.
        num_steps: how many.
        odd_from: the step at which the odd rank begins to do otherwise.
        odd_until: the step at which it ends that; one step later by default.
        forward: from the model and a batch to the output.
        backward: of the loss.
        update: the optimizer's step.
        before: comes first in a step.
    """

    def act(part: Part) -> None:
        trained = part.model(model())
        optimizer = sgd(trained)
        for step, x in part.batches(num_steps):
            odd = part.odd and odd_from <= step < (odd_from + 1 if odd_until is None else odd_until)
            before(trained, x, odd)
            loss = forward(trained, x, odd).square().mean()
            backward(loss, odd)
            update(optimizer, trained, odd)
            optimizer.zero_grad()
            part.note(loss=loss, weights=weights_of(trained))

    return act


def _unless(act: Callable[..., object]) -> Callable[..., None]:
    """`act`, left out by a rank that is odd."""

    def acting(*args: Any) -> None:
        if not args[-1]:
            act(*args[:-1])

    return acting


def _if(act: Callable[..., object]) -> Callable[..., None]:
    """`act`, on a rank that is odd only."""

    def acting(*args: Any) -> None:
        if args[-1]:
            act(*args[:-1])

    return acting


def skipping_backward() -> Callable[[Part], None]:
    return trains(
        backward=_unless(torch.Tensor.backward), update=lambda optimizer, model, odd: odd or optimizer.step()
    )


def evaluated(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x)


def without_grad(odd_from: int) -> Callable[[Part], None]:
    """A step without gradients, and so without a backward."""

    def forward(model: nn.Module, x: torch.Tensor, odd: bool) -> torch.Tensor:
        return evaluated(model, x) if odd else model(x)

    def update(optimizer: torch.optim.Optimizer, model: nn.Module, odd: bool) -> None:
        if not odd:
            optimizer.step()

    return trains(forward=forward, backward=_unless(torch.Tensor.backward), update=update, odd_from=odd_from)


def called(model: nn.Module, x: torch.Tensor) -> None:
    model(x)


def at_barrier(model: nn.Module, x: torch.Tensor) -> None:
    dist.barrier()


def after_evaluation(part: Part) -> None:
    """Both ranks train and evaluate alike, until one evaluates where the other trains."""
    model = part.model(mlp())
    optimizer = sgd(model)
    for step, x in part.batches(5):
        evaluates = step == 1 or (part.odd and step == 3)
        loss = (evaluated(model, x) if evaluates else model(x)).square().mean()
        if not evaluates:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        part.note(loss=loss, weights=weights_of(model))


def flipped(part: Part) -> None:
    """Both ranks know both branches, until one takes the other's."""
    model = part.model(Flagged())
    optimizer = sgd(model)
    for step, x in part.batches(5):
        loss = model(x, short=step == 1 or (part.odd and step == 3)).square().mean()
        part.learn(model, optimizer, loss)


def long_batch(part: Part) -> None:
    """One rank's last batch is long, and a long one takes another branch."""
    model = part.model(ByLength())
    optimizer = sgd(model)
    for step, x in part.batches(3, rows=4):
        x = x.repeat(4, 1) if part.odd and step == 2 else x
        loss = model(x).square().mean()
        part.learn(model, optimizer, loss)


def accumulating(model: nn.Module, x: torch.Tensor, odd: bool) -> None:
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(not odd)


def in_eval(model: nn.Module, x: torch.Tensor, odd: bool) -> None:
    model.train(not odd)


def dropping() -> nn.Module:
    return nn.Sequential(*mlp(), nn.Dropout(0.5))


def twice(loss: torch.Tensor, odd: bool) -> None:
    loss.backward(retain_graph=True)
    if odd:
        loss.backward()


def clipped(optimizer: torch.optim.Optimizer, model: nn.Module, odd: bool) -> None:
    if odd:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def scaled(loss: torch.Tensor, odd: bool) -> None:
    (loss * 8 if odd else loss).backward()


def with_other_number(odd_steps: int) -> Callable[[Part], None]:
    return lambda part: part.train(part.model(mlp()), num_steps=odd_steps if part.odd else 3)


def skipping_a_step(part: Part) -> None:
    """The odd rank leaves its second batch out: it is one step ahead from then on."""
    model = part.model(mlp())
    optimizer = sgd(model)
    for step, x in part.batches(4):
        if part.odd and step == 1:
            continue
        loss = model(x).square().mean()
        part.learn(model, optimizer, loss)


def catching(part: Part) -> None:
    """An error of the odd rank's own between forward and backward, after which it takes its next batch."""
    model = part.model(mlp())
    optimizer = sgd(model)
    for step, x in part.batches(4):
        try:
            loss = model(x).square().mean()
            if part.odd and step == LATER:
                raise ValueError("a loss of a batch that is not there")
            loss.backward()
            optimizer.step()
        except ValueError:
            optimizer.zero_grad()
            continue
        optimizer.zero_grad()
        part.note(loss=loss, weights=weights_of(model))


def whole_step(part: Part) -> None:
    """Whole steps, compiled in one; the odd rank's model is wider."""
    model = part.sharded(mlp(WIDTH, 12 if part.odd else WIDTH, WIDTH))
    optimizer = sgd(model)

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    settings = {"rank_timeout_s": timeout_s(part.way), "cache_bytes": 0}
    step = None
    if part.way != "eager":
        step = aotdist.train_step(model, loss_of, optimizer, backend=part.way, settings=settings)
    for _, x in part.batches():
        if step is not None:
            loss = step(x)
        else:
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        part.note(loss=loss.detach(), weights=weights_of(model))


def known_function(part: Part) -> None:
    """Two functions that both ranks have run, of which one rank takes the other."""

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce(x * 2, "sum", everyone())

    def largest(x: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce(x + 1, "max", everyone())

    functions = [part.compiled(doubled), part.compiled(largest)]
    for step, x in part.batches(4):
        chosen = functions[(step + (part.odd and step == 3)) % 2]
        part.note(result=chosen(x).sum())


SCENARIOS = (
    Scenario("Modes", "it evaluates in the first step, without gradients", "differs", without_grad(0),
             ways=("fx", "inductor")),
    Scenario("Modes", "it evaluates in the third step, for the first time", "differs", without_grad(LATER)),
    Scenario("Modes", "it evaluates where the other one trains; both have done both", "differs",
             after_evaluation,
             ways=("fx", "inductor")),
    Scenario("Modes", "its dropout is off (`eval()`)", "runs", trains(model=dropping, before=in_eval)),
    Scenario("Modes", "it takes a branch that both have taken before", "differs",
             flipped, ways=("fx", "inductor")),
    Scenario("Modes", "a long batch takes a branch that is new", "differs", long_batch),
    Scenario("Modes", "it takes another function that both have run before", "differs", known_function),
    Scenario("Modes", "it accumulates gradients in the third step", "differs", trains(before=accumulating)),
    Scenario("Modes", "its input takes a gradient", "differs",
             trains(before=lambda model, x, odd: x.requires_grad_(odd))),
    Scenario("Modes", "it recomputes a layer in the backward", "runs",
             lambda part: part.train(part.model(Recomputed(part.odd)))),
    Scenario("Modes", "`train_step`: its model is wider", "differs", whole_step),
    Scenario("Steps", "it leaves a backward out", "differs", skipping_backward(), ways=("fx", "inductor")),
    Scenario("Steps", "it calls backward twice", "differs", trains(backward=twice)),
    Scenario("Steps", "it calls the model once more, without gradients", "differs",
             trains(before=_if(evaluated))),
    Scenario("Steps", "it calls the model once more, with gradients", "differs",
             trains(before=_if(called))),
    Scenario("Steps", "it leaves the optimizer out", "runs",
             trains(update=lambda optimizer, model, odd: odd or optimizer.step())),
    Scenario("Steps", "it multiplies its loss", "runs", trains(backward=scaled)),
    Scenario("Steps", "it leaves a whole step out", "leaves", skipping_a_step),
    Scenario("Steps", "it stops one step earlier", "leaves", with_other_number(2)),
    Scenario("Steps", "it goes on for one step more", "leaves", with_other_number(4)),
    Scenario("Steps", "it clips gradients, which communicates, outside of what is compiled", "absent",
             trains(update=clipped)),
    Scenario("Steps", "it waits at a barrier, outside of what is compiled", "absent",
             trains(before=_if(at_barrier))),
    Scenario("Steps", "it catches an error of its own and takes the next batch", "differs", catching),
)  # fmt: skip
