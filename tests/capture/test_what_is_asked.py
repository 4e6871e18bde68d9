"""What a program asks of tensors, and of objects that are no containers: a call that finds another answer is
eager's, too."""

from __future__ import annotations

import contextvars
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import aotdist

Calls = Callable[[Callable[..., Any]], Iterator[torch.Tensor]]


class Setting:
    scale = 2.0


VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)
UNSET: contextvars.ContextVar[float] = contextvars.ContextVar("UNSET")
SETTING = Setting()
REFERENCE = weakref.ref(SETTING)
TABLE = np.ones(3, dtype=np.float32)
WEIGHT = torch.ones(3)


@pytest.fixture(autouse=True)
def as_they_were(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test, and every run of one, finds the same."""
    monkeypatch.delenv("AOTDIST_TEST_SCALE", raising=False)
    token = VARIABLE.set(1.0)
    yield
    VARIABLE.reset(token)
    reset()


def reset() -> None:
    VARIABLE.set(1.0)
    os.environ.pop("AOTDIST_TEST_SCALE", None)
    TABLE[:] = 1
    SETTING.scale = 2.0
    vars(WEIGHT).clear()
    WEIGHT.scale = 2.0


def leaf_or_not(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.is_leaf else x * 3


def with_history_or_not(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.grad_fn is None else x * 3


def a_leaf_and_a_result(fn: Callable[..., Any]) -> Iterator[torch.Tensor]:
    x = torch.ones(3, requires_grad=True)
    for given in (x, x * 1, x.detach(), x):
        yield fn(given)


def by_its_version(x: torch.Tensor) -> torch.Tensor:
    y = x * x._version
    x.add_(1)
    return y + x._version


def written_between(fn: Callable[..., Any]) -> Iterator[torch.Tensor]:
    x = torch.ones(3)
    for _ in range(3):
        yield fn(x)
        x.mul_(2)


def by_attribute_of_argument(x: torch.Tensor) -> torch.Tensor:
    return x * getattr(x, "scale", 1.0)


def marked_between(fn: Callable[..., Any]) -> Iterator[torch.Tensor]:
    x = torch.ones(3)
    yield fn(x)
    for scale in (3.0, 4.0):
        x.scale = scale
        yield fn(x)
    del x.scale
    yield fn(x)


def by_attribute_of_closure(x: torch.Tensor) -> torch.Tensor:
    return x * WEIGHT.scale


def assigns_attribute_of_closure(x: torch.Tensor) -> torch.Tensor:
    WEIGHT.scale = WEIGHT.scale * 2
    return x * WEIGHT


def closure_marked_between(fn: Callable[..., Any]) -> Iterator[torch.Tensor]:
    for scale in (2.0, 5.0):
        WEIGHT.scale = scale
        yield fn(torch.ones(3))
        yield torch.tensor(WEIGHT.scale)


def by_context(x: torch.Tensor) -> torch.Tensor:
    return x * VARIABLE.get() if UNSET.get(None) is None else x


def in_another_context(fn: Callable[..., Any]) -> Iterator[torch.Tensor]:
    yield fn(torch.ones(3))
    VARIABLE.set(4.0)
    yield fn(torch.ones(3))


def by_reference(x: torch.Tensor) -> torch.Tensor:
    setting = REFERENCE()
    assert setting is not None
    return x * setting.scale


def referent_changed(fn: Callable[..., Any]) -> Iterator[torch.Tensor]:
    for scale in (2.0, 3.0):
        SETTING.scale = scale
        yield fn(torch.ones(3))


def by_environment(x: torch.Tensor) -> torch.Tensor:
    return x * float(os.environ.get("AOTDIST_TEST_SCALE", "1"))


def by_getenv(x: torch.Tensor) -> torch.Tensor:
    return x * float(os.getenv("AOTDIST_TEST_SCALE", "1"))


def environment_changed(fn: Callable[..., Any]) -> Iterator[torch.Tensor]:
    for scale in ("1", "2"):
        os.environ["AOTDIST_TEST_SCALE"] = scale
        yield fn(torch.ones(3))


def by_array(x: torch.Tensor) -> torch.Tensor:
    return x * float(TABLE[0])


def sharing_array(x: torch.Tensor) -> torch.Tensor:
    return x * torch.from_numpy(TABLE)


def array_changed(fn: Callable[..., Any]) -> Iterator[torch.Tensor]:
    for value in (1.0, 3.0):
        TABLE[:] = value
        yield fn(torch.ones(3))


@pytest.mark.parametrize(
    ("program", "calls"),
    [
        (leaf_or_not, a_leaf_and_a_result),
        (with_history_or_not, a_leaf_and_a_result),
        (by_its_version, written_between),
        (by_attribute_of_argument, marked_between),
        (by_attribute_of_closure, closure_marked_between),
        (assigns_attribute_of_closure, closure_marked_between),
        (by_context, in_another_context),
        (by_reference, referent_changed),
        (by_environment, environment_changed),
        (by_getenv, environment_changed),
        (by_array, array_changed),
        (sharing_array, array_changed),
    ],
)
def test_calls_are_as_in_eager(program: Callable[..., Any], calls: Calls) -> None:
    found: list[list[torch.Tensor]] = []
    for fn in (program, aotdist.compile(program, backend="fx")):
        reset()
        found.append([result.detach().clone() for result in calls(fn)])
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found)), found


@pytest.mark.parametrize(
    "asks",
    [
        lambda x: x * 2 if x._is_view() else x,
        lambda x: x * 2 if x._base is None else x,
        lambda x: x * 2 if x.is_inference() else x,
        lambda x: x * 2 if x.retains_grad else x,
    ],
)
def test_what_only_the_callers_tensor_can_answer_is_refused(asks: Callable[..., Any]) -> None:
    with pytest.raises(aotdist.UnsupportedProgram, match=r"the program asks for `args\[0\]\."):
        aotdist.compile(asks, backend="fx")(torch.ones(3, requires_grad=True) * 1)


def test_arrays_that_become_tensors_are_read_at_each_call() -> None:
    compiled = aotdist.compile(sharing_array, backend="fx")
    list(array_changed(compiled))
    assert compiled.source.count("def call") == 1


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.linear.weight.scale = 2.0
        self.linear.weight.offset = torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.linear.weight
        weight.num_uses = getattr(weight, "num_uses", 0) + 1
        return self.linear(x) * weight.scale + weight.offset


def test_attributes_of_parameters_are_read_and_assigned() -> None:
    found: list[list[Any]] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = Scaled()
        fn = aotdist.compile(module, backend="fx") if compiled else module
        weight, seen = module.linear.weight, list[Any]()
        for scale, offset in ((2.0, 1.0), (3.0, 1.0), (3.0, 5.0)):
            weight.scale, weight.offset = scale, torch.full((3,), offset)
            seen += [fn(torch.ones(2, 3)).tolist(), weight.num_uses]
        found.append(seen)
    assert found[0] == found[1]


def test_attributes_of_wrappers_are_read() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
            self.weight.scale = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight * self.weight.scale

    module = Module()
    compiled = aotdist.compile(module, backend="fx")
    for scale in (2.0, 3.0):
        module.weight.scale = scale
        found = compiled(torch.ones(3))
        assert isinstance(found, TwoTensor) and torch.equal(found.a, torch.full((3,), scale))


class Alternating(nn.Module):
    """Asks whether there is a tensor, with which it computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.ones(3)), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        self.last = y.detach() if self.last is None else None
        return y.sin()


def test_whether_there_is_a_tensor_is_asked_again() -> None:
    eager, ours = Alternating(), aotdist.compile(Alternating(), backend="fx")
    for _ in range(5):
        for module in (eager, ours):
            module(torch.ones(3))
        assert (ours.last is None) is (eager.last is None)
    assert len(ours.graphs) == 2


def test_whether_a_closed_over_tensor_is_there_is_asked_again() -> None:
    scale: torch.Tensor | None = torch.ones(3)

    def program(x: torch.Tensor) -> torch.Tensor:
        return x if scale is None else -x

    compiled = aotdist.compile(program, backend="fx")
    assert compiled(torch.ones(1)).item() == -1
    scale = None
    assert compiled(torch.ones(1)).item() == 1
    scale = torch.zeros(2)
    assert compiled(torch.ones(1)).item() == -1
