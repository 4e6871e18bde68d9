"""Functions as things that change: their code, their attributes, and the methods of classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import aotdist
from aotdist.api import compiled_call


class Scaled:
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Layer(torch.nn.Module):
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(x)


def five_times(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 5


def scene(kind: str) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], Any]]:
    """A program, and a change of what it calls."""

    def settings() -> None: ...

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def triple(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    settings.factor = 2.0  # type: ignore[attr-defined]
    scaled, layer = type("Scaled", (Scaled,), dict(vars(Scaled)))(), Layer()
    scenes: dict[str, tuple[Any, Any]] = {
        "an attribute": (lambda x: x * settings.factor, lambda: setattr(settings, "factor", 4.0)),
        "a tensor": (
            lambda x: x * settings.factor,
            lambda: setattr(settings, "factor", torch.full((2,), 3.0)),
        ),
        "a new attribute": (
            lambda x: x * getattr(settings, "other", 1.0),
            lambda: setattr(settings, "other", 3.0),
        ),
        "code": (lambda x: double(x), lambda: setattr(double, "__code__", triple.__code__)),
        "code of the program": (double, lambda: setattr(double, "__code__", triple.__code__)),
        "a method": (lambda x: scaled.scale(x), lambda: setattr(type(scaled), "scale", five_times)),
        "a method of a module": (lambda x: layer(x), lambda: setattr(Layer, "scale", five_times)),
    }
    return scenes[kind]


@pytest.mark.parametrize(
    "kind",
    [
        *("an attribute", "a tensor", "a new attribute", "code", "code of the program"),
        *("a method", "a method of a module"),
    ],
)
def test_changes_are_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[torch.Tensor]] = []
    for compile_ in (lambda fn: fn, lambda fn: aotdist.compile(fn, backend="fx")):
        monkeypatch.setattr(Layer, "scale", Layer.scale)
        program, change = scene(kind)
        call = compile_(program)
        results = [call(torch.ones(2)), call(torch.ones(2))]
        change()
        seen.append([*results, call(torch.ones(2)), call(torch.ones(2))])
        monkeypatch.undo()
    assert torch.equal(*map(torch.stack, seen))
    assert not torch.equal(seen[0][0], seen[0][-1])
    assert len(compiled_call(call).artifacts) == 2


def counted(x: torch.Tensor) -> torch.Tensor:
    counted.calls += 1  # type: ignore[attr-defined]
    return x * counted.calls  # type: ignore[attr-defined]


def test_a_function_that_counts_its_calls() -> None:
    for program in (counted, lambda x: counted(x)):
        counted.calls = 0  # type: ignore[attr-defined]
        call = aotdist.compile(program, backend="fx")
        assert [call(torch.ones(())).item() for _ in range(4)] == [1, 2, 3, 4]
        assert counted.calls == 4 and len(call.artifacts) == 1  # type: ignore[attr-defined]


class Array(torch.nn.Module):
    def __init__(self, numpy: Any, size: int) -> None:
        super().__init__()
        self.values = numpy.ones(size, numpy.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.from_numpy(self.values)[:2]


@pytest.mark.parametrize("size", [2, 1 << 19])
def test_an_array_that_a_tensor_shares_may_be_replaced(size: int) -> None:
    numpy = pytest.importorskip("numpy")
    model = aotdist.compile(Array(numpy, size), backend="fx")
    assert torch.equal(model(torch.ones(2)), torch.ones(2))
    model.values.fill(3)
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 3.0))
    assert len(compiled_call(model).artifacts) == 1
    model.values = numpy.full(size, 5, numpy.float32)
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 5.0))


def test_an_assertion_in_code_that_also_keeps_a_log() -> None:
    log = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        assert x.dim() == 1, "a vector"
        log.append(x.shape[0])
        return x * 2

    compiled = aotdist.compile(fn, backend="fx")
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert log == [3, 3] and len(compiled.artifacts) == 1
