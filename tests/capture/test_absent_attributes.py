"""What a program looks for and does not find counts as well: a class's value, a default, `hasattr`."""

from __future__ import annotations

import collections
import datetime
import decimal
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import aotdist
from aotdist.api import compiled_call


class Reader(nn.Module):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.flags: set[str] = set()
        self.queue = collections.deque([1.0])

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(x) * self.scale * getattr(self, "gain", 1.0) * getattr(self.config, "width", 1.0)
        return x * (2.0 if "big" in self.flags else 1.0) * self.queue[0]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a class's value": lambda m: setattr(m, "scale", 2.0),
    "a default": lambda m: setattr(m, "gain", 3.0),
    "a default of an object": lambda m: setattr(m.config, "width", 5.0),
    "a set": lambda m: m.flags.add("big"),
    "a queue": lambda m: m.queue.appendleft(7.0),
    "a method": lambda m: setattr(m, "act", lambda x: x * 11),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_appears_is_seen(name: str) -> None:
    eager, ours = Reader(), aotdist.compile(Reader(), backend="fx")
    for change in (lambda m: None, CHANGES[name]):
        change(eager)
        change(ours)
        assert torch.equal(eager(torch.ones(2)), ours(torch.ones(2)))


class Remembering(nn.Module):
    """Keeps what it needs at the next call, as recurrent models keep their state."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.state: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = "seen" if self.kind == "dictionary" else 0
        y = x if self.state is None else x + self.state[key]
        self.state = {"seen": y.detach()} if self.kind == "dictionary" else (y.detach(), 1)
        return y


@pytest.mark.parametrize("kind", ["tuple", "dictionary"])
def test_what_is_forgotten_between_calls(kind: str) -> None:
    """There is None, or a number, where a container was."""
    eager, ours = Remembering(kind), aotdist.compile(Remembering(kind), backend="fx")
    for at in range(7):
        if at in (2, 5):
            eager.state = ours.state = None
        x = torch.full((2,), float(at))
        assert torch.equal(eager(x), ours(x)), at
    for model in (eager, ours):
        model.state = 3.0
        with pytest.raises((TypeError, AttributeError)):
            model(torch.ones(2))


class Holding(nn.Module):
    """Reads what it holds, whatever that is."""

    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.held = held
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.held is None else x * self.read(self.held)


NOT_NAMED: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "queue of tensors": (
        lambda queue: queue[0],
        collections.deque([torch.ones(2)]),
        collections.deque([torch.zeros(2)]),
    ),
    "queue of lists": (lambda queue: queue[0][0], collections.deque([[1.0]]), collections.deque([[2.0]])),
    "set of tensors": (sum, {torch.ones(2)}, {torch.zeros(2)}),
    "decimal": (float, decimal.Decimal("1.5"), decimal.Decimal("2.5")),
    "date": (lambda date: date.year, datetime.date(2000, 1, 1), datetime.date(2001, 1, 1)),
    "pattern": (lambda pattern: len(pattern.pattern), re.compile("a"), re.compile("abc")),
    "values of a dictionary": (sum, {"a": 2}.values(), {"a": 3}.values()),
}


@pytest.mark.parametrize("name", NOT_NAMED)
def test_what_is_replaced_is_seen_where_nothing_in_it_has_a_name(name: str) -> None:
    read, first, second = NOT_NAMED[name]
    eager, ours = Holding(first, read), aotdist.compile(Holding(first, read), backend="fx")
    for held in (first, second, None, first):
        eager.held = ours.held = held
        assert torch.equal(eager(torch.ones(2)), ours(torch.ones(2)))


def test_what_is_in_a_queue_is_an_input() -> None:
    eager, ours = (Holding(collections.deque([torch.ones(2)]), lambda queue: queue[0]) for _ in range(2))
    aotdist.compile(ours, backend="fx")
    for at in range(3):
        for model in (eager, ours):
            model.held[0] = torch.full((2,), float(at))
        assert torch.equal(eager(torch.ones(2)), ours(torch.ones(2)))
    assert len(compiled_call(ours).graphs) == 1


@dataclass(slots=True)
class Slotted:
    scale: float = 1.0


class Plain:
    scale = 1.0


@pytest.mark.parametrize("held", [Slotted(), Plain()], ids=["slots", "class"])
def test_attributes_of_objects(held: Any) -> None:
    compiled = aotdist.compile(lambda x: x * held.scale, backend="fx")
    assert compiled(torch.ones(())) == 1
    held.scale = 4.0
    assert compiled(torch.ones(())) == 4


def by_one_name(x: torch.Tensor, held: Any) -> torch.Tensor:
    return x * 2 if hasattr(held, "mark") else x * 3


def by_several_names(x: torch.Tensor, held: Any) -> torch.Tensor:
    for name in ("sign", "mark"):
        if hasattr(held, name):
            x = x * 2
    return x * 3


def by_all_names(x: torch.Tensor, held: Any) -> torch.Tensor:
    return x * sum(not name.startswith("_") for name in dir(held))


@pytest.mark.parametrize(
    ("program", "of_argument"),
    [
        (by_one_name, False),
        (by_one_name, True),
        (by_several_names, False),
        (by_several_names, True),
        (by_all_names, False),
    ],
)
def test_what_is_only_asked_for_is_seen_to_come_and_go(
    program: Callable[..., torch.Tensor], of_argument: bool
) -> None:
    held: Any = torch.ones(2) if of_argument else SimpleNamespace()

    def asks(x: torch.Tensor) -> torch.Tensor:
        return program(x, x if of_argument else held)

    compiled, x = aotdist.compile(asks, backend="fx"), held if of_argument else torch.ones(2)
    for change in (lambda: None, lambda: setattr(held, "mark", 1), lambda: delattr(held, "mark")):
        change()
        assert torch.equal(compiled(x), asks(x))


class First(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "first"):
            self.first = x.clone()
        return x - self.first


class Sum(nn.Module):
    so_far = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.so_far = x if self.so_far is None else self.so_far + x
        return self.so_far * 1


@pytest.mark.parametrize("kind", [First, Sum])
def test_attributes_that_the_program_makes(kind: type[nn.Module]) -> None:
    eager, ours = kind(), aotdist.compile(kind(), backend="fx")
    for number in range(4):
        x = torch.full((2,), float(number + 1))
        assert torch.equal(eager(x), ours(x))
    assert len(compiled_call(ours).artifacts) == 2


def test_zeros_have_signs() -> None:
    compiled = aotdist.compile(lambda x, k: x / k, backend="fx")
    assert compiled(torch.ones(()), 0.0) == -compiled(torch.ones(()), -0.0)
