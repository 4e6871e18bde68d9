"""Ranks that raise, die, come late, or do not come."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.ranks.part import Part, mlp
from benchmarks.ranks.scenarios.scenario import Scenario

LATE_S = 6.0
AGES_S = 1000.0


class Interrupted(nn.Module):
    """Layers, in whose forward something happens: where it is compiled, while it is compiled."""

    def __init__(self, happens: Callable[[], object]) -> None:
        super().__init__()
        self.layers = mlp()
        self.happens = happens

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.happens()
        return self.layers(x)


def before_step(step: int, act: Callable[[], object]) -> Callable[[Part], None]:
    """The odd rank does that before a step."""
    return lambda part: part.train(
        part.model(mlp()), before=lambda at: act() if part.odd and at == step else None
    )


def between(step: int, act: Callable[[], object]) -> Callable[[Part], None]:
    """The odd rank does that between a forward and its backward."""
    return lambda part: part.train(
        part.model(mlp()), between=lambda at: act() if part.odd and at == step else None
    )


def in_forward(act: Callable[[], object]) -> Callable[[Part], None]:
    """The odd rank does that in its first forward."""

    def trained(part: Part) -> None:
        pending = [act] if part.odd else []
        part.train(part.model(Interrupted(lambda: pending.pop()() if pending else None)))

    return trained


def before_anything(act: Callable[[], object]) -> Callable[[Part], None]:
    """The odd rank does that as soon as it has joined; the others begin at once."""

    def trained(part: Part) -> None:
        if part.odd:
            act()
        part.train(part.model(mlp()))

    return trained


def in_backward(act: Callable[[], object]) -> Callable[[Part], None]:
    """The odd rank does that in a hook of the loss's gradient."""

    def hook(_: torch.Tensor) -> None:
        act()

    def trained(part: Part) -> None:
        model = part.model(mlp())
        for step, x in part.batches():
            loss = model(x).square().mean()
            if part.odd and step == 1:
                loss.register_hook(hook)
            loss.backward()
            part.note(loss=loss)

    return trained


def unsupported(part: Part) -> None:
    """The odd rank's program reads data, which cannot be compiled; eager trains it."""

    class Reading(Interrupted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers(x)
            return -x if part.odd and x.sum() > 1e9 else x

    part.train(part.model(Reading(lambda: None)))


def slow(part: Part) -> None:
    part.train(part.model(mlp()), before=lambda step: time.sleep(1.0 if part.odd else 0.0))


def new_shape_takes_long(part: Part) -> None:
    """A smaller last batch, which is new to the odd rank alone, takes it long to compile."""
    model = part.model(Interrupted(lambda: None))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x in part.batches():
        if part.odd and step == 2:
            x = x[:3]
            if part.way != "eager":
                time.sleep(LATE_S)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        part.note(loss=loss)


def raises(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def killed(by: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), by)


def sleeps(seconds: float) -> Callable[[], None]:
    return lambda: time.sleep(seconds)


DIES: dict[str, Any] = {"killed_by": "SIGKILL"}
FOUR: dict[str, Any] = {"num_ranks": 4, "odd_rank": 2}
HOST: dict[str, Any] = {"odd_rank": 0}

SCENARIOS = (
    Scenario("Exceptions", "its data loader raises before the third step", "leaves",
             before_step(2, raises(ValueError("no more data")))),
    Scenario("Exceptions", "its data loader raises before the first step", "leaves",
             before_step(0, raises(ValueError("no data")))),
    Scenario("Exceptions", "it raises while it is compiled", "leaves",
             in_forward(raises(ValueError("no config"))),
             ways=("fx", "inductor")),
    Scenario("Exceptions", "its program cannot be compiled", "leaves", unsupported),
    Scenario("Exceptions", "it raises between forward and backward", "leaves",
             between(1, raises(MemoryError("no memory")))),
    Scenario("Exceptions", "a hook raises in its backward", "leaves",
             in_backward(raises(ValueError("bad gradient")))),
    Scenario("Exceptions", "it is interrupted (Ctrl-C)", "leaves",
             before_step(2, raises(KeyboardInterrupt()))),
    Scenario("Exceptions", "rank 0, which hosts the store, raises before the third step", "leaves",
             before_step(2, raises(ValueError("no more data"))), **HOST),
    Scenario("Deaths", "it is killed before it calls `aotdist.compile`", "absent", before_anything(killed()),
             **DIES),
    Scenario("Deaths", "it is killed before its first step", "leaves", before_step(0, killed()), **DIES),
    Scenario("Deaths", "it is killed while it compiles", "leaves", in_forward(killed()), **DIES),
    Scenario("Deaths", "it is killed between steps", "leaves", before_step(2, killed()), **DIES,
             ways=("fx", "inductor")),
    Scenario("Deaths", "it is killed between forward and backward", "leaves", between(1, killed()), **DIES),
    Scenario("Deaths", "it crashes (SIGSEGV)", "leaves", before_step(2, killed(signal.SIGSEGV)),
             killed_by="SIGSEGV"),
    Scenario("Deaths", "it leaves with exit code 3", "leaves", before_step(2, lambda: os._exit(3))),
    Scenario("Deaths", "rank 0, which hosts the store, is killed before it calls `aotdist.compile`", "leaves",
             before_anything(killed()), **DIES, **HOST),
    Scenario("Deaths", "rank 0, which hosts the store, is killed while it compiles", "leaves",
             in_forward(killed()),
             **DIES, **HOST),
    Scenario("Deaths", "rank 0, which hosts the store, is killed between steps", "leaves",
             before_step(2, killed()),
             **DIES, **HOST),
    Scenario("Deaths", "rank 0 is killed between steps; the launcher hosts the store", "leaves",
             before_step(2, killed()), **DIES, **HOST, store="launcher"),
    Scenario("Deaths", "rank 2 of 4 is killed between steps", "leaves",
             before_step(2, killed()), **DIES, **FOUR),
    Scenario("Deaths", "rank 2 of 4 is killed while it compiles", "leaves",
             in_forward(killed()), **DIES, **FOUR),
    Scenario("Late", f"it comes to the first step {LATE_S:g} s late", "runs", before_step(0, sleeps(LATE_S))),
    Scenario("Late", f"it comes to the third step {LATE_S:g} s late", "runs", before_step(2, sleeps(LATE_S)),
             ways=("fx", "inductor")),
    Scenario("Late", f"it compiles {LATE_S:g} s longer", "runs", in_forward(sleeps(LATE_S))),
    Scenario("Late", f"a batch that is new to it alone takes {LATE_S:g} s to compile", "runs",
             new_shape_takes_long),
    Scenario("Late", "each of its steps takes 1 s longer", "runs", slow),
    Scenario("Late", "it never comes to the first step", "absent", before_step(0, sleeps(AGES_S))),
    Scenario("Late", "it never comes to the third step", "absent", before_step(2, sleeps(AGES_S))),
    Scenario("Late", "it is stopped (SIGSTOP) before the third step", "absent",
             before_step(2, killed(signal.SIGSTOP))),
)  # fmt: skip
