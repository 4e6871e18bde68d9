"""`aotdist.compile` itself: how it is called, and how what it compiled is taken back."""

from __future__ import annotations

import copy
import pickle
import types
from typing import Any

import pytest
import torch
from torch import nn

import aotdist
from aotdist.torch_seam.versions import warn_of_untested_torch

SHOWN = ("source", "graphs", "explain")


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.GELU())


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.ones(2, 4)).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_a_decorator_takes_arguments() -> None:
    @aotdist.compile(backend="fx", dynamic=True)
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    for length in (3, 5, 7):
        assert torch.equal(double(torch.ones(length)), torch.full((length,), 2.0))
    assert len(double.artifacts) == 1
    assert double.__name__ == "double"


def test_a_decorator_makes_methods() -> None:
    class Scales:
        factor = 3.0

        @aotdist.compile(backend="fx")
        def call(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    scales = Scales()
    assert scales.call(torch.ones(2)).tolist() == [3.0, 3.0]
    assert (scales.call.__name__, len(scales.call.graphs)) == ("call", 1)
    assert str(aotdist.explain(scales.call)) == str(scales.call.explain())


@aotdist.compile(backend="fx")
def step_with_attributes(x: torch.Tensor) -> torch.Tensor:
    step_with_attributes.calls += 1
    step_with_attributes.last = x * step_with_attributes.scale
    return step_with_attributes.last.sum()


def test_attributes_are_those_of_the_function() -> None:
    step = step_with_attributes
    step.calls, step.scale = 0, torch.tensor(2.0)
    assert [step(torch.ones(2) * number).item() for number in (1, 2, 3)] == [4.0, 8.0, 12.0]
    assert (step.calls, step.last.tolist(), len(step.graphs)) == (3, [6.0, 6.0], 1)
    assert vars(step.__wrapped__)["calls"] == 3
    step.scale = torch.tensor(10.0)
    assert step(torch.ones(2)).item() == 20.0
    del step.calls
    assert not hasattr(step, "calls") and not hasattr(step.__wrapped__, "calls")


def test_a_copy_is_the_function_and_a_pickle_its_name() -> None:
    assert pickle.loads(pickle.dumps(step_with_attributes)) is step_with_attributes
    assert copy.deepcopy([step_with_attributes]) == [step_with_attributes]


@pytest.mark.parametrize(("settings", "dynamic"), [({"dynamic": False}, True), ({"dynamic": True}, None)])
def test_dynamic_is_the_setting(settings: dict[str, Any], dynamic: bool | None) -> None:
    model = aotdist.compile(small(), backend="fx", dynamic=dynamic, settings=settings)
    for rows in (2, 3, 5):
        assert model(torch.ones(rows, 4)).shape == (rows, 4)
    assert len(model.graphs) == 1


def test_eager_takes_the_compiled_call_off_again() -> None:
    model, expected = small(), gradients(small())
    before = dict(vars(model))
    aotdist.compile(model, backend="fx")
    compiled = gradients(model)
    assert all(name in vars(model) for name in SHOWN)
    assert aotdist.compile(model, backend="eager") is model
    aotdist.reset()  # which shows nothing again on a module that is not compiled any more
    assert vars(model).keys() == before.keys()
    assert not any(hasattr(model, name) for name in SHOWN)
    for ours in (compiled, gradients(model)):
        assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))
    with pytest.raises(aotdist.BadSettings, match="was not compiled\n  fix: .*`aotdist.compile`.*eager"):
        aotdist.explain(model)
    assert aotdist.compile(model, backend="fx")(torch.ones(2, 4)).shape == (2, 4)
    assert len(model.graphs) == 1


def test_eager_leaves_what_was_never_compiled_alone() -> None:
    model = small()
    before = dict(vars(model))
    assert aotdist.compile(model, backend="eager") is model and vars(model) == before


def test_eager_gives_a_function_back() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert isinstance(aotdist.compile(double, backend="eager"), types.FunctionType)
    assert aotdist.compile(aotdist.compile(double, backend="fx"), backend="eager") is double
    assert aotdist.compile(backend="eager")(double) is double


def test_eager_runs_training_steps_as_they_are_written() -> None:
    def losses(backend: str) -> list[torch.Tensor]:
        model = small()
        optimizer = torch.optim.AdamW(model.parameters())
        step = aotdist.train_step(model, loss_of, optimizer, clip=1.0, backend=backend)
        found = [step(torch.ones(2, 4)) for _ in range(3)]
        assert len(step.explain().artifacts) == (0 if backend == "eager" else 1)
        return found

    assert losses("eager") == losses("fx")


def test_eager_runs_graphs_of_dynamos_as_they_are() -> None:
    model, x = small(), torch.ones(2, 4)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aotdist", options={"backend": "eager"})
    assert torch.equal(compiled(x), model(x))


def test_a_torch_newer_than_tested_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    warn_of_untested_torch.cache_clear()
    said = r"torch 2\.99\.0\+cpu is newer than torch 2\.11 to 2\.\d+, which aotdist is tested with"
    with pytest.warns(UserWarning, match=said):
        aotdist.compile(small(), backend="fx")(torch.ones(2, 4))
    aotdist.compile(small(), backend="fx")(torch.ones(2, 4))  # a second warning would be an error


@pytest.mark.parametrize("version", ["2.11.0", "2.13.1+cu130", "2.14.1"])
def test_a_torch_that_is_tested_does_not_warn(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    warn_of_untested_torch.cache_clear()
    warn_of_untested_torch()
